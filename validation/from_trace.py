"""A device program from a trace's own operators and shapes, and never from its durations.

So a trace with shapes can be validated by itself, and carried to another device. Each operator call that launched
device work becomes one kernel, collectives keep their kind, message and group. Copies to and from the host are left out
and said; operators without shapes stay in the program as opaque kernels and make it incomplete. Of a call that launched
several kernels the longest one decides the class; that is the only use of a time.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from stablecast.backends import kernel_specs as specs
from stablecast.backends.device import Device
from stablecast.ir.device_program import Collective, DeviceProgram, Kernel, Node, Unmodelled
from stablecast.ir.dtypes import dtype
from stablecast.ir.groups import Groups, all_devices
from stablecast.ir.kernels import KernelClass, KernelRow, KernelTableBuilder
from stablecast.ir.trace_events import NO_ARGS
from stablecast.ir.work import NO_WORK, SymbolicWork
from stablecast.validation.collectives import collectives, shapes_of
from stablecast.validation.from_libraries import Libraries
from stablecast.validation.items import longest, units, work_scope
from stablecast.validation.kernel_names import TF32_NAMES, WEIGHT_GRADIENT, MeasuredClass
from stablecast.validation.measured import MeasuredRun
from stablecast.validation.operators import owns_launches

Shapes = Sequence[tuple[int, ...]]
_KINDS: Final = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_broadcast", "collective_permute"}
)
ELEMENT_TYPES: Final[Mapping[str, str]] = {
    "float": "f32",
    "double": "f64",
    "c10::half": "f16",
    "half": "f16",
    "c10::bfloat16": "bf16",
    "bfloat16": "bf16",
    "long int": "i64",
    "long": "i64",
    "int": "i32",
    "bool": "i8",
    "unsigned char": "i8",
    "signed char": "i8",
}
"""Kineto's names of types in small letters -> StableHLO's."""

_CUSTOM: Final = re.compile(r"(?!aten::|torch::)\w+::|torch::autograd::CppNode")
"""Operators of other libraries: their shapes do not say their work."""

_LISTS: Final = re.compile(r"aten::(_foreach|_fused)_")
_MOST_LISTS: Final = 6
_HOST_COPY: Final = re.compile(r"HtoD|DtoH|Host -> Device|Device -> Host|Pinned|Pageable")
_ELEMENTWISE: Final = re.compile(r"(un|vec|vectorized_)?(rolled_)?elementwise_kernel")
_PER_THREAD: Final = 32
"""More elements than a thread of an elementwise kernel takes: what is beyond is a view of fewer stored ones."""

_BATCHED: Final = frozenset({"aten::bmm", "aten::baddbmm"})
_JOINS: Final = frozenset({"aten::cat", "aten::stack"})
_LOOKUPS: Final = frozenset({"aten::embedding", "aten::index_select", "aten::index", "aten::gather"})
_PRODUCTS: Final = frozenset({"aten::mm", "aten::addmm", "aten::linear", "aten::matmul", "aten::_addmm_activation"})


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call with the device work that it launched.

    `shapes`: of its tensors; `element`: their StableHLO type; `nbytes`: moved, where the trace says so; `concrete`: its
    other arguments as text. `most`: elements that its kernel has threads for, 0 where that is unknown. `way`: of a
    convolution's gradients `dgrad` or `wgrad`. `host`: it copies to or from the host.
    """

    op: str
    klass: MeasuredClass
    shapes: Shapes
    element: str
    nbytes: float
    scope: str
    concrete: Sequence[Any] = ()
    most: int = 0
    way: str = ""
    host: bool = False


def trace_program(run: MeasuredRun, step: int, device: Device, *, tf32: bool | None = None) -> DeviceProgram:
    """The program of step `step`, for pricing on `device`.

    `tf32`: whether f32 products use TF32; by default as the kernels of the trace do, going by their names.
    """
    if tf32 is None:
        tf32 = any(TF32_NAMES.search(kernel.name) for kernel in run.by_name)
    build = ProgramBuilder(device, tf32)
    talk = {entry.position: entry for entry in collectives(run)}
    largest = max((entry.group_size for entry in talk.values()), default=1) or 1
    for positions in units(run, step, talk):
        main = longest(run, positions)
        spoken = talk.get(main)
        if spoken is not None:
            build.collective(spoken.kind, spoken.nbytes, spoken.group_size or largest, largest)
        else:
            build.call(replace(_call(run, main, int(run.op[main])), way=_way(run, positions)))
    return build.program(run.events.source, largest)


def _way(run: MeasuredRun, positions: Sequence[int]) -> str:
    if not run.op_name(positions[0]).endswith("convolution_backward"):
        return ""
    return "wgrad" if any(WEIGHT_GRADIENT.search(run.name(position)) for position in positions) else "dgrad"


def _call(run: MeasuredRun, position: int, op: int) -> Call:
    own = run.events.args_of(op) if op >= 0 else NO_ARGS
    types: Any = own.get("Input type")
    names = [str(name).lower() for name in cast("list[Any]", types)] if isinstance(types, list) else []
    element = next((ELEMENT_TYPES[name] for name in names if name in ELEMENT_TYPES), "f32")
    concrete: Any = own.get("Concrete Inputs")
    shapes = shapes_of(own) or ([(1,)] if any(name in ELEMENT_TYPES for name in names) else [])
    if run.op_name(position) in _JOINS and shapes:
        shapes = [(sum(map(math.prod, shapes)),)]
    return Call(
        run.op_name(position) or run.name(position),
        run.klass(position),
        shapes,
        element,
        float(run.events.nbytes[run.work[position]]),
        work_scope(run, int(run.work[position]), op),
        cast("list[Any]", concrete) if isinstance(concrete, list) else [],
        _threads(run, position) * _PER_THREAD,
        host=bool(_HOST_COPY.search(run.name(position))),
    )


def _threads(run: MeasuredRun, position: int) -> int:
    """Threads of an elementwise kernel of PyTorch, each of which takes a few elements; 0 for all others."""
    args = run.events.args_of(int(run.work[position]))
    grid, block = args.get("grid"), args.get("block")
    if not _ELEMENTWISE.search(run.name(position)) or not isinstance(grid, list) or not isinstance(block, list):
        return 0
    return math.prod(map(int, cast("list[Any]", grid))) * math.prod(map(int, cast("list[Any]", block)))


class ProgramBuilder:
    """Takes operator calls and collectives one by one; f32 products as TF32 where `tf32`, for pricing on `device`."""

    def __init__(self, device: Device, tf32: bool) -> None:
        self._device = device
        self._tf32 = tf32
        self._table = KernelTableBuilder()
        self._body: list[Node] = []
        self._runs: dict[int, float] = {}
        self._work = NO_WORK
        self._opaque: dict[str, tuple[int, float]] = {}
        self._moved = 0.0
        self._host_bytes = 0.0
        self._libraries = Libraries(device)

    def collective(self, kind: str, nbytes: float, size: int, devices: int) -> None:
        """One collective over groups of `size` of `devices`."""
        if kind not in _KINDS:
            self._leave_out(f"collective {kind or 'of unknown kind'}", nbytes)
            return
        whole = size in (0, devices) or devices % size
        groups = all_devices(devices) if whole else Groups(devices // size, size, (devices // size, size), (0, 1))
        operand = int(nbytes) // max(groups.size, 1) if kind == "all_gather" else int(nbytes)
        self._body.append(Collective(kind, groups, operand, int(nbytes)))

    def call(self, call: Call) -> None:
        """One operator call."""
        if call.klass is MeasuredClass.MEMCPY and (call.host or not call.shapes):
            self._host_bytes += call.nbytes or _bytes(call)
            return
        row = self._row(call)
        if row is None:
            self._leave_out(call.op, call.nbytes)
            row = KernelRow(klass=KernelClass.CUSTOM, label=call.op, modelled=0, bytes_read=call.nbytes)
        number = self._table.add(row, row, ())
        self._runs[number] = self._runs.get(number, 0.0) + 1
        self._moved += row.bytes_read + row.bytes_written
        self._work = self._work + row.work
        self._body.append(Kernel(number, launch=row.launches, scope=f"{call.scope}/{call.op}" if call.scope else ""))

    def _leave_out(self, op: str, nbytes: float) -> None:
        count, known = self._opaque.get(op, (0, 0.0))
        self._opaque[op] = (count + 1, known + nbytes)

    def _row(self, call: Call) -> KernelRow | None:
        makers: Mapping[MeasuredClass, Callable[[Call], KernelRow | None]] = {
            MeasuredClass.MATMUL: self._product,
            MeasuredClass.CONVOLUTION: self._convolution,
            MeasuredClass.MEMSET: self._fill,
            MeasuredClass.GATHER: self._gather,
        }
        maker = makers.get(call.klass, self._streamed)
        row = self._libraries.row(call.op, call.shapes, call.element) if owns_launches(call.op) else maker(call)
        return None if row is None else replace(row, label=call.op)

    def _product(self, call: Call) -> KernelRow | None:
        matrices = [shape for shape in call.shapes if len(shape) >= 2]
        if len(matrices) < 2:
            return self._streamed(call) if call.op not in _BATCHED | _PRODUCTS else None
        left, right = matrices[-2:]
        k = left[-1]
        n = right[-1] if right[-2] == k else right[-2]
        batch = math.prod(left[:-2]) if call.op in _BATCHED else 1
        rows = left[-2] if call.op in _BATCHED else math.prod(left[:-1])
        row = specs.matmul(self._device, call.element, rows, n, k, batch)
        return row if self._tf32 or call.element != "f32" else replace(row, math="fp32")

    def _convolution(self, call: Call) -> KernelRow | None:
        """NCHW convolutions whose stride and padding the trace states; what it does not state is not guessed."""
        spatial = [shape for shape in call.shapes if len(shape) == 4]
        numbers = [_numbers(text) for text in call.concrete]
        settings = [found for found in numbers if len(found) == 2]
        if len(spatial) < 2 or len(settings) < 2:
            return None
        backward = call.op.endswith("backward")
        image, weight = (spatial[1], spatial[2]) if backward and len(spatial) > 2 else (spatial[0], spatial[1])
        pad, stride = (settings[1][0], settings[0][0]) if "cudnn" not in call.op else (settings[0][0], settings[1][0])
        n, c, h, w = image
        groups = c // weight[1]
        way = call.way or ("wgrad" if backward else "fwd")
        row = specs.conv2d(
            self._device, call.element, n, h, w, c, weight[0], weight[2], weight[3], stride, pad, groups, way
        )
        return row if self._tf32 or call.element != "f32" else replace(row, math="fp32")

    def _fill(self, call: Call) -> KernelRow | None:
        elements = int(call.nbytes) // 4 or _limited(max(map(math.prod, call.shapes), default=0), call)
        return specs.elementwise(self._device, "f32", elements, 1, 0) if elements else None

    def _gather(self, call: Call) -> KernelRow | None:
        """Rows that are picked, not the table that they are picked from; other lookups do not say how many."""
        if not call.shapes or call.op not in _LOOKUPS:
            return None
        indices = call.shapes[-1]
        width = call.shapes[0][-1] if len(call.shapes) > 1 and len(call.shapes[0]) > 1 else 1
        row = specs.elementwise(self._device, call.element, max(math.prod(indices), 1), width, 1)
        return replace(row, klass=KernelClass.GATHER)

    def _streamed(self, call: Call) -> KernelRow | None:
        """What reads its operands and writes the largest of them once."""
        if not call.shapes or _CUSTOM.match(call.op):
            return None
        if _LISTS.match(call.op):
            elements, lists = _listed(call.shapes)
            return specs.elementwise(self._device, call.element, elements, 1, lists)
        largest = max(map(math.prod, call.shapes))
        if not largest:
            return None
        inputs = sum(math.prod(shape) == largest for shape in call.shapes)
        largest = _limited(largest, call)
        if call.klass is MeasuredClass.REDUCTION:
            shape = max(call.shapes, key=math.prod)
            return specs.reduce(self._device, call.element, max(largest // shape[-1], 1), shape[-1])
        row = specs.elementwise(self._device, call.element, largest, 1, max(inputs, 1))
        klass = _STREAMED.get(call.klass)
        return row if klass is None else replace(row, klass=klass)

    def program(self, source: str, devices: int) -> DeviceProgram:
        """What was built."""
        reason = "the trace states no shapes that say its work"
        opaque = tuple(
            Unmodelled(name, count, nbytes, nbytes / self._moved if self._moved else 0.0, reason)
            for name, (count, nbytes) in sorted(self._opaque.items(), key=lambda pair: (-pair[1][1], -pair[1][0]))
        )
        arithmetic = "TF32" if self._tf32 else "FP32"
        notes = [f"f32 products multiply as {arithmetic}", f"rebuilt from the operators and shapes of {source}"]
        if self._host_bytes:
            notes.append(f"copies between host and device are left out: {self._host_bytes / 1e6:.3g} MB a step")
        return DeviceProgram(
            name=source,
            body=tuple(self._body),
            table=self._table.build(self._runs),
            work=SymbolicWork({(): self._work}),
            num_devices=devices,
            exec_model="eager",
            platform="cuda",
            unmodelled=opaque,
            complete=not opaque,
            notes=tuple(notes),
        )


_STREAMED: Final[Mapping[MeasuredClass, KernelClass]] = {
    MeasuredClass.SCATTER: KernelClass.SCATTER,
    MeasuredClass.SORT: KernelClass.SORT,
    MeasuredClass.COPY: KernelClass.COPY,
    MeasuredClass.MEMCPY: KernelClass.COPY,
    MeasuredClass.FFT: KernelClass.FFT,
}


def _listed(shapes: Shapes) -> tuple[int, int]:
    """Elements of one of the equal lists of tensors, and how many lists there are."""
    count = len(shapes)
    lists = next((n for n in range(_MOST_LISTS, 1, -1) if not count % n and _alike(shapes, count // n)), 1)
    return sum(map(math.prod, shapes[: count // lists])), lists


def _alike(shapes: Shapes, size: int) -> bool:
    return all(shapes[at] == shapes[at - size] for at in range(size, len(shapes)))


def _bytes(call: Call) -> float:
    """Of the largest tensor of a call."""
    largest = max(map(math.prod, call.shapes), default=0)
    return float(dtype(call.element).nbytes(largest))


def _limited(elements: int, call: Call) -> int:
    return min(elements, call.most) if call.most else elements


def _numbers(text: Any) -> list[int]:
    """`[2, 2]` as numbers; nothing for all else."""
    inner = str(text).strip()
    if not (inner.startswith("[") and inner.endswith("]")):
        return []
    parts = [part.strip() for part in inner[1:-1].split(",") if part.strip()]
    return [int(part) for part in parts] if all(part.lstrip("-").isdigit() for part in parts) else []
