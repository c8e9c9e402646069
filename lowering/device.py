"""Program -> DeviceProgram: kernels, collectives and loops of one device, with their work and memory."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from stablecast.ir.accounting.context import Context, label_of
from stablecast.ir.accounting.values import Conventions, OpWork
from stablecast.ir.allocations import Allocations
from stablecast.ir.attributes import Shift
from stablecast.ir.device_program import (
    COPY_STREAM,
    P2P,
    ArgumentBuffer,
    Body,
    Branch,
    Buffers,
    Collective,
    DeviceProgram,
    Kernel,
    Loop,
    Unmodelled,
)
from stablecast.ir.errors import InputError
from stablecast.ir.groups import Groups, all_devices
from stablecast.ir.kernels import COMPILED, KernelClass, KernelRow, KernelTableBuilder
from stablecast.ir.pause import paused_gc
from stablecast.ir.program import NO_LAUNCH, Op, Program
from stablecast.ir.schedule import LaunchTable, Schedule
from stablecast.ir.types import Count, Location, TensorType
from stablecast.ir.work import SymbolicWork, Work, total
from stablecast.lowering.ahead import runs_ahead
from stablecast.lowering.allocations import peak, step_allocations
from stablecast.lowering.categories import Category
from stablecast.lowering.combine import bucket_order, merge_collectives, plan_buckets
from stablecast.lowering.copies import Copy, contiguous_reductions, with_copies
from stablecast.lowering.execution.dispatch import afresh, bare_row, launches_of
from stablecast.lowering.execution.library_calls import Waits, library_call
from stablecast.lowering.execution.models import UNFUSED, exec_model, plan_kernels
from stablecast.lowering.execution.stages import Extras, InductorExtras, gathers_minor, with_extras
from stablecast.lowering.execution.xla import GPU_PLATFORMS
from stablecast.lowering.graph import Graph, build_graph, post_order
from stablecast.lowering.group import Group
from stablecast.lowering.memory import Liveness, Residents
from stablecast.lowering.partition.stages import micro_batch_loops, stage_axes
from stablecast.lowering.reassociate import reassociated
from stablecast.lowering.recorded import as_recorded
from stablecast.lowering.rows import group_key, hero_of, make_row
from stablecast.lowering.target import Target
from stablecast.lowering.traffic import Traffic, traffic, written_values

LoweredNode = Kernel | Collective | P2P | Loop | Branch
PEER: Final = "stablecast.peer"
TAG: Final = "stablecast.tag"
"""Attributes of sends and receives of PyTorch captures: rank of the peer, and tag."""


def lower(
    program: Program,
    target: Target,
    conventions: Conventions | None = None,
    *,
    fused: bool = True,
    launches: LaunchTable | None = None,
    schedule: Schedule | None = None,
) -> DeviceProgram:
    """The device program of `program`, which must be one device's already (`Stage.PER_DEVICE`).

    `conventions.loops` sets trip counts that the program leaves open. `fused=False` gives one kernel an op. `launches`,
    `schedule`: what PyTorch dispatched, and on which streams. Raises `InputError` for a program whose shapes are those
    of a whole mesh.
    """
    if program.stage.is_global and program.num_partitions > 1:
        raise InputError(
            f"{program.name} is written for a mesh of {program.num_partitions} devices and not partitioned",
            "capture it for one device, or give the partitioned module",
        )
    chosen = target if fused else replace(target, exec=UNFUSED)
    with paused_gc():
        return _Lowering(program, chosen, conventions or Conventions(), launches, schedule).run()


GRANULES: Mapping[str, int] = MappingProxyType({"xla": 256, "inductor": 512, "eager": 512})
"""Bytes that allocators round buffers up to: XLA's alignment, and `kMinBlockSize` of PyTorch's caching allocator."""


@dataclass(slots=True)
class _Opaque:
    count: float = 0
    nbytes: float = 0
    reason: str = ""


class _Lowering:
    def __init__(
        self,
        program: Program,
        target: Target,
        conventions: Conventions,
        launches: LaunchTable | None,
        schedule: Schedule | None,
    ) -> None:
        self._program = program
        self._model = exec_model(target.exec)
        self._launches = launches if self._model.dispatched else None
        self._schedule = schedule
        self._on_gpu = self._model.name == "xla" and target.platform in GPU_PLATFORMS and not program.prefused
        self._target = target
        self._conventions = conventions
        self._context = Context(program, conventions)
        self._builder = KernelTableBuilder()
        self._works: list[Work] = []
        self._runs: dict[int, float] = {}
        self._opaque: dict[str, _Opaque] = {}
        self._bytes = 0.0
        self._by_scope: dict[str, int] = {}
        stages = stage_axes(program)
        self._main: Graph | None = None
        self._recorded = launches is not None and schedule is not None
        self._numbers: dict[int, int] = {}
        self._stage_axis = stages[0] if len(stages) == 1 else ""
        self._micro_batches = micro_batch_loops(program, self._stage_axis) if self._stage_axis else {}

    def run(self) -> DeviceProgram:
        program = self._program
        dispatched = self._launches is not None
        block = program.main.body
        if self._on_gpu and self._target.combine:
            block = reassociated(block)
        graph = build_graph(program, block, self._context, keep_dead=dispatched)
        donated = {
            value
            for value, argument in zip(graph.arguments, program.main.arguments, strict=False)
            if argument.aliases_output is not None
        }
        residents = Residents(kept=set(graph.arguments) - donated, donated=donated)
        self._main, self._numbers = graph, {value: number for number, value in enumerate(graph.arguments)}
        body, work, temp = self._body(graph, residents, 1.0, self._launches)
        allocations = self._allocations()
        open_counts = any(self._value(symbol) is None for symbol in work.symbols)
        return DeviceProgram(
            name=program.name,
            body=body,
            table=self._builder.build(self._runs),
            work=work,
            num_devices=program.num_devices,
            meshes=program.meshes,
            exec_model="as-written" if program.prefused else self._model.name,
            platform=self._target.platform,
            buffers=self._buffers(residents.buffers(graph, temp, self._by_scope), allocations),
            unmodelled=self._unmodelled(),
            complete=not self._opaque and not open_counts,
            notes=(*program.notes, *self._notes()),
            stage_axis=self._stage_axis,
            recorded=self._recorded,
            allocations=allocations,
            arguments=tuple(
                ArgumentBuffer(argument.name, graph.types[value].nbytes, value in donated)
                for value, argument in zip(graph.arguments, program.main.arguments, strict=False)
            ),
        )

    def _allocations(self) -> Allocations | None:
        asked = self._schedule.allocations if self._schedule is not None else None
        if asked is None or self._launches is None:
            return None
        return step_allocations(asked, self._program.main.arguments, self._launches)

    def _buffers(self, planned: Buffers, asked: Allocations | None) -> Buffers:
        """`planned`, or the same with temporaries that live as long as the captured run held them."""
        if asked is None or self._launches is None:
            return planned
        found = peak(asked, self._launches)
        return replace(
            planned,
            temp_bytes=max(found.nbytes - replace(planned, temp_bytes=0).peak_bytes, 0),
            by_scope=found.by_scope,
        )

    def _notes(self) -> tuple[str, ...]:
        if self._model.dispatched and self._launches is None and not self._program.prefused:
            return ("no record of dispatched calls: every StableHLO op is taken for one launch",)
        return ()

    def _value(self, count: Count) -> int | None:
        if isinstance(count, int):
            return count
        return self._conventions.loops.get(count.name, count.default)

    def _body(
        self,
        graph: Graph,
        residents: Residents,
        runs: float,
        launches: LaunchTable | None = None,
        *,
        loop: bool = False,
    ) -> tuple[Body, SymbolicWork, int]:
        """Nodes of a graph that runs `runs` times a step, the work of one run, and its peak of temporaries."""
        groups = plan_kernels(graph, self._target, launches, ready_made=self._program.prefused)
        combine = self._target.combine and not self._program.prefused
        groups, buckets = self._bucketed(graph, groups) if combine else (groups, [])
        needed = set(graph.returns)
        for group in groups:
            needed |= group.reads
        whole = graph is self._main
        liveness = Liveness(graph, groups, residents, GRANULES.get(self._model.name, 1), afresh(launches))
        needs = _needs(graph, groups)
        ahead = runs_ahead(graph, loop=loop)
        extras = self._extras(graph)
        copies: dict[int, Copy] = {}
        nodes: list[LoweredNode] = []
        summed = SymbolicWork()
        for index, group in enumerate(groups):
            node, work, inner = self._node(graph, group, needed, liveness, runs, extras)
            held = liveness.step(index, inner)
            placed = _placed(node, needs[index], held, bool(group.members) and ahead >= group.members)
            read = sorted(self._numbers[value] for value in group.reads if value in self._numbers) if whole else ()
            known = read and not isinstance(placed, P2P)
            nodes.append(replace(placed, arguments=tuple(read)) if known else placed)
            if self._on_gpu and gathers_minor(graph, group):
                copies[index] = Copy(1, float(graph.types[graph.inputs[group.roots[0]][0]].nbytes), before=True)
            plain = len(work.terms) == 1 and () in work.terms
            summed = _plus(summed, work.terms[()]) if plain else summed + work
        if whole and self._recorded and self._schedule is not None:
            nodes = as_recorded(nodes, [group.launch for group in groups], self._schedule)
        body = with_copies(tuple(nodes), copies, lambda row: self._copy_row(row, runs))
        self._by_scope = liveness.by_scope() if whole else self._by_scope
        if buckets:
            earlier = sorted(copies)
            body = merge_collectives(body, [[at + bisect_right(earlier, at) for at in bucket] for bucket in buckets])
        if combine and self._on_gpu:
            body = with_copies(body, contiguous_reductions(body), lambda row: self._copy_row(row, runs))
        return body, summed, liveness.peak

    def _bucketed(self, graph: Graph, groups: list[Group]) -> tuple[list[Group], list[list[int]]]:
        """`groups` with the collectives that become one beside each other, and the places of these."""
        leads = {index: group.roots[0] for index, group in enumerate(groups) if group.roots}
        collectives = {
            index: self._collective(graph, lead)
            for index, lead in leads.items()
            if graph.categories[lead] is Category.COLLECTIVE
        }
        if len(collectives) < 2:
            return groups, []
        needs = _needs(graph, groups)
        rank = post_order(graph)
        buckets = plan_buckets(collectives, needs, {index: rank[leads[index]] for index in collectives})
        order = bucket_order(needs, buckets)
        place = {index: number for number, index in enumerate(order)}
        return [groups[index] for index in order], [[place[index] for index in bucket] for bucket in buckets]

    def _extras(self, graph: Graph) -> Extras | InductorExtras | None:
        """What the compiler launches beside the kernels of the program's ops."""
        if self._on_gpu:
            return Extras(graph)
        if self._model.name != "inductor" or self._program.prefused:
            return None
        return InductorExtras(graph, cpu=self._target.platform == "cpu")

    def _copy_row(self, row: KernelRow, runs: float) -> int:
        number = self._builder.add(row, row, ())
        self._runs[number] = self._runs.get(number, 0.0) + runs
        self._bytes += (row.bytes_read + row.bytes_written) * runs
        return number

    def _node(
        self,
        graph: Graph,
        group: Group,
        needed: set[int],
        liveness: Liveness,
        runs: float,
        extras: Extras | InductorExtras | None,
    ) -> tuple[LoweredNode, SymbolicWork, int]:
        if not group.roots:
            return self._bare(group.launch, runs)
        lead = group.roots[0]
        kind = graph.categories[lead]
        if kind is Category.CONTROL:
            return self._control(graph, lead, runs)
        if kind is Category.COLLECTIVE:
            node = self._collective(graph, lead)
            moved = Work(bytes_read=node.operand_bytes, bytes_written=node.result_bytes)
            return node, SymbolicWork({(): moved}), 0
        if PEER in graph.ops[lead].attrs:
            message = self._message(graph, lead)
            sends = message.direction == "send"
            moved = Work(bytes_read=message.nbytes) if sends else Work(bytes_written=message.nbytes)
            return message, SymbolicWork({(): moved}), 0
        return self._kernel(graph, group, needed, liveness, runs, extras)

    def _kernel(
        self,
        graph: Graph,
        group: Group,
        needed: set[int],
        liveness: Liveness,
        runs: float,
        extras: Extras | InductorExtras | None,
    ) -> tuple[LoweredNode, SymbolicWork, int]:
        written = written_values(graph, group, needed)
        in_place = liveness.in_place(group)
        members = sorted(group.members)
        key = group_key(graph, members, written, in_place)
        arithmetic = self._target.arithmetic

        def measure() -> Traffic:
            changed = {node: self._context.work(graph.ops[node], in_place=True) for node in in_place}
            return traffic(graph, group, written, changed)

        hero = hero_of(graph, group)
        beside = bool(graph.ops[hero].attrs.get("asynchronous"))
        count = 0 if beside else self._launch_count(graph, group)
        extra = extras.of(group) if extras else (0, 0.0)
        klass, waits = self._known_call(group)
        whole = (key, group.attention, count, klass, waits, extra)
        row = self._builder.known(whole)
        if row is None:
            made = make_row(graph, group, measure(), arithmetic)
            made = replace(made, launches=count, waits=waits.near, row_waits=waits.rows)
            if group.launch < 0 and not made.library:
                made = replace(made, library=COMPILED)
            made = with_extras(made if klass is None else replace(made, klass=klass), *extra)
            row = self._builder.add(whole, made, [graph.ops[node] for node in members])
        kernel_row = self._builder.row(row)
        self._runs[row] = self._runs.get(row, 0.0) + runs
        self._bytes += (kernel_row.bytes_read + kernel_row.bytes_written) * runs
        scope = graph.scopes[hero]
        if not kernel_row.modelled:
            self._note_opaque(graph, members, runs)
        stream = COPY_STREAM if beside else 0
        node = Kernel(row, tuple(members), kernel_row.launches, scope, graph.location(hero), stream)
        return node, SymbolicWork({(): kernel_row.work}), 0

    def _known_call(self, group: Group) -> tuple[KernelClass | None, Waits]:
        """The class of a call whose body does not show it, and what its threads wait for."""
        launch = self._launches.launches[group.launch] if self._launches and group.launch >= 0 else None
        known = library_call(launch.op) if launch else None
        return (known.klass, known.waits(launch)) if known and launch else (None, Waits())

    def _launch_count(self, graph: Graph, group: Group) -> int:
        if self._launches and group.launch >= 0:
            return launches_of(self._launches.launches[group.launch])
        return 0 if all(graph.ops[node].attrs.get(NO_LAUNCH) for node in group.members) else 1

    def _bare(self, number: int, runs: float) -> tuple[LoweredNode, SymbolicWork, int]:
        """An ATen call that no op stands for: a kernel known by the shapes of the call."""
        assert self._launches is not None
        launch = self._launches.launches[number]
        made = bare_row(launch)
        row = self._builder.add(made, made, ())
        self._runs[row] = self._runs.get(row, 0.0) + runs
        self._bytes += (made.bytes_read + made.bytes_written) * runs
        file, _, line = launch.source.rpartition(":")
        location = Location(launch.module_path, file, int(line) if line.isdigit() else 0)
        return Kernel(row, (), made.launches, launch.module_path, location), SymbolicWork({(): made.work}), 0

    def _note_opaque(self, graph: Graph, members: Sequence[int], runs: float) -> None:
        for node in members:
            work: OpWork = graph.works[node]
            if not work.modelled:
                held = self._opaque.setdefault(label_of(graph.ops[node]), _Opaque(reason=work.note))
                held.count += runs
                held.nbytes += work.nbytes * runs

    def _unmodelled(self) -> tuple[Unmodelled, ...]:
        moved = max(self._bytes, 1.0)
        return tuple(
            Unmodelled(name, held.count, held.nbytes, min(1.0, held.nbytes / moved), held.reason)
            for name, held in sorted(self._opaque.items(), key=lambda item: -item[1].nbytes)
        )

    def _message(self, graph: Graph, node: int) -> P2P:
        """A send or receive; its peer is known by rank, which `peers.with_peers` turns into axis and distance."""
        op = graph.ops[node]
        sends = op.name == "stablehlo.send"
        values = graph.inputs[node] if sends else graph.outputs[node]
        nbytes = sum(kind.nbytes for kind in (graph.types[value] for value in values) if isinstance(kind, TensorType))
        peer, tag = int(op.attrs[PEER]), int(op.attrs.get(TAG, 0))
        direction = "send" if sends else "recv"
        return P2P(direction, "", peer, tag, nbytes, scope=graph.scopes[node], location=graph.location(node))

    def _collective(self, graph: Graph, node: int) -> Collective:
        op = graph.ops[node]
        kinds = [graph.types[value] for value in graph.inputs[node]]
        dtype = next((kind.dtype.name for kind in kinds if isinstance(kind, TensorType)), "")
        return Collective(
            kind=op.name.split(".", 1)[1],
            groups=self._groups(op),
            operand_bytes=sum(kind.nbytes for kind in kinds),
            result_bytes=sum(graph.types[value].nbytes for value in graph.outputs[node]),
            reduce_op=op.regions[0].ops[0].name.split(".", 1)[1] if op.regions and op.regions[0].ops else "",
            dtype=dtype,
            channel=int(op.attrs.get("channel_handle", 0) or 0),
            asynchronous=bool(op.attrs.get("asynchronous", False)),
            scope=graph.scopes[node],
            location=graph.location(node),
            merged=len(kinds) if self._program.prefused else 1,
            shift=_shift(op),
        )

    def _groups(self, op: Op) -> Groups:
        groups = op.attrs.get("replica_groups")
        everyone = all_devices(self._program.num_devices)
        return groups if isinstance(groups, Groups) and groups.num_devices else everyone

    def _control(self, graph: Graph, node: int, runs: float) -> tuple[LoweredNode, SymbolicWork, int]:
        op, bodies = graph.ops[node], graph.bodies[node]
        scope, location = graph.scopes[node], graph.location(node)
        if op.name == "stablehlo.while":
            value = self._value(op.count)
            trips = value if value is not None else (1 if isinstance(op.count, int) else op.count.low)
            body, work, temp = self._region(bodies[1], runs * trips, loop=True)
            count: Count = value if value is not None else op.count
            passing = self._micro_batches.get(op.results[0]) if op.results else None
            return Loop(body, count, scope, location, micro_batches=passing), work.times(count), temp
        return self._branch(bodies, runs, scope, location)

    def _branch(
        self, graphs: Sequence[Graph], runs: float, scope: str, location: Location
    ) -> tuple[LoweredNode, SymbolicWork, int]:
        """One of several bodies runs; kernels of each are counted by its probability, where there is one."""
        choice = self._conventions.branch
        chances = _chances(graphs, choice) if isinstance(choice, float) else None
        weights = chances or (1.0,) * len(graphs)
        parts = [self._region(graph, runs * weight) for graph, weight in zip(graphs, weights, strict=True)]
        works = [work.evaluate(self._conventions.loops)[0] for _, work, _ in parts]
        if chances is None:
            work = _extreme(works, most=choice == "max")
            if choice == "min":
                cheapest = works.index(min(works, key=lambda part: (part.flops, part.nbytes)))
                chances = tuple(float(index == cheapest) for index in range(len(works)))
        else:
            work = total(work * chance for work, chance in zip(works, chances, strict=True))
        node = Branch(tuple(body for body, _, _ in parts), chances, scope, location)
        return node, SymbolicWork({(): work}), max(temp for _, _, temp in parts)

    def _region(self, graph: Graph, runs: float, *, loop: bool = False) -> tuple[Body, SymbolicWork, int]:
        return self._body(graph, Residents(kept=set(), donated=set(graph.arguments)), runs, loop=loop)


def _needs(graph: Graph, groups: Sequence[Group]) -> list[tuple[int, ...]]:
    """Of every kernel the kernels whose results it reads, in order."""
    home = {node: index for index, group in enumerate(groups) for node in group.roots}
    producer = graph.producer
    return [
        tuple(sorted({home[producer[value]] for value in group.reads if producer[value] in home} - {index}))
        for index, group in enumerate(groups)
    ]


def _placed(node: LoweredNode, deps: tuple[int, ...], held_bytes: int, ahead: bool) -> LoweredNode:
    if isinstance(node, Kernel | Collective):
        return replace(node, deps=deps, held_bytes=held_bytes, ahead=ahead)
    return replace(node, deps=deps, held_bytes=held_bytes)


def _shift(op: Op) -> Shift | None:
    """The shift of a permutation: as partitioning found it, or read off its pairs if all go equally far."""
    known = op.attrs.get("shift")
    if isinstance(known, Shift):
        return known
    pairs = op.attrs.get("source_target_pairs")
    if not pairs:
        return None
    devices = max(max(pair) for pair in pairs) + 1
    steps = {(target - source) % devices for source, target in pairs}
    if len(steps) != 1:
        return None
    step = steps.pop()
    return Shift("", step if step <= devices // 2 else step - devices, len(pairs) == devices)


def _plus(summed: SymbolicWork, work: Work) -> SymbolicWork:
    terms = dict(summed.terms)
    terms[()] = terms.get((), Work()) + work
    return SymbolicWork(terms)


def _extreme(works: Sequence[Work], *, most: bool) -> Work:
    """FLOPs of the branch with most (or least) FLOPs, bytes of the one with most (or least) bytes."""
    pick = max if most else min
    by_flops, by_bytes = pick(works, key=lambda work: work.flops), pick(works, key=lambda work: work.nbytes)
    return replace(by_flops, bytes_read=by_bytes.bytes_read, bytes_written=by_bytes.bytes_written)


def _chances(graphs: Sequence[Graph], probability: float) -> tuple[float, ...]:
    """Of two branches the second is the true one; of more, the dearest has `probability` and the cheapest the rest."""
    if len(graphs) == 2:
        return (1 - probability, probability)
    costs = [sum(work.matmul_flops + work.nbytes for work in graph.works) for graph in graphs]
    chances = [0.0] * len(graphs)
    chances[costs.index(max(costs))] += probability
    chances[costs.index(min(costs))] += 1 - probability
    return tuple(chances)


__all__ = ["Target", "lower"]
