"""From what a recorder saw to a `Workload`: arguments in order, module, launches, schedule."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

from stablecast.frontends.torch.decompose import Decomposer
from stablecast.frontends.torch.emit.emitter import Emitted, Emitter, Settings
from stablecast.frontends.torch.graph import Group, Ref
from stablecast.frontends.torch.private import load, storage_of, torch, unreduced
from stablecast.frontends.torch.record import Input, Recorder
from stablecast.frontends.torch.session import FAULT, Session
from stablecast.frontends.torch.state import Named, local
from stablecast.ir import mlir
from stablecast.ir.dtypes import dtype
from stablecast.ir.groups import over_axes
from stablecast.ir.program import Argument, ArgumentKind, Mesh, Stage
from stablecast.ir.schedule import Event, Launch, LaunchTable, Schedule
from stablecast.ir.types import TensorType
from stablecast.ir.workload import Module, Role, Workload

_ORDER = (
    ArgumentKind.PARAM,
    ArgumentKind.OPT_STATE,
    ArgumentKind.KV_CACHE,
    ArgumentKind.BATCH,
    ArgumentKind.CONST,
    ArgumentKind.UNKNOWN,
)
MESH = "mesh"


class Slot(NamedTuple):
    """An input of the step with its name."""

    input: Input
    named: Named


def workload(session: Session, out: Any, source: str, name: str, stage_notes: Sequence[str] = ()) -> Workload:
    """The workload of a recorded step that returned `out`."""
    recorder = session.recorder
    results = _results(recorder, out)
    slots = _slots(session)
    graph = recorder.graph
    graph.inputs = [slot.input.ref for slot in slots]
    aliases: dict[int, int] = {}
    graph.outputs = [ref for _, ref in results]
    names = [label for label, _ in results]
    for index, slot in enumerate(slots):
        storage = slot.input.alias.storage
        if storage.written:
            aliases[index] = len(graph.outputs)
            graph.outputs.append(recorder.aliases.read(storage.root))
            names.append(slot.named.name)
    for label, group in graph.groups.items():
        graph.groups[label] = Group(group.name, group.ranks, axes_of(group.ranks, session.axes, session.rank))
    settings = Settings(
        name,
        session.axes,
        session.rank,
        torch.get_float32_matmul_precision() == "highest",
        not torch.backends.cudnn.allow_tf32,
        Decomposer(),
    )
    emitted = Emitter(graph, settings).run([slot.named.name for slot in slots], aliases, names)
    session.faults += [f"{op} ({held.count}x): {held.reason}" for op, held in emitted.faults.items()]
    return _workload(session, emitted, slots, aliases, names, source, name, stage_notes)


def _slots(session: Session) -> list[Slot]:
    """Inputs with their names, in a fixed order: parameters, optimiser state, batch, the rest."""
    found: list[Slot] = []
    taken: dict[str, int] = {}
    for number, entry in enumerate(session.recorder.inputs):
        if entry.alias.storage.host:
            continue
        named = session.names.of(entry.storage) or Named(f"state{number}", ArgumentKind.UNKNOWN)
        count = taken[named.name] = taken.get(named.name, 0) + 1
        if count > 1:
            named = named._replace(name=f"{named.name}#{count}")
        found.append(Slot(entry, named))
    order = {storage: place for place, storage in enumerate(session.names.known)}
    last = len(order)
    key = lambda slot: (  # noqa: E731
        _ORDER.index(slot.named.kind) if slot.named.kind in _ORDER else len(_ORDER),
        order.get(slot.input.storage._cdata, last) if slot.input.storage is not None else last,
    )
    return sorted(found, key=key)


def _results(recorder: Recorder, out: Any) -> list[tuple[str, Ref]]:
    tree = load("torch.utils._pytree")
    pairs = tree.tree_flatten_with_path(out)[0]
    found: list[tuple[str, Ref]] = []
    for path, leaf in pairs:
        if isinstance(leaf, torch.Tensor):
            found.append((f"result{tree.keystr(path)}", recorder.ref(local(leaf))))
    return found


def axes_of(ranks: Sequence[int], axes: Sequence[tuple[str, int]], rank: int) -> tuple[str, ...]:
    """The mesh axes along which these ranks lie; empty where no set of axes gives them."""
    names = [name for name, _ in axes]
    sizes = dict(axes)
    for count in range(1, len(names) + 1):
        for chosen in combinations(names, count):
            if math.prod(sizes[name] for name in chosen) != len(ranks):
                continue
            if over_axes(MESH, axes, chosen).members(rank) == tuple(ranks):
                return tuple(chosen)
    return ()


def _workload(
    session: Session,
    emitted: Emitted,
    slots: Sequence[Slot],
    aliases: dict[int, int],
    names: Sequence[str],
    source: str,
    name: str,
    stage_notes: Sequence[str],
) -> Workload:
    specs = session.recorder.graph.specs
    args = [
        Argument(
            slot.named.name,
            TensorType(specs[slot.input.ref].shape, dtype(specs[slot.input.ref].dtype)),
            kind=slot.named.kind,
            kept_index=index,
            aliases_output=aliases.get(index),
        )
        for index, slot in enumerate(slots)
    ]
    if emitted.rng:
        state = TensorType((2,), dtype("ui64"))
        args.append(
            Argument("rng_state", state, kind=ArgumentKind.RNG, kept_index=len(args), aliases_output=len(names))
        )
    axes = session.axes
    return Workload(
        producer=_versions(),
        stage=Stage.PER_DEVICE,
        modules=(Module("main", mlir.write_bytecode(emitted.module)),),
        num_partitions=session.world,
        meshes=(Mesh(MESH, axes),) if axes else (),
        roles=(Role("step", "main", _coordinates(session)),),
        args=tuple(args),
        schedule=_schedule(session),
        launches=_launches(session, emitted),
        source=source or name,
        platform="cuda" if session.device.startswith("cuda") else session.device,
        notes=_notes(session, emitted, stage_notes),
        metadata={
            "unlowered": {op: {"count": held.count, "reason": held.reason} for op, held in emitted.unlowered.items()},
            "faults": {op: held.reason for op, held in emitted.faults.items()},
            "rank": session.rank,
            "results": list(names),
            "ops": emitted.ops,
            "compiled": session.compiled,
        },
    )


def _coordinates(session: Session) -> dict[str, int]:
    """A capture is one rank's program; the others follow it, so no axis is pinned."""
    return {}


def _versions() -> dict[str, str]:
    return {
        "frontend": "torch",
        "torch": str(torch.__version__),
        "jaxlib": mlir.check_version(),
        "stablehlo": mlir.stablehlo_version(),
    }


def _notes(session: Session, emitted: Emitted, more: Sequence[str]) -> tuple[str, ...]:
    found = [*more, *session.recorder.notes]
    if session.rewriter.early_reads:
        found.append(f"{session.rewriter.early_reads} value(s) that were read while building are taken as 0")
    idle = [name for replica in session.replicas.modules for name in unreduced(replica)]
    if idle:
        said = f"{len(idle)} parameter(s) got no gradient under DDP ({idle[0]}, ...)"
        found.append(
            f"{said}: their buckets are not reduced, and torch stops at the next step (find_unused_parameters)"
        )
    if session.axes:
        found.append(f"the program of rank {session.rank} of {session.world}; shapes are those of one device")
    if session.device.startswith("cuda"):
        found.append("captured with fake CPU tensors in place of CUDA's; attention as CUDA would choose it")
    found += [f"{op} became a custom call ({held.count}x): {held.reason}" for op, held in emitted.unlowered.items()]
    found += [f"{FAULT} {fault}" for fault in session.faults]
    return tuple(found)


def _launches(session: Session, emitted: Emitted) -> LaunchTable:
    places = session.recorder.places.table
    rows: list[Launch] = []
    for number, call in enumerate(session.recorder.calls):
        place = places[call.place]
        first, last = emitted.ops_of.get(number, (0, 0))
        rows.append(
            Launch(
                call.op,
                call.shapes,
                call.dtypes,
                call.stream,
                place.scope.rpartition("/")[0],
                f"{place.file}:{place.line}" if place.file else "",
                tuple(range(first, last)),
                tuple(spec.shape for spec in call.results),
                tuple(spec.dtype for spec in call.results),
                call.group,
                call.is_view,
                call.host,
                tuple(emitted.views_of.get(number, ())),
            )
        )
    return LaunchTable(tuple(rows))


def _schedule(session: Session) -> Schedule:
    recorder, line = session.recorder, session.timeline
    streams = {number: call.stream for number, call in enumerate(recorder.calls) if call.stream}
    events = tuple(Event(before, waiter) for waiter, befores in line.after.items() for before in befores)
    syncs = tuple(sorted({*recorder.syncs, *line.syncs}))
    order, names = tuple(range(len(recorder.calls))), tuple(line.names)
    return Schedule(streams, dict(line.after), events, order, syncs, names, recorder.memory.allocations())


def batch_names(session: Session, inputs: Sequence[Any], labels: Sequence[str]) -> None:
    """Name the step's own arguments."""
    tree = load("torch.utils._pytree")
    for label, held in zip(labels, inputs, strict=True):
        for path, leaf in tree.tree_flatten_with_path(held)[0]:
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = storage_of(local(leaf))
            text = label + tree.keystr(path)
            cached = "past" in text or "cache" in text
            kind = ArgumentKind.KV_CACHE if cached else ArgumentKind.BATCH
            if storage is not None:
                session.names.known.setdefault(storage._cdata, Named(text, kind))
