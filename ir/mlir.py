"""The one module that touches jaxlib's private entry points: MLIR contexts, parsing and writing modules."""

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from stablecast.ir.errors import InputError, ToolError
from stablecast.ir.hlo.groups import expand_device_ids
from stablecast.ir.spellings import COMPLAINTS, modernised

SUPPORTED = ((0, 10, 2), (0, 11))
"""First jaxlib version that is supported, and the first that is not."""

BYTECODE_MAGIC = b"ML\xefR"
_ARTIFACT_PRODUCER = b"StableHLO_v"


@cache
def check_version() -> str:
    """The version of jaxlib; raises `ToolError` where it is outside the supported range."""
    try:
        import jaxlib.version
    except ImportError as error:
        raise ToolError("jaxlib is not installed", "pip install 'jaxlib>=0.10.2,<0.11'") from error
    version: str = jaxlib.version.__version__
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    low, high = SUPPORTED
    if not low <= numbers < high:
        wanted = f">={'.'.join(map(str, low))},<{'.'.join(map(str, high))}"
        raise ToolError(f"jaxlib {version} is outside the supported range {wanted}", f"pip install 'jaxlib{wanted}'")
    return version


def bindings() -> Any:
    """The module `jaxlib.mlir.ir`."""
    check_version()
    from jaxlib.mlir import ir

    return ir


def make_context() -> Any:
    """A fresh MLIR context with every dialect that JAX programs use; diagnostics do not reach the terminal."""
    ir = bindings()
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext
    from jaxlib.mlir.dialects import chlo, mhlo, sdy, stablehlo

    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context = ir.Context()
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    stablehlo.register_dialect(context)
    chlo.register_dialect(context)
    mhlo.register_mhlo_dialect(context)
    sdy.register_dialect(context)
    context.attach_diagnostic_handler(_swallow)
    return context


def _swallow(diagnostic: Any) -> bool:
    return True


def is_artifact(data: bytes) -> bool:
    """Whether `data` is a StableHLO portable artifact (bytecode that a stable producer wrote)."""
    return data.startswith(BYTECODE_MAGIC) and _ARTIFACT_PRODUCER in data[:80]


def parse(data: bytes, source: str) -> Any:
    """The `ir.Module` in `data`: MLIR text, bytecode or a portable artifact.

    `source` names it in messages. Raises `InputError` with MLIR's first diagnostic and its place.
    """
    ir = bindings()
    if not data.strip():
        raise InputError(f"{source} is empty", "give a StableHLO module")
    read: Callable[[], Any] = lambda: ir.Module.parse(data, make_context())  # noqa: E731
    if is_artifact(data):
        from jaxlib.mlir.dialects import stablehlo

        read = lambda: stablehlo.deserialize_portable_artifact(make_context(), data)  # noqa: E731
    try:
        return read()
    except (ir.MLIRError, ValueError) as error:
        if not data.startswith(BYTECODE_MAGIC) and any(text in str(error) for text in COMPLAINTS):
            newer = modernised(data)
            if newer != data:
                return parse(newer, source)
        raise InputError(f"{source} is not a StableHLO module: {first_diagnostic(error)}") from None


def first_diagnostic(error: Exception) -> str:
    """MLIR's first message on one line, with line and column."""
    text = str(error)
    found = re.search(r'error: (?:"[^"]*":(\d+):(\d+): ?)?(.+)', text)
    if found is None:
        return " ".join(text.split())[:200]
    place = f"line {found[1]}, column {found[2]}: " if found[1] else ""
    return place + found[3].split(". If this is intended")[0].strip()[:200]


def write_bytecode(module: Any) -> bytes:
    """`module` as MLIR bytecode, locations kept."""
    import io

    out = io.BytesIO()
    module.operation.write_bytecode(out)
    return out.getvalue()


def stablehlo_version() -> str:
    """The StableHLO version that this jaxlib speaks."""
    check_version()
    from jaxlib.mlir.dialects import stablehlo

    return str(stablehlo.get_current_version())


def _private(name: str) -> Any:
    """A compiled module of jaxlib that has no type stubs."""
    return importlib.import_module(f"jaxlib.{name}")


def hlo_to_stablehlo(text: bytes, source: str) -> bytes:
    """HLO text, before scheduling, as StableHLO bytecode. Raises `InputError` where XLA cannot read or convert it."""
    check_version()
    hlo, convert = _private("_hlo"), _private("_jax").mlir
    try:
        module = hlo.hlo_module_from_text(expand_device_ids(text.decode()))
        return convert.hlo_to_stablehlo(module.as_serialized_hlo_module_proto())
    except (ValueError, RuntimeError) as error:
        detail = " ".join(str(error).split())[:200]
        raise InputError(f"{source} is not HLO text that can be converted to StableHLO: {detail}") from None


def inline_calls(module: Any, entry: str) -> None:
    """Puts the body of every function that `@entry` calls, directly or not, in the place of the call.

    It does what MLIR's `inline` pass does, whose time grows with the square of the calls. Raises `ToolError` for a
    recursive function.
    """
    ir = bindings()
    inlined: Callable[..., list[Any]] = _private("mlir._mlir_libs._jax_mlir_ext").inlined_func_call
    views = [view.operation for view in module.body.operations if view.operation.name == "func.func"]
    functions = {op.attributes["sym_name"].value: op for op in views}
    open_names: set[str] = set()
    done: set[str] = set()

    def visit(name: str) -> None:
        if name in open_names:
            raise ToolError(f"function @{name} calls itself")
        open_names.add(name)
        for call in walk(functions[name], "func.call"):
            callee = call.attributes["callee"].value
            if callee not in done:
                visit(callee)
            with ir.InsertionPoint(call), call.location:
                results = inlined(functions[callee], list(call.operands))
            for old, new in zip(call.results, results, strict=True):
                old.replace_all_uses_with(new)
            call.erase()
        open_names.discard(name)
        done.add(name)

    visit(entry)


def walk(root: Any, name: str = "") -> list[Any]:
    """The operations under `root` (a module or operation), in order; only those called `name` if it is given."""
    ir = bindings()
    found: list[Any] = []

    def step(op: Any) -> Any:
        if not name or op.name == name:
            found.append(op)
        return ir.WalkResult.ADVANCE

    root.operation.walk(step, ir.WalkOrder.PRE_ORDER)
    return found


def run_passes(module: Any, passes: Sequence[str]) -> None:
    """Runs MLIR passes over `module` in place; raises `ToolError` with MLIR's first diagnostic.

    The module is not verified again after each pass, which would take longer than the passes.
    """
    check_version()
    from jaxlib.mlir import passmanager

    pipeline = f"builtin.module({','.join(passes)})"
    try:
        manager = passmanager.PassManager.parse(pipeline, module.context)
        manager.enable_verifier(False)
        manager.run(module.operation)
    except (bindings().MLIRError, ValueError) as error:
        raise ToolError(f"an MLIR pass failed: {first_diagnostic(error)}") from None


def through_hlo(data: bytes, context: Any) -> Any:
    """The module in `data` (StableHLO and Shardy) after XLA's import: to HLO and back, in `context`.

    Shardings come back as text attributes and `@Sharding` custom calls. Raises `ToolError` where XLA cannot import it.
    """
    check_version()
    convert = _private("_jax").mlir
    try:
        computation = convert.mlir_module_to_xla_computation(data, use_tuple_args=False, return_tuple=False)
        return bindings().Module.parse(convert.xla_computation_to_mlir_module(computation), context)
    except (bindings().MLIRError, ValueError, RuntimeError) as error:
        raise ToolError(f"XLA does not import the module: {first_diagnostic(error)}") from None


_MEMORY = ("argument", "output", "temp", "alias", "generated_code")


def compile_for(
    devices: Sequence[Any], data: bytes, source: str, shape: tuple[int, int], options: Mapping[str, Any], shardy: bool
) -> tuple[bytes, dict[str, int]]:
    """The module in `data` as XLA compiles it for `devices` that are not there: HLO text, and bytes by kind of memory.

    `shape`: replicas and partitions; `options`: XLA's, by name; `shardy`: who partitions, Shardy or GSPMD. Raises what
    XLA raises.
    """
    import numpy as np

    check_version()
    compiler, jax_ext = importlib.import_module("jax._src.compiler"), _private("_jax")
    module = parse(data, source)
    if "sym_name" not in module.operation.attributes:
        module.operation.attributes["sym_name"] = bindings().StringAttr.get("module", module.context)
    assignment = np.arange(shape[0] * shape[1]).reshape(shape)
    chosen = compiler.get_compile_options(
        *shape, device_assignment=assignment, env_options_overrides=dict(options) or None
    )
    chosen.executable_build_options.use_shardy_partitioner = shardy
    made = devices[0].client.compile(
        module, executable_devices=jax_ext.DeviceList(tuple(devices)), compile_options=chosen
    )
    stats = made.get_compiled_memory_stats()
    return made.hlo_modules()[0].to_string().encode(), {
        name: getattr(stats, f"{name}_size_in_bytes") for name in _MEMORY
    }
