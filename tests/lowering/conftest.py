"""JAX functions as device programs."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

from stablecast.ir import mlir
from stablecast.ir.accounting.values import Conventions
from stablecast.ir.device_program import DeviceProgram
from stablecast.ir.reader import read
from stablecast.lowering.device import Target, lower

Lower = Callable[..., DeviceProgram]


@pytest.fixture
def lowered() -> Lower:
    """Lowers `function(*shapes)`; `donate` as in `jax.jit`."""

    def make(
        function: Callable[..., Any],
        *args: Any,
        donate: tuple[int, ...] = (),
        platform: str = "cuda",
        target: Target | None = None,
        conventions: Conventions | None = None,
        fused: bool = True,
    ) -> DeviceProgram:
        traced = jax.jit(function, donate_argnums=donate).trace(*args)
        module = traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
        return lower(read(mlir.write_bytecode(module)), target or Target(platform), conventions, fused=fused)

    return make
