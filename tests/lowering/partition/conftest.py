"""The families that the benchmarks define, and programs lowered on meshes without devices."""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from stablecast.ir import mlir

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def _load(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def families() -> ModuleType:
    return _load("partition_families")


@pytest.fixture(scope="session")
def fresh(families: ModuleType) -> ModuleType:
    return _load("partition_fresh")


@pytest.fixture(scope="session")
def small(families: ModuleType) -> ModuleType:
    return _load("partition_small")


class OnMesh:
    """Shapes and lowering on an abstract mesh."""

    def __init__(self, axes: Mapping[str, int]) -> None:
        self.mesh = AbstractMesh(tuple(axes.values()), tuple(axes))

    def sharding(self, *axes: Any) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def shape(self, *sizes: int, axes: tuple[Any, ...] = (), dtype: Any = "float32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=self.sharding(*axes))

    def module(self, function: Callable[..., Any], *args: Any, platform: str = "cpu", **options: Any) -> bytes:
        traced = jax.jit(function, **options).trace(*args)
        return mlir.write_bytecode(traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo"))


@pytest.fixture
def on() -> Callable[..., OnMesh]:
    return lambda **axes: OnMesh(axes)
