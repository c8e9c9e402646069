"""Options that several commands share."""

import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stablecast.ir.errors import InputError

if TYPE_CHECKING:
    from stablecast._predict import Options
    from stablecast.ir.accounting.values import Conventions

Input = Annotated[
    str, typer.Argument(metavar="INPUT", help="script.py:function, a capture, or a StableHLO or HLO file (.gz too).")
]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output and nothing else.")]
Csv = Annotated[bool, typer.Option("--csv", help="CSV on standard output.")]
Backend = Annotated[
    str, typer.Option("--backend", help="A backend, or by kernel class: matmul=systolic,default=analytical.")
]
Exec = Annotated[str, typer.Option("--exec", help="Execution model: auto or xla.")]
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
Strict = Annotated[
    bool, typer.Option("--strict", help="Exit with 3 where the prediction does not fit or is incomplete.")
]


def make_conventions(
    loops: Sequence[str],
    dims: Sequence[str],
    rules: Sequence[str] = (),
    padding: str = "in",
    causal: str = "full",
    branch: str = "max",
) -> "Conventions":
    """The counting conventions that the flags choose."""
    from stablecast._predict import parse_pairs
    from stablecast.ir.accounting import load_rules
    from stablecast.ir.accounting.values import Conventions

    for path in rules:
        load_rules(Path(path))
    chance: str | float = branch
    if branch not in ("max", "min"):
        try:
            chance = float(branch)
        except ValueError:
            raise InputError(f"--branch '{branch}' is not max, min or a probability") from None
    return Conventions(padding, causal, chance, parse_pairs(loops, "--loop"), parse_pairs(dims, "--dim"))


def make_options(
    backend: str,
    exec_model: str,
    mesh: Sequence[str],
    platform: str,
    args: str,
    arg: Sequence[str],
    settings: Sequence[str],
    conventions: "Conventions",
    no_cache: bool = False,
    model: Mapping[str, str] | None = None,
) -> "Options":
    """The choices of a prediction."""
    from stablecast._predict import Options, parse_pairs
    from stablecast.frontends.arguments import ArgumentOptions

    return Options(
        backend,
        exec_model,
        platform,
        parse_pairs(mesh, "--mesh") or None,
        ArgumentOptions(args, arg, settings, model or {}),
        cache=not no_cache,
        conventions=conventions,
    )


def model_settings(batch: str, seq: str, mode: str, dtype: str, parallel: str) -> dict[str, str]:
    """The settings of a model given by its configuration that the user chose."""
    given = {"batch": batch, "seq": seq, "mode": mode, "dtype": dtype, "parallel": parallel}
    return {name: text for name, text in given.items() if text}


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
def progress(what: str) -> Generator[None]:
    """On a terminal, a spinner on standard error for anything that takes over a second."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_spin, args=(what, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _spin(what: str, done: threading.Event) -> None:
    if done.wait(1.0):
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        done.wait()
