"""Lowers JAX functions for any platform and accounts for them."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

from stablecast.ir.accounting import Account, Conventions, account
from stablecast.ir.mlir import write_bytecode
from stablecast.ir.program import Program
from stablecast.ir.reader import read


def _lower(function: Callable[..., Any], *args: Any, platform: str = "cpu", **jit: Any) -> Program:
    lowered = jax.jit(function, **jit).trace(*args).lower(lowering_platforms=(platform,))
    return read(write_bytecode(lowered.compiler_ir("stablehlo")))


@pytest.fixture(scope="session")
def lower() -> Callable[..., Program]:
    """A JAX function and its arguments to the program that it lowers to."""
    return _lower


@pytest.fixture(scope="session")
def account_of() -> Callable[..., Account]:
    """A JAX function and its arguments to its account; `conventions` by keyword."""

    def run(
        function: Callable[..., Any], *args: Any, conventions: Conventions | None = None, **options: Any
    ) -> Account:
        return account(_lower(function, *args, **options), conventions)

    return run


@pytest.fixture(scope="session")
def account_text() -> Callable[..., Account]:
    """The body of an entry function, as text, to its account: `account_text("(%a: tensor<4xf32>) -> ...", body)`."""

    def run(signature: str, body: str, conventions: Conventions | None = None, rest: str = "") -> Account:
        text = f"func.func @main{signature} {{\n{body}\n}}\n{rest}"
        return account(read(text.encode()), conventions)

    return run
