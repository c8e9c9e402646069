"""`torch.export` programs, `.pt2` files and FX graphs."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import logging
import re
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from stablecast.frontends.torch import assemble
from stablecast.frontends.torch.capture import fake_state
from stablecast.frontends.torch.places import is_users
from stablecast.frontends.torch.private import load, torch
from stablecast.frontends.torch.session import Session
from stablecast.frontends.torch.state import Named
from stablecast.ir.errors import InputError
from stablecast.ir.program import ArgumentKind
from stablecast.ir.workload import Workload


def capture_exported(program: Any, device: str = "cuda", *, source: str = "") -> Workload:
    """An `ExportedProgram`, or the path of a `.pt2` file that holds one; its weights are not read again.

    Raises `InputError` for a file that is no exported program, and for dynamic shapes.
    """
    if isinstance(program, (str, Path)):
        source = source or str(program)
        program = _load(Path(program))
    signature = program.graph_signature
    session = Session((), 0, device, "math")
    with session.open():
        holders = [node for node in program.graph.nodes if node.op == "placeholder"]
        tensors = [_input(session, node, spec) for node, spec in zip(holders, signature.input_specs, strict=True)]
        interpreter = _interpreter(program.graph_module, session)
        fake_state(session, program.graph_module)

        def run() -> Any:
            with torch.no_grad():
                return _written(
                    interpreter.run(*tensors),
                    signature,
                    dict(zip((node.name for node in holders), tensors, strict=True)),
                )

        out = _structured(program, session.record(run))
        return assemble.workload(session, out, source or "exported program", "exported")


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def _interpreter(graph_module: Any, session: Session) -> Any:
    """Runs a graph node by node, each in the place of the module and line that it was exported from."""
    places = session.recorder.places

    class Placed(load("torch.fx").Interpreter):  # type: ignore[misc]
        def run_node(self, n: Any) -> Any:
            frames = [found for found in _FRAME.findall(n.meta.get("stack_trace") or "") if is_users(found[0])]
            places.line = (frames[-1][0], int(frames[-1][1])) if frames else None
            held: dict[str, Any] = n.meta.get("nn_module_stack") or {}
            stack = list(held.values())
            if stack:
                places.modules.append(_path(stack))
            try:
                return super().run_node(n)
            finally:
                places.line = None
                if stack:
                    places.modules.pop()

    return Placed(graph_module)


def _path(stack: list[Any]) -> str:
    """`Net/layers/0` of the (path, class) pairs of a node's modules, outermost first."""
    root = str(stack[0][1]).rpartition(".")[2]
    inner = str(stack[-1][0]).replace(".", "/") if len(stack) > 1 else ""
    return f"{root}/{inner}" if inner else root


def _structured(program: Any, results: list[Any]) -> Any:
    """The results in the nest that the exported module returned."""
    shape = program.call_spec.out_spec
    fits = shape is not None and shape.num_leaves == len(results)
    return load("torch.utils._pytree").tree_unflatten(results, shape) if fits else results


def _load(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        return load("torch.export").load(str(path))
    except (RuntimeError, ValueError, OSError, LookupError, BadZipFile):
        raise InputError(
            f"{path} is not an exported program of this torch", "write it with torch.export.save, of torch 2.13"
        ) from None
    finally:
        logging.disable(before)


def _input(session: Session, node: Any, spec: Any) -> Any:
    """The fake tensor of a placeholder, named after what it was in the module."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return value if not hasattr(spec.arg, "value") else spec.arg.value
    if any(not isinstance(size, int) for size in value.shape):
        raise InputError(
            f"the exported program's input '{node.name}' has the dynamic shape {tuple(value.shape)}",
            "export it with fixed shapes",
        )
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    kind = {"PARAMETER": ArgumentKind.PARAM, "BUFFER": ArgumentKind.PARAM, "CONSTANT_TENSOR": ArgumentKind.CONST}.get(
        spec.kind.name, ArgumentKind.BATCH
    )
    session.names.known[made.untyped_storage()._cdata] = Named(spec.target or node.name, kind)
    return made


def _written(results: Any, signature: Any, inputs: dict[str, Any]) -> Any:
    """The user's results; new values of buffers are written into them, as the module would."""
    targets = {spec.target: spec.arg.name for spec in signature.input_specs if spec.target}
    kept: list[Any] = []
    for value, spec in zip(results, signature.output_specs, strict=True):
        if spec.kind.name in ("BUFFER_MUTATION", "USER_INPUT_MUTATION", "PARAMETER_MUTATION"):
            inputs[targets.get(spec.target, spec.target)].copy_(value)
        elif spec.kind.name in ("USER_OUTPUT", "LOSS_OUTPUT"):
            kept.append(value)
    return kept
