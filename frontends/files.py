"""Programs from files: captures, StableHLO text, bytecode and portable artifacts, HLO text; gzip where it is found."""

import gzip
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

from stablecast.frontends.registry import Request
from stablecast.ir import capture_file, mlir
from stablecast.ir.errors import InputError
from stablecast.ir.hlo import is_scheduled
from stablecast.ir.hlo.memory import read_assignment
from stablecast.ir.program import Program, Stage
from stablecast.ir.reader import read
from stablecast.ir.workload import Module, ModuleFormat, Workload

_GZIP = b"\x1f\x8b"
_ZIP = b"PK\x03\x04"
MAX_BYTES = 4 * 2**30
MEMORY = "memory"
"""Key of the metadata under which the compiler's memory by kind lies: argument, output, alias, temp, in bytes."""


@dataclass(frozen=True, slots=True)
class FileFrontend:
    """Captures and modules; takes whatever no other frontend claims."""

    name: str = "file"
    priority: int = -10
    lowers: bool = False

    def claims(self, request: Request) -> bool:
        return True

    def load(self, request: Request) -> Workload:
        return load(Path(request.text))


def load(path: Path) -> Workload:
    """The workload in `path`: a capture, StableHLO (text, bytecode, artifact) or HLO text, gzip or not.

    The kind is told from the content, not from the name. Raises `InputError` for a missing, unreadable or empty file
    and for one that is none of these.
    """
    data = _contents(path)
    if data.startswith(_ZIP):
        return capture_file.from_bytes(data, str(path))
    workload = from_module(data, str(path))
    memory = _memory_beside(path) if workload.stage is Stage.SCHEDULED else None
    return workload if memory is None else replace(workload, metadata={**workload.metadata, MEMORY: memory})


def _memory_beside(path: Path) -> dict[str, int] | None:
    """Memory by kind, where XLA's dump left its buffer assignment beside the module."""
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    beside = plain.with_name(f"{plain.stem}-buffer-assignment.txt")
    found = next((name for name in (beside, beside.with_name(f"{beside.name}.gz")) if name.is_file()), None)
    held = read_assignment(_contents(found).decode(errors="replace")) if found else None
    if held is None:
        return None
    return {
        "argument": held.argument_bytes,
        "output": held.output_bytes,
        "alias": held.alias_bytes,
        "temp": held.temp_bytes,
    }


def from_module(data: bytes, source: str) -> Workload:
    """The workload made of one module, whose manifest follows from what the module says."""
    kind = ModuleFormat.MLIR
    if _is_export(data):
        return from_export(data, source)
    if mlir.is_artifact(data):
        kind = ModuleFormat.ARTIFACT
    elif _is_hlo_text(data):
        if is_scheduled(data):
            kind = ModuleFormat.HLO_TEXT
        else:
            data = mlir.hlo_to_stablehlo(data, source)
    program = read(data, source)
    return describe(program, Module("main", data, kind), source)


def from_export(data: bytes, source: str) -> Workload:
    """The workload in what `jax.export.Exported.serialize` wrote. Raises `InputError` where JAX cannot read it."""
    from jax import export

    try:
        exported = export.deserialize(bytearray(data))
    except Exception as error:
        detail = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{source} is not a jax.export artefact that this JAX reads: {detail}") from None
    module = Module("main", exported.mlir_module_serialized, ModuleFormat.ARTIFACT)
    made = describe(read(module.data, source), module, source)
    versions = {"frontend": "jax.export", "calling_convention": str(exported.calling_convention_version)}
    return replace(made, producer=versions, platform=exported.platforms[0])


def describe(program: Program, module: Module, source: str) -> Workload:
    """The workload of `program`, read from `module`."""
    return Workload(
        producer={"file": source},
        stage=program.stage,
        modules=(module,),
        num_replicas=program.num_replicas,
        num_partitions=program.num_partitions,
        meshes=program.meshes,
        args=program.main.arguments,
        symbols=program.symbols,
        source=source,
        platform=program.platform,
    )


def _contents(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise InputError(f"{path} is a folder", "give a file")
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path} is larger than {MAX_BYTES >> 30} GiB")
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"there is no file {path}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if not data:
        raise InputError(f"{path} is empty")
    if not data.startswith(_GZIP):
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is a damaged gzip file ({error})") from None


def _is_export(data: bytes) -> bool:
    """Whether `data` is a flatbuffer with a module inside, as `jax.export` writes it."""
    inside = data.find(mlir.BYTECODE_MAGIC)
    return inside > 0 and b"\x00" in data[:inside]


def _is_hlo_text(data: bytes) -> bool:
    return data.lstrip()[:9] == b"HloModule"
