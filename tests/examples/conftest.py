"""The examples as modules, and the operations of what they lower to."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True, slots=True)
class Lowered:
    """A step lowered for an absent GPU."""

    module: Any

    def named(self, name: str) -> list[Any]:
        """All operations of that name, in every function and region."""
        found: list[Any] = []

        def visit(op: Any) -> Any:
            if op.name == name:
                found.append(op)
            return ir.WalkResult.ADVANCE

        self.module.operation.walk(visit)
        return found

    def dot_flops(self) -> int:
        return sum(map(_dot_flops, self.named("stablehlo.dot_general")))

    def conv_flops(self) -> int:
        return sum(map(_conv_flops, self.named("stablehlo.convolution")))


def _shape(value: Any) -> Sequence[int]:
    return ir.RankedTensorType(value.type).shape


def _dot_flops(op: Any) -> int:
    numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    lhs = _shape(op.operands[0])
    return 2 * math.prod(_shape(op.results[0])) * math.prod(lhs[i] for i in numbers.lhs_contracting_dimensions)


def _conv_flops(op: Any) -> int:
    numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    kernel = _shape(op.operands[1])
    window = math.prod(kernel[i] for i in numbers.kernel_spatial_dimensions)
    return 2 * math.prod(_shape(op.results[0])) * window * kernel[numbers.kernel_input_feature_dimension]


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def llama() -> ModuleType:
    return _load("llama")


@pytest.fixture(scope="session")
def resnet() -> ModuleType:
    return _load("resnet")


@pytest.fixture(scope="session")
def mlp() -> ModuleType:
    return _load("mlp")


@pytest.fixture(scope="session")
def lower() -> Callable[..., Lowered]:
    def lower(function: Any, args: tuple[Any, ...]) -> Lowered:
        lowered = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
        return Lowered(lowered.compiler_ir("stablehlo"))

    return lower


@pytest.fixture(scope="session")
def example() -> Callable[[str], ModuleType]:
    """Any other example by name, loaded once."""
    return cache(_load)
