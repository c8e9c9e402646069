"""Nine train steps as XLA:GPU compiles them ahead of time, and what our own fusion rules make of the same.

    python benchmarks/xla_golden.py [--only mlp]       # ours (--exec xla) beside the goldens, with ratios
    python benchmarks/xla_golden.py --make [--hlo DIR]     # compile and write the goldens; needs stablecast[xla-gpu]
    python benchmarks/xla_golden.py --families --hlo DIR   # kernels of both by the ops inside, from texts kept in DIR

Goldens lie in `benchmarks/golden/xla_gpu/`, one file a step, for `TARGET`, each in up to two forms: `generated` (XLA's
own kernels for matrix products, its default) and `library` (cuBLAS for all). The form compared with is the first that
XLA can make without autotuning, as `--exec xla-aot` takes it.

What is counted, of one device and step:
* launches: each fusion, library call, custom call, copy (memcpy), sort and other op outside of fusions once, in a loop
  times its trips; of a conditional the branch with most. Not counted: parameters, constants, tuples and their
  elements, bitcasts, and collectives, which have a count of their own.
* collectives: a start with its done once; of a combined one the bytes of all operands.
* bytes: boundary operands and results of each kernel once; a slice or gather reads what it takes, an update in place
  touches its slice, a literal costs nothing. Collectives are not in it.
* matmul FLOPs: 2 per multiply-add of every product and convolution as executed, edge padding of windows included,
  zeros of dilated inputs not.
* memory: argument + output + temp - alias of XLA's compiled memory statistics.
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stablecast._capture import load
from stablecast._predict import Options, Session, parse_pairs, platform_of
from stablecast.backends.arithmetic import arithmetic_of
from stablecast.backends.catalogue import Catalogue
from stablecast.frontends.arguments import ArgumentOptions
from stablecast.frontends.xla import Settings, compile_ahead
from stablecast.ir.device_program import Body, Branch, Collective, DeviceProgram, Kernel, Loop
from stablecast.ir.errors import ToolError
from stablecast.ir.reader import read
from stablecast.ir.workload import Workload
from stablecast.lowering.device import lower
from stablecast.lowering.target import Target

TARGET = "h100-sxm"
ROOT = Path(__file__).resolve().parents[1]
GOLDENS = Path(__file__).resolve().parent / "golden" / "xla_gpu"
FORMS = ("generated", "library")


@dataclass(frozen=True, slots=True)
class Step:
    """A train step of fixed size: `input` under the repository, settings of its factory, and mesh."""

    input: str
    settings: tuple[str, ...] = ()
    mesh: str = ""


STEPS: Mapping[str, Step] = {
    "mlp": Step("examples/mlp.py:train_step"),
    "resnet50": Step("examples/resnet.py:train_step", ("depth=50", "batch=256", "image=224")),
    "gpt2": Step("examples/gpt2.py:train_step", ("size=small", "batch=8", "seq=1024")),
    "llama_1b": Step("examples/llama.py:train_step", ("size=1b",)),
    "llama_7b_fsdp16_tp4": Step(
        "examples/llama.py:train_step", ("layers=32", "d_model=4096", "heads=32", "vocab=32000"), "fsdp=16,tensor=4"
    ),
    "moe": Step("examples/moe.py:train_step", ("layers=8", "width=1024", "experts=8", "batch=4", "seq=1024")),
    "vit": Step("examples/vit.py:train_step", ("size=base", "batch=128")),
    "dlrm": Step("examples/dlrm.py:train_step", ("tables=26", "rows=1000000", "width=64", "batch=8192")),
    "unet": Step("examples/unet.py:train_step", ("channels=320", "latent=64", "batch=8")),
}
"""The nine steps; each is given as `--set` and `--mesh` of the command line would."""


@dataclass(slots=True)
class Counts:
    """Launches and bytes by kernel class, and collectives by kind."""

    launches: dict[str, int] = field(default_factory=dict[str, int])
    nbytes: dict[str, float] = field(default_factory=dict[str, float])
    collectives: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    def add(self, program: DeviceProgram, body: Body, trips: int = 1) -> None:
        for node in body:
            if isinstance(node, Kernel):
                row = program.table.rows[node.row]
                self.launches[row.klass] = self.launches.get(row.klass, 0) + node.launch * trips
                moved = (row.bytes_read + row.bytes_written) * trips
                self.nbytes[row.klass] = self.nbytes.get(row.klass, 0.0) + moved
            elif isinstance(node, Collective):
                held = self.collectives.setdefault(node.kind, [0, 0.0])
                held[0] += trips
                held[1] += node.message_bytes * trips
            elif isinstance(node, Loop):
                self.add(program, node.body, trips * (node.count if isinstance(node.count, int) else 1))
            elif isinstance(node, Branch):
                self.add(program, max(node.bodies, key=len), trips)


def counted(program: DeviceProgram) -> dict[str, Any]:
    """What goldens hold of a device program."""
    counts = Counts()
    counts.add(program, program.body)
    work, _ = program.work.evaluate()
    memory = program.buffers
    assert memory is not None
    return {
        "launches": dict(sorted(counts.launches.items())),
        "launches_total": sum(counts.launches.values()),
        "bytes": {name: int(size) for name, size in sorted(counts.nbytes.items())},
        "bytes_total": int(sum(counts.nbytes.values())),
        "matmul_flops": int(work.matmul_flops),
        "collectives": {
            kind: {"count": int(held[0]), "bytes": int(held[1])} for kind, held in sorted(counts.collectives.items())
        },
        "memory": {
            "argument": memory.argument_bytes,
            "output": memory.output_bytes,
            "alias": memory.alias_bytes,
            "temp": memory.temp_bytes,
            "total": memory.peak_bytes,
        },
    }


def workload_of(step: Step) -> Workload:
    """The capture of a step."""
    options = ArgumentOptions(settings=step.settings)
    mesh = parse_pairs([step.mesh], "--mesh") if step.mesh else None
    return load(str(ROOT / step.input), options, platform="cuda", mesh=mesh)


def make(name: str, hlo: Path | None) -> None:
    """Compiles a step in both forms and writes its golden."""
    workload = workload_of(STEPS[name])
    device = Catalogue().resolve(TARGET).device
    target = Target(platform_of(device), arithmetic_of(device), combine=False)
    forms: dict[str, Any] = {}
    for form in FORMS:
        started = time.perf_counter()
        try:
            made = compile_ahead(workload, TARGET, Settings(products=form))
        except ToolError as error:
            print(f"{name} {form}: {error.message}")
            continue
        if hlo is not None:
            hlo.mkdir(parents=True, exist_ok=True)
            (hlo / f"{name}.{form}.txt").write_bytes(made.text)
        held = counted(lower(read(made.text, name), target))
        memory = made.memory
        held["memory"] = {
            "argument": memory.argument_bytes,
            "output": memory.output_bytes,
            "alias": memory.alias_bytes,
            "temp": memory.temp_bytes,
            "total": memory.peak_bytes,
        }
        forms[form] = held
        print(f"{name} {form}: {held['launches_total']} launches, {time.perf_counter() - started:.1f} s")
    step = STEPS[name]
    about = {"input": step.input, "set": list(step.settings), "mesh": step.mesh, "target": TARGET, "jax": _version()}
    GOLDENS.mkdir(parents=True, exist_ok=True)
    (GOLDENS / f"{name}.json").write_text(json.dumps({**about, "forms": forms}, indent=1) + "\n", encoding="utf-8")


def _version() -> str:
    import jax

    return jax.__version__


def compare(names: list[str], form: str) -> None:
    """Prints ours beside the goldens."""
    columns = ("launches_total", "bytes_total", "matmul_flops", "memory")
    ratios: dict[str, list[float]] = {column: [] for column in columns}
    print(
        f"{'step':20} {'form':9}" + "".join(f"{title:>30}" for title in ("launches", "GB", "matmul GFLOP", "memory GB"))
    )
    for name in names:
        path = GOLDENS / f"{name}.json"
        if not path.exists():
            print(f"{name:20} no golden")
            continue
        forms = json.loads(path.read_text(encoding="utf-8"))["forms"]
        chosen = form if form in forms else next(iter(forms))
        golden = forms[chosen]
        session = Session(workload_of(STEPS[name]), Options(exec="xla", cache=False))
        ours = counted(session.device_program(Catalogue().resolve(TARGET).device))
        line = f"{name:20} {chosen:9}"
        for column, scale in zip(columns, (1, 1e9, 1e9, 1e9), strict=True):
            mine, theirs = (held[column]["total"] if column == "memory" else held[column] for held in (ours, golden))
            ratios[column].append(mine / theirs)
            line += f"{mine / scale:>10.4g} /{theirs / scale:>9.4g} {mine / theirs:>7.3f}"
        print(line, flush=True)
        for kind in sorted({*ours["collectives"], *golden["collectives"]}):
            mine, theirs = (held["collectives"].get(kind, {"count": 0, "bytes": 0}) for held in (ours, golden))
            sizes = f"{mine['bytes'] / 1e9:.3f} / {theirs['bytes'] / 1e9:.3f} GB"
            print(f"    {kind:18} {mine['count']} / {theirs['count']}, {sizes}")
    for column, values in ratios.items():
        if values:
            errors = [abs(value - 1) for value in values]
            print(f"{column:16} error: median {statistics.median(errors):7.2%}, worst {max(errors):7.2%}")


_ALSO = {"square": "multiply", "negate": "subtract"}
"""Ops that XLA writes in another way."""
_PLAIN = frozenset({"constant", "bitcast", "broadcast_in_dim", "reshape", "iota"})


def families(program: DeviceProgram) -> dict[tuple[str, str], tuple[int, float]]:
    """Launches and bytes of the kernels of the entry and its loops, by class and the kinds of ops inside."""
    found: dict[tuple[str, str], tuple[int, float]] = {}

    def add(body: Body, trips: int) -> None:
        for node in body:
            if isinstance(node, Loop):
                add(node.body, trips * (node.count if isinstance(node.count, int) else 1))
            elif isinstance(node, Kernel):
                row = program.table.rows[node.row]
                names = {op.name.split(".", 1)[1] for op in program.table.body(node.row)} - _PLAIN
                names = {_ALSO.get(name, name) for name in names}
                key = (str(row.klass), "+".join(sorted(names)))
                count, nbytes = found.get(key, (0, 0.0))
                found[key] = (count + trips, nbytes + (row.bytes_read + row.bytes_written) * trips)

    add(program.body, 1)
    return found


def explain(name: str, form: str, hlo: Path) -> None:
    """Prints the kernel families of a step that differ most, ours beside XLA's."""
    path = next((hlo / f"{name}.{one}.txt" for one in (form, *FORMS) if (hlo / f"{name}.{one}.txt").exists()), None)
    if path is None:
        print(f"{name}: no text in {hlo}")
        return
    device = Catalogue().resolve(TARGET).device
    target = Target(platform_of(device), arithmetic_of(device), combine=False)
    compiled = lower(read(path.read_bytes(), name), target)
    theirs = families(compiled)
    ours = families(Session(workload_of(STEPS[name]), Options(exec="xla", cache=False)).device_program(device))
    keys = sorted({*ours, *theirs}, key=lambda key: -abs(ours.get(key, (0, 0))[0] - theirs.get(key, (0, 0))[0]))
    form = path.name.split(".")[1]
    analysed = json.loads((GOLDENS / f"{name}.json").read_text(encoding="utf-8"))["forms"][form]["memory"]["total"]
    laid_out = compiled.buffers.peak_bytes if compiled.buffers else 0
    print(f"{name}, {form}: our liveness over XLA's schedule {laid_out / analysed:.4f} of XLA's memory analysis")
    print("  launches ours / XLA, GB ours / XLA, by class and ops inside")
    for key in keys[:30]:
        (mine, size), (other, other_size) = ours.get(key, (0, 0.0)), theirs.get(key, (0, 0.0))
        print(f"  {mine:5} / {other:5} {size / 1e9:8.2f} / {other_size / 1e9:8.2f}  {key[0]:12} {key[1][:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train steps as XLA:GPU compiles them, beside our fusion rules.")
    parser.add_argument("--families", action="store_true", help="kernels of both by the ops inside; needs --hlo")
    parser.add_argument("--make", action="store_true", help="compile and write the goldens")
    parser.add_argument("--only", action="append", default=[], choices=list(STEPS), help="these steps only")
    parser.add_argument(
        "--form", default="generated", choices=FORMS, help="the form to compare with, where there is one"
    )
    parser.add_argument("--hlo", type=Path, help="folder to keep the HLO texts in")
    given = parser.parse_args()
    names = given.only or list(STEPS)
    if given.make:
        for name in names:
            make(name, given.hlo)
    elif given.families:
        for name in names:
            explain(name, given.form, given.hlo or Path())
    else:
        compare(names, given.form)


if __name__ == "__main__":
    main()
