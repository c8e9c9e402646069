"""`torch.export` programs, `.pt2` files and FX graphs."""

from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from stablecast.frontends.torch import assemble
from stablecast.frontends.torch.capture import fake_state
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
        interpreter = load("torch.fx").Interpreter(program.graph_module)
        fake_state(session, program.graph_module)

        def run() -> Any:
            with torch.no_grad():
                return _written(
                    interpreter.run(*tensors),
                    signature,
                    dict(zip((node.name for node in holders), tensors, strict=True)),
                )

        out = session.record(run)
        return assemble.workload(session, out, source or "exported program", "exported")


def _load(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    try:
        return load("torch.export").load(str(path))
    except (RuntimeError, ValueError, OSError, KeyError, BadZipFile) as error:
        raise InputError(
            f"{path} is not an exported program: {str(error).splitlines()[0][:160]}", "write it with torch.export.save"
        ) from None


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
        elif isinstance(value, torch.Tensor):
            kept.append(value)
    return kept
