"""Runs emitted modules with jax on the CPU beside eager torch; without torch the tests that need it are skipped."""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples"


def load_module(path: Path) -> ModuleType:
    """The module in a file, loaded once."""
    name = f"torch_tests_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture
def example() -> Callable[[str], ModuleType]:
    """An example by name, as a module."""
    return lambda name: load_module(EXAMPLES / f"{name}.py")


@pytest.fixture
def execute() -> Callable[..., dict[str, Any]]:
    """Runs a workload's module: (workload, values by argument name) -> results by name."""
    helper = load_module(HERE / "execute.py")

    def run(workload: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        with jax.enable_x64(True):
            return helper.execute(workload, values)

    return run


@pytest.fixture
def error_of() -> Callable[[Any, Any], float]:
    """Largest difference over the largest value."""
    return load_module(HERE / "execute.py").relative_error


@pytest.fixture
def compare(execute: Callable[..., dict[str, Any]], error_of: Callable[[Any, Any], float]) -> Callable[..., Any]:
    """Captures a function, runs what was emitted, and returns the workload and the worst error against eager."""
    torch = pytest.importorskip("torch", reason="torch is an optional extra")
    from stablecast.frontends.torch import capture_torch

    def run(function: Callable[..., Any], *inputs: Any) -> tuple[Any, float]:
        held = tuple(torch.utils._pytree.tree_map(lambda leaf: leaf.clone(), one) for one in inputs)
        workload = capture_torch(None, function, inputs, device="cpu")
        wanted = torch.utils._pytree.tree_leaves(function(*held))
        leaves = torch.utils._pytree.tree_leaves(inputs)
        names = [argument.name for argument in workload.args if argument.kind == "batch"]
        order = {name: index for index, name in enumerate(_labels(function, inputs, torch))}
        found = execute(workload, {name: leaves[order[name]] for name in names})
        results = [value for name, value in found.items() if name.startswith("result")]
        assert len(results) == len(wanted)
        return workload, max((error_of(a, b) for a, b in zip(results, wanted, strict=True)), default=0.0)

    return run


def _labels(function: Callable[..., Any], inputs: tuple[Any, ...], torch: Any) -> list[str]:
    import inspect

    tree = torch.utils._pytree
    names = list(inspect.signature(function).parameters)
    return [
        name + tree.keystr(path)
        for name, held in zip(names, inputs, strict=True)
        for path, _ in tree.tree_flatten_with_path(held)[0]
    ]


@pytest.fixture
def training(execute: Callable[..., dict[str, Any]], error_of: Callable[[Any, Any], float]) -> Callable[..., Any]:
    """Captures a training step and compares its results and gradients with eager's.

    (build(device) -> (model, optimizer), step, inputs) -> workload, errors by name.
    """
    torch = pytest.importorskip("torch", reason="torch is an optional extra")
    from stablecast.frontends.torch import capture_torch

    def run(
        build: Callable[..., Any], step: Callable[..., Any], inputs: tuple[Any, ...]
    ) -> tuple[Any, dict[str, float]]:
        def with_gradients(model: Any, optimizer: Any, *batch: Any) -> Any:
            loss = step(model, optimizer, *batch)
            return loss, {name: param.grad for name, param in model.named_parameters()}

        workload = capture_torch(lambda: build("cuda"), with_gradients, inputs)
        model, optimizer = build("cpu")
        values = {name: tensor.detach().clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        batch = [argument.name for argument in workload.args if argument.kind == "batch"]
        values |= dict(zip(batch, torch.utils._pytree.tree_leaves(inputs), strict=True))
        loss, gradients = with_gradients(model, optimizer, *inputs)
        found = execute(workload, values)
        errors = {name: error_of(found[f"result[1]['{name}']"], grad) for name, grad in gradients.items()}
        return workload, errors | {"loss": error_of(found["result[0]"], loss)}

    return run


def largest(errors: Mapping[str, float]) -> float:
    return float(np.max(list(errors.values())))
