"""What is matched: device work of one measured step, and the kernels and collectives of a prediction, in order."""

import math
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from stablecast.backends.collectives import CollectiveModel
from stablecast.backends.device import System
from stablecast.backends.pricing import Priced
from stablecast.ir.device_program import P2P, Body, Branch, Collective, DeviceProgram, Kernel, Loop
from stablecast.ir.kernels import KernelClass, KernelRow
from stablecast.ir.scopes import parse_scope
from stablecast.ir.types import Count
from stablecast.validation.collectives import MeasuredCollective, collectives, shapes_of
from stablecast.validation.kernel_names import WEIGHT_GRADIENT, MeasuredClass
from stablecast.validation.launches import scope_path
from stablecast.validation.measured import MeasuredRun
from stablecast.validation.operators import class_of_operator, class_of_owner, launches_nothing, plain_operator

MAX_ITEMS: Final = 50_000
"""Kernels of a prediction that are laid out one by one; loops beyond that stay one item each."""

_CLASSES: Final[Mapping[str, MeasuredClass]] = {
    KernelClass.MATMUL: MeasuredClass.MATMUL,
    KernelClass.CONVOLUTION: MeasuredClass.CONVOLUTION,
    KernelClass.ATTENTION: MeasuredClass.ATTENTION,
    KernelClass.MOE: MeasuredClass.MATMUL,
    KernelClass.REDUCTION: MeasuredClass.REDUCTION,
    KernelClass.ELEMENTWISE: MeasuredClass.ELEMENTWISE,
    KernelClass.GATHER: MeasuredClass.GATHER,
    KernelClass.SCATTER: MeasuredClass.SCATTER,
    KernelClass.SORT: MeasuredClass.SORT,
    KernelClass.FFT: MeasuredClass.FFT,
    KernelClass.COPY: MeasuredClass.COPY,
    KernelClass.CUSTOM: MeasuredClass.OTHER,
}
_STEP_ANNOTATIONS: Final = ("ProfilerStep#", "nccl:")

_NAMESPACES: Final = frozenset({"aten", "prims", "torchvision", "fbgemm"})
_HLO_SHAPE: Final = re.compile(r"\b[a-z]+\d*\w*\[([\d,]*)\]")

_CONVOLUTION, _ADD = "aten::convolution", "aten::add"
"""The bias of a convolution is added by another operator on a GPU."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """One unit of work on either side.

    Of a measurement: the kernels that one operator launched, or one kernel where that is unknown. Of a prediction: a
    kernel or collective. `label`: how reports call it; `scope`: the user's path; `shape`: sizes that identify the
    operation, empty where unknown; `kind`, `nbytes`, `group`: of a collective. `start_s`: within the step.
    `count`: runs that it stands for; `time_s`: of all of them. `parts`: kernels in it. `deps`: items that it needs.
    `op`: the framework's operator (`aten::mm`), where it is known.
    """

    klass: MeasuredClass
    label: str
    scope: str
    shape: Shape
    time_s: float
    start_s: float
    stream: int = 0
    kind: str = ""
    nbytes: float = 0
    group: int = 0
    count: float = 1
    parts: int = 1
    exposed_s: float = 0
    bound: str = ""
    deps: tuple[int, ...] = ()
    op: str = ""

    @property
    def is_collective(self) -> bool:
        return self.klass is MeasuredClass.COMMUNICATION


def measured_items(
    run: MeasuredRun, step: int, waits_s: Mapping[int, float] | None = None, *, gradients_apart: bool = True
) -> tuple[Item, ...]:
    """The work of step `step`, kernels of one operator call together.

    `waits_s`: by position, the part of a collective's time in which it waited for other ranks, which is left out.
    `gradients_apart`: whether the two gradients of a convolution are two items.
    """
    talk = {entry.position: entry for entry in collectives(run)}
    origin = run.windows[step][0] if run.windows else 0.0
    found = [
        (positions, _measured(run, positions, origin, talk))
        for positions in units(run, step, talk, apart=gradients_apart)
    ]
    waits = waits_s or {}
    return tuple(_without(item, sum(waits.get(position, 0.0) for position in positions)) for positions, item in found)


def _without(item: Item, wait_s: float) -> Item:
    if not wait_s:
        return item
    return replace(item, time_s=item.time_s - wait_s, exposed_s=max(item.exposed_s - wait_s, 0.0))


def units(run: MeasuredRun, step: int, talk: Container[int], *, apart: bool = True) -> tuple[list[int], ...]:
    """Positions of the work of step `step`, those that one operator call launched together; `talk`: of collectives.

    With `apart`, the two gradients of a convolution, which one call launches one after the other, are two units.
    """
    found: dict[tuple[int, int], list[int]] = {}
    for position in np.nonzero(run.step == step)[0].tolist():
        alone = run.op[position] < 0 or position in talk
        found.setdefault((-1, position) if alone else (int(run.op[position]), -1), []).append(position)
    if not apart:
        return tuple(found.values())
    return tuple(part for unit in found.values() for part in _gradients(run, unit))


def _gradients(run: MeasuredRun, positions: list[int]) -> list[list[int]]:
    """The kernels of a convolution's gradient to its input, and of that to its weights, which come second."""
    if not run.op_name(positions[0]).endswith("convolution_backward"):
        return [positions]
    first = next((at for at, position in enumerate(positions) if WEIGHT_GRADIENT.search(run.name(position))), 0)
    while first and run.klass(positions[first - 1]) is MeasuredClass.MEMSET:
        first -= 1
    return [part for part in (positions[:first], positions[first:]) if part]


def longest(run: MeasuredRun, positions: Sequence[int]) -> int:
    """The position that took most of the time of a unit, which gives it its class."""
    return max(positions, key=lambda position: float(run.duration_s[position]))


def _measured(run: MeasuredRun, positions: list[int], origin: float, talk: Mapping[int, MeasuredCollective]) -> Item:
    main = longest(run, positions)
    event, op = int(run.work[main]), int(run.op[main])
    time, start = float(run.duration_s[positions].sum()), float(run.start_s[positions[0]]) - origin
    stream = int(run.events.stream[event])
    spoken = talk.get(main)
    if spoken is not None:
        return Item(
            MeasuredClass.COMMUNICATION, f"{spoken.kind} {spoken.nbytes:,.0f} B", work_scope(run, event, op), (), time,
            start, stream, spoken.kind, spoken.nbytes, spoken.group_size, exposed_s=spoken.exposed_s,
        )  # fmt: skip
    args = run.events.args_of(op) if op >= 0 else run.events.args_of(event)
    klass = class_of_owner(run.op_name(main)) or run.klass(main)
    name = run.op_name(main) or run.name(main)
    return Item(
        klass, name, work_scope(run, event, op), measured_shape(klass, args), time, start, stream,
        nbytes=float(run.events.nbytes[positions[0]]), parts=len(positions), op=plain_operator(run.op_name(main)),
    )  # fmt: skip


def work_scope(run: MeasuredRun, event: int, op: int) -> str:
    """The user's path to a device event, by what the profiler attached or by the annotations around its operator."""
    named = run.events.args_of(event).get("tf_op")
    if named:
        return parse_scope(str(named).removesuffix(":")).label
    return scope_path(run.events, run.launches, op, _STEP_ANNOTATIONS) if op >= 0 else ""


def measured_shape(klass: MeasuredClass, args: Mapping[str, Any]) -> Shape:
    """What identifies the operation's size: of a product batch x m x n x k, else the largest operand's elements."""
    text = args.get("long_name")
    if text and klass is MeasuredClass.MATMUL:
        return _hlo_product(str(text))
    shapes = shapes_of(args)
    if klass is MeasuredClass.MATMUL and len(shapes) >= 2:
        return (_multiplies(shapes),)
    return (max(map(math.prod, shapes)),) if shapes and klass is not MeasuredClass.CONVOLUTION else ()


def _hlo_product(text: str) -> Shape:
    """m x n x k of a product, as `HLO = type[m,n] fusion(type[m,k] a, type[k,n] b)` gives it: the root of all sizes."""
    sizes = [math.prod(map(int, found.split(","))) for found in _HLO_SHAPE.findall(text)[:3] if found]
    if len(sizes) < 3:
        return ()
    square = math.prod(sizes)
    root = math.isqrt(square)
    return (root,) if root * root == square else ()


def _multiplies(shapes: list[Shape]) -> int:
    """m x n x k of the last two matrices."""
    matrices = (
        [shape for shape in shapes if len(shape) >= 2][:2]
        if len(shapes) == 2
        else [s for s in shapes if len(s) >= 2][-2:]
    )
    if len(matrices) < 2:
        return 0
    left, right = matrices
    return math.prod(left) * (right[-1] if right[-2] == left[-1] else right[-2])


def predicted_shape(row: KernelRow) -> Shape:
    """The same of a predicted kernel."""
    if row.klass == KernelClass.MATMUL:
        return (row.batch * row.m * row.n * row.k,)
    return (row.elems,) if row.klass in (KernelClass.ELEMENTWISE, KernelClass.REDUCTION) else ()


def _operator(name: str) -> str:
    """PyTorch's operator in a label (`aten::mm`) or a location (`aten.mm.default`), empty for all else."""
    if "::" in name:
        return plain_operator(name)
    namespace, dot, rest = name.partition(".")
    return plain_operator(f"{namespace}::{rest.split('.')[0]}") if dot and namespace in _NAMESPACES else ""


def predicted_items(
    program: DeviceProgram, priced: Priced, system: System, loops: Mapping[str, int] | None = None
) -> tuple[Item, ...]:
    """The kernels and collectives of a step in issue order, one after the other, loops laid out."""
    walk = _Walk(program, priced, CollectiveModel(system), loops or {})
    walk.body(program.body, 1.0)
    return tuple(walk.items)


class _Walk:
    def __init__(
        self, program: DeviceProgram, priced: Priced, model: CollectiveModel, loops: Mapping[str, int]
    ) -> None:
        self._rows = program.table.rows
        self._time = priced.estimates.time_s.tolist()
        self._bound = list(map(str, priced.estimates.bound))
        self._model = model
        self._loops = loops
        self._clock = 0.0
        self.items: list[Item] = []

    def body(self, body: Body, count: float) -> None:
        """Lay out one run of `body`; `count` stands for runs that are not laid out."""
        numbers: dict[int, int] = {}
        for index, node in enumerate(body):
            if isinstance(node, Loop):
                self._loop(node, count)
            elif isinstance(node, Branch):
                self.body(max(node.bodies, key=self._cost), count)
            else:
                deps = tuple(numbers[dep] for dep in (*node.deps, *node.after) if dep in numbers)
                item = (
                    self._kernel(node, count, deps) if isinstance(node, Kernel) else self._collective(node, count, deps)
                )
                self.items.append(item)
                self._clock += item.time_s
            numbers[index] = len(self.items) - 1

    def _loop(self, loop: Loop, count: float) -> None:
        trips = self._trips(loop.count)
        if trips * len(loop.body) + len(self.items) > MAX_ITEMS:
            self.body(loop.body, count * trips)
            return
        for _ in range(trips):
            self.body(loop.body, count)

    def _trips(self, count: Count) -> int:
        if isinstance(count, int):
            return count
        return self._loops.get(count.name, count.default if count.default is not None else count.low)

    def _cost(self, body: Body) -> float:
        total = 0.0
        for node in body:
            if isinstance(node, Kernel):
                total += self._time[node.row]
            elif isinstance(node, Loop):
                total += self._cost(node.body) * self._trips(node.count)
            elif isinstance(node, Branch):
                total += max(map(self._cost, node.bodies))
        return total

    def _kernel(self, node: Kernel, count: float, deps: tuple[int, ...]) -> Item:
        row = self._rows[node.row]
        scope = parse_scope(node.scope).label
        time = self._time[node.row] * count
        klass = _CLASSES.get(str(row.klass), MeasuredClass.OTHER)
        op = _operator(row.label) or _operator(parse_scope(node.scope).op)
        if klass is MeasuredClass.ELEMENTWISE and op == _CONVOLUTION:
            op = _ADD
        if klass is MeasuredClass.COPY and op and not launches_nothing(op):
            klass = class_of_operator(op)
        label = f"{row.klass} {row.shape}" if row.modelled else row.label or str(row.klass)
        return Item(
            klass, label, scope, predicted_shape(row), time, self._clock, node.stream,
            nbytes=row.bytes_read + row.bytes_written, count=count, parts=node.launch, bound=self._bound[node.row],
            deps=deps, op=op,
        )  # fmt: skip

    def _collective(self, node: Collective | P2P, count: float, deps: tuple[int, ...]) -> Item:
        scope = parse_scope(node.scope).label
        if isinstance(node, P2P):
            time = self._model.p2p(node).time_s * count
            return Item(
                MeasuredClass.COMMUNICATION, f"{node.direction} {node.nbytes:,} B", scope, (), time, self._clock,
                node.stream, "collective_permute", float(node.nbytes), 2, count, exposed_s=time, deps=deps,
            )  # fmt: skip
        time = self._model.estimate(node).time_s * count
        return Item(
            MeasuredClass.COMMUNICATION, f"{node.kind} {node.message_bytes:,} B", scope, (), time, self._clock,
            node.stream, node.kind, float(node.message_bytes), node.groups.size, count, exposed_s=time, deps=deps,
        )  # fmt: skip
