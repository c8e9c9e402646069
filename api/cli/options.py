"""Options that several commands share."""

import inspect
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stablecast.ir.errors import InputError

if TYPE_CHECKING:
    from stablecast._predict import Options
    from stablecast._timeline import TimelineOptions
    from stablecast.backends.catalogue import Catalogue
    from stablecast.frontends.arguments import ArgumentOptions
    from stablecast.ir.accounting.values import Conventions

Input = Annotated[
    str, typer.Argument(metavar="INPUT", help="script.py:function, a capture, or a StableHLO or HLO file (.gz too).")
]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output and nothing else.")]
Csv = Annotated[bool, typer.Option("--csv", help="CSV on standard output.")]
Backend = Annotated[
    str, typer.Option("--backend", help="A backend, or by kernel class: matmul=systolic,default=analytical.")
]
Exec = Annotated[
    str, typer.Option("--exec", help="Execution model: auto, xla, xla-aot (XLA itself), inductor or eager.")
]
MeasuredGemm = Annotated[
    list[str],
    typer.Option(
        "--measured-gemm",
        metavar="[DEVICE/]MxNxK:MATH=TIME",
        help="A product measured on the device, for the learned backend: 4096x4096x4096:fp32=2.7ms.",
    ),
]
CalibrationFile = Annotated[
    Path | None,
    typer.Option("--calibration", metavar="FILE", help="YAML of measured products and sustained shares of a device."),
]
Attention = Annotated[
    str, typer.Option("--attention", help="Attention as one kernel: auto (as the model does), flash or as-written.")
]
ExpandableSegments = Annotated[
    bool,
    typer.Option(
        "--expandable-segments", help="PyTorch's allocator has expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF)."
    ),
]
AcceptTerms = Annotated[
    bool,
    typer.Option(
        "--accept-libtpu-terms",
        help="You accept libtpu's terms (Google Cloud Platform); --exec xla-aot uses it for TPUs.",
    ),
]
Mesh = Annotated[list[str], typer.Option("--mesh", help="Mesh axes of a script: data=8,model=4.")]
For = Annotated[str, typer.Option("--for", help="Platform to lower a script for: cuda, rocm, tpu or cpu.")]
Args = Annotated[str, typer.Option("--args", help="FILE.py:FUNCTION that makes the arguments.")]
Arg = Annotated[list[str], typer.Option("--arg", help="One argument: 'tokens=i32[8,4096]'; paths reach into pytrees.")]
Set = Annotated[list[str], typer.Option("--set", help="A keyword parameter of the argument factory: layers=32.")]
Loop = Annotated[
    list[str], typer.Option("--loop", help="Trip count of a loop whose count the program leaves open: n=7.")
]
Dim = Annotated[list[str], typer.Option("--dim", help="Size of a dynamic dimension: batch=16.")]
Padding = Annotated[str, typer.Option("--padding", help="Window positions on padding: in or out.")]
Causal = Annotated[str, typer.Option("--causal", help="Causal attention: full or exact.")]
Branch = Annotated[
    str, typer.Option("--branch", help="Conditionals: max, min, or the probability of the first branch.")
]
Rules = Annotated[list[str], typer.Option("--rules", help="YAML file of work rules for custom calls.")]
Batch = Annotated[str, typer.Option("--batch", help="Sequences or images a step, for a Hugging Face config.json.")]
Seq = Annotated[str, typer.Option("--seq", help="Sequence length, for a config.json.")]
Mode = Annotated[str, typer.Option("--mode", help="train, forward, prefill or decode, for a config.json.")]
Dtype = Annotated[str, typer.Option("--dtype", help="Element type of the model, for a config.json: bf16, f16, f32.")]
Parallel = Annotated[str, typer.Option("--parallel", help="dp4, fsdp8, tp4 or several, for a config.json.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Neither read nor keep lowered programs on disk.")]
Contention = Annotated[
    bool,
    typer.Option("--contention/--no-contention", help="Whether running collectives take cores, memory and links."),
]
Passes = Annotated[
    list[str],
    typer.Option(
        "--pass", metavar="NAME[=VALUE]", help="A schedule pass; several in order. none: none. See 'stablecast passes'."
    ),
]
Map = Annotated[
    str,
    typer.Option("--map", metavar="AXIS=DIM,...", help="Mesh axes on network dimensions: model=nvlink,data=scale-out."),
]
Pipeline = Annotated[
    str,
    typer.Option("--pipeline", help="Schedule of a pipeline's micro-batches: gpipe, 1f1b, interleaved=2, zero-bubble."),
]
Slow = Annotated[list[str], typer.Option("--slow", metavar="RANK=SPEED", help="A straggler: 5=0.8 is 20 % slow.")]
Collectives = Annotated[
    str,
    typer.Option(
        "--collectives", help="Times of collectives: calibrated, or astra-sim (its congestion-unaware rules)."
    ),
]
Incast = Annotated[
    float,
    typer.Option("--incast", help="What the busiest receiver of an all-to-all gets over the mean (uneven routing)."),
]
Algorithm = Annotated[
    str, typer.Option("--algorithm", help="Of every collective that can go by it: ring, themis, ... (see collective).")
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Exit with 3 where the prediction does not fit or is incomplete.")
]


@dataclass(frozen=True, slots=True)
class SourceChoices:
    """How INPUT becomes a program: mesh and platform of a script, its arguments, settings of a model configuration."""

    mesh: Mesh = field(default_factory=list[str])
    platform: For = ""
    args: Args = ""
    arg: Arg = field(default_factory=list[str])
    settings: Set = field(default_factory=list[str])
    batch: Batch = ""
    seq: Seq = ""
    mode: Mode = ""
    dtype: Dtype = ""
    parallel: Parallel = ""

    def mesh_axes(self) -> dict[str, int] | None:
        """Axis -> size, None where none was given."""
        from stablecast._predict import parse_pairs

        return parse_pairs(self.mesh, "--mesh") or None

    def arguments(self) -> "ArgumentOptions":
        """How a script or model configuration gets its arguments."""
        from stablecast.frontends.arguments import ArgumentOptions

        model = {name: getattr(self, name) for name in ("batch", "seq", "mode", "dtype", "parallel")}
        return ArgumentOptions(self.args, self.arg, self.settings, {name: text for name, text in model.items() if text})


@dataclass(frozen=True, slots=True)
class CountingChoices:
    """What the program leaves open, and how it is counted."""

    loop: Loop = field(default_factory=list[str])
    dim: Dim = field(default_factory=list[str])
    branch: Branch = "max"
    rules: Rules = field(default_factory=list[str])

    def conventions(self, padding: str = "in", causal: str = "full") -> "Conventions":
        """The counting conventions that the flags choose; raises `InputError`."""
        from stablecast._predict import parse_pairs
        from stablecast.ir.accounting import load_rules
        from stablecast.ir.accounting.values import Conventions

        for path in self.rules:
            load_rules(Path(path))
        chance: str | float = self.branch
        if self.branch not in ("max", "min"):
            try:
                chance = float(self.branch)
            except ValueError:
                raise InputError(f"--branch '{self.branch}' is not max, min or a probability") from None
        loops, dims = parse_pairs(self.loop, "--loop"), parse_pairs(self.dim, "--dim")
        return Conventions(padding, causal, chance, loops, dims)


@dataclass(frozen=True, slots=True)
class ExecutionChoices:
    """How the program is executed on a device."""

    exec_model: Exec = "auto"
    attention: Attention = "auto"
    expandable_segments: ExpandableSegments = False
    accept_libtpu_terms: AcceptTerms = False
    no_cache: NoCache = False


@dataclass(frozen=True, slots=True)
class TimelineChoices:
    """How the step is laid out in time."""

    contention: Contention = True
    passes: Passes = field(default_factory=list[str])
    placed: Map = ""
    pipeline: Pipeline = ""
    slow: Slow = field(default_factory=list[str])
    collectives: Collectives = "calibrated"
    incast: Incast = 1.0
    algorithm: Algorithm = "auto"

    def options(self) -> "TimelineOptions":
        """The same for a session."""
        from stablecast._timeline import TimelineOptions, parse_map, parse_speeds

        passes, placed, speeds = pass_texts(self.passes), parse_map(self.placed), parse_speeds(self.slow)
        return TimelineOptions(
            self.contention, passes, placed, self.pipeline, speeds, self.collectives, self.incast, self.algorithm
        )


def pass_texts(given: list[str]) -> tuple[str, ...] | None:
    """The passes that `--pass` names, None where it was not given. Raises `InputError` for unknown ones."""
    from stablecast.lowering.passes import find_pass

    texts = tuple(text for text in given if text != "none")
    for text in texts:
        find_pass(text)
    return texts if given else None


def make_options(
    source: SourceChoices,
    counting: CountingChoices,
    execution: ExecutionChoices,
    backend: str = "analytical",
    conventions: "Conventions | None" = None,
    timeline: TimelineChoices | None = None,
) -> "Options":
    """The choices of a prediction."""
    from stablecast._predict import Options
    from stablecast.frontends.xla import Settings

    return Options(
        backend,
        execution.exec_model,
        execution.attention,
        source.platform,
        source.mesh_axes(),
        source.arguments(),
        cache=not execution.no_cache,
        conventions=conventions or counting.conventions(),
        timeline=(timeline or TimelineChoices()).options(),
        xla=Settings(accept_libtpu_terms=execution.accept_libtpu_terms),
        expandable_segments=execution.expandable_segments,
    )


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with every parameter that is a group of choices spread out into the options of its fields."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for parameter in inspect.signature(command).parameters.values():
        if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += _spread(parameter.annotation)
        else:
            parameters.append(parameter)

    @wraps(command)
    def spread(*positional: Any, **given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{one.name: given.pop(one.name) for one in fields(group)})
        command(*positional, **given)

    setattr(spread, "__signature__", inspect.Signature(parameters))  # noqa: B010
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread


def _spread(group: type[Any]) -> list[inspect.Parameter]:
    return [
        inspect.Parameter(
            one.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=one.default if one.default_factory is MISSING else one.default_factory(),
            annotation=one.type,
        )
        for one in fields(group)
    ]


def catalogue(measured_gemm: Sequence[str], calibration: Path | None) -> "Catalogue | None":
    """The catalogue with what the user measured; None where that is nothing."""
    if not measured_gemm and calibration is None:
        return None
    from stablecast.backends.catalogue import Catalogue
    from stablecast.backends.learned.calibration import adjuster, calibrations

    return Catalogue(adjust=adjuster(calibrations(measured_gemm, calibration)))


def one_format(json: bool, csv: bool) -> None:
    if json and csv:
        raise InputError("--json and --csv exclude each other")


def writable(path: Path) -> Path:
    """`path` as a place for a new file; raises `InputError` where its folder is missing or it is a folder."""
    if path.is_dir():
        raise InputError(f"{path} is a folder", "give a file name")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent}")
    return path


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`, which appears only when complete."""
    import os
    import tempfile

    writable(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {error.strerror}") from None


@contextmanager
def progress(what: str) -> Generator[Callable[[str], None]]:
    """On a terminal, a spinner on standard error for anything that takes over a second; its text can be changed."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    done = threading.Event()
    text = [what]
    thread = threading.Thread(target=_spin, args=(text, done), daemon=True)
    thread.start()
    try:
        yield lambda other: text.__setitem__(0, other)
    finally:
        done.set()
        thread.join()


def _spin(text: list[str], done: threading.Event) -> None:
    """Show what `text` holds until `done`."""
    if done.wait(1.0):
        return
    from rich.console import Console

    with Console(stderr=True).status(text[0]) as status:
        while not done.wait(0.2):
            status.update(text[0])
