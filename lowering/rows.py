"""A fused group as a row of the kernel table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from stablecast.ir.kernels import KernelClass, KernelRow
from stablecast.ir.types import TensorType, ValueType, as_tensor
from stablecast.lowering.attention_shape import AttentionShape, attention_row
from stablecast.lowering.categories import Category
from stablecast.lowering.graph import Graph
from stablecast.lowering.group import Group
from stablecast.lowering.library_attention import library_attention
from stablecast.lowering.products import Arithmetic, conv_shape, math_mode, matmul_shape, wider
from stablecast.lowering.traffic import Traffic

_TRANSPOSE = "stablehlo.transpose"
_STRIDED = frozenset({_TRANSPOSE, "stablehlo.slice"})
_WARP, _SECTOR_BYTES = 32, 32.0
"""Threads that load together, and what one load of device memory fetches at least (CUDA Best Practices Guide)."""
_GATHERS = frozenset({"stablehlo.gather", "stablehlo.dynamic_gather", "stablehlo.torch_index_select"})


@dataclass(frozen=True, slots=True)
class Maker:
    """What a compiler says of a kernel that it made: the library that runs it, its tiling, and estimated cycles."""

    library: str = ""
    tiles: str = ""
    cycles: float = 0


def maker_of(graph: Graph, members: Sequence[int]) -> Maker | None:
    """What the compiler says of the ready-made fusion that holds `members`, None where there is none."""
    number = graph.fusion_of[members[0]]
    if number < 0:
        return None
    attrs = graph.fusions[number].attrs
    made = Maker(attrs.get("library", ""), attrs.get("tiles", ""), attrs.get("estimated_cycles", 0.0))
    return None if made == Maker() else made


@dataclass(frozen=True, slots=True)
class GroupKey:
    """What makes two groups the same kernel: their ops, how these are wired, which results leave, what is on chip."""

    ops: tuple[int, ...]
    wiring: tuple[int, ...]
    written: tuple[int, ...]
    in_place: tuple[int, ...]
    maker: Maker | None = None
    near: tuple[int, ...] = ()


def group_key(graph: Graph, members: Sequence[int], written: Sequence[int], in_place: Sequence[int]) -> GroupKey:
    """The key of the kernel made of `members` (ascending) that hands on `written` and updates `in_place` nodes."""
    numbers: dict[int, int] = {}
    wiring: list[int] = []
    weightless = graph.weightless
    for node in members:
        inputs = graph.inputs[node]
        wiring.extend([-1 if weightless[value] else numbers.setdefault(value, len(numbers)) for value in inputs])
        for value in graph.outputs[node]:
            numbers.setdefault(value, len(numbers))
    ops = tuple([graph.ops[node].signature for node in members])
    places = {node: place for place, node in enumerate(members)}
    return GroupKey(
        ops,
        tuple(wiring),
        tuple([numbers[value] for value in written]),
        tuple([places[node] for node in in_place]),
        maker_of(graph, members),
        tuple([number for value, number in numbers.items() if value in graph.near]) if graph.near else (),
    )


def hero_of(graph: Graph, group: Group) -> int:
    """The node that decides the class of the kernel: a product, else a reduction, else its main root."""
    if group.hero >= 0:
        return group.hero
    reductions = [node for node in group.roots if graph.categories[node] is Category.REDUCE]
    return max(reductions or _inner_reductions(graph, group) or group.roots)


def _inner_reductions(graph: Graph, group: Group) -> list[int]:
    """Reductions of what the kernel walks over, in kernels that also normalise."""
    return [
        node
        for node in group.members
        if graph.categories[node] is Category.REDUCE and graph.types[graph.inputs[node][0]].elements == group.extent
    ]


def make_row(graph: Graph, group: Group, done: Traffic, arithmetic: Arithmetic) -> KernelRow:
    """The kernel table's row for `group`, whose bytes and arithmetic are `done`."""
    row = _row(graph, group, done, arithmetic)
    made = maker_of(graph, sorted(group.members))
    if made is None:
        return row
    return replace(row, library=made.library, label=made.tiles, estimated_cycles=made.cycles)


def _row(graph: Graph, group: Group, done: Traffic, arithmetic: Arithmetic) -> KernelRow:
    hero = hero_of(graph, group)
    kind = graph.categories[hero]
    common: dict[str, Any] = {
        "in_dtype": _dtype(_largest(graph, done.reads)),
        "out_dtype": _dtype(_largest(graph, done.written)),
        "inputs": len(done.reads),
        "matmul_flops": done.matmul_flops,
        "padded_flops": done.padded_flops,
        "dilation_flops": done.dilation_flops,
        "vector_flops": done.vector_flops,
        "transcendentals": done.transcendentals,
        "bytes_read": sum(done.reads.values()),
        "bytes_written": sum(done.written.values()),
        "modelled": int(done.modelled),
        "elems": group.extent,
    }
    if group.attention is not None:
        return _attention_row(graph, group, group.attention, common, arithmetic)
    if kind in (Category.MATMUL, Category.CONV):
        return _product_row(graph, group, hero, common, arithmetic)
    if kind is Category.REDUCE:
        results = sum(graph.types[value].elements for value in graph.outputs[hero][:1])
        reduced = graph.types[graph.inputs[hero][0]].elements // max(1, results)
        return KernelRow(klass=KernelClass.REDUCTION, reduced=reduced, **common)
    if kind in (Category.LOOP, Category.GENERATOR):
        row = KernelRow(klass=_loop_class(graph, group, done), **common)
        whole = _sector_share(graph, group) if group.launch >= 0 and row.klass is KernelClass.COPY else 1.0
        return replace(row, bytes_read=row.bytes_read * whole)
    op = graph.ops[hero]
    attention = library_attention(op) if graph.works[hero].klass is KernelClass.ATTENTION else None
    if attention is not None:
        return _attention_row(graph, group, attention, common, arithmetic)
    return KernelRow(klass=graph.works[hero].klass, label=op.attrs.get("call_target_name", op.name), **common)


def _attention_row(
    graph: Graph, group: Group, shape: AttentionShape, common: dict[str, Any], arithmetic: Arithmetic
) -> KernelRow:
    products = [node for node in sorted(group.members) if graph.categories[node] is Category.MATMUL]
    if not products and graph.categories[hero_of(graph, group)] is Category.HERO:
        products = [hero_of(graph, group)]
    math = "vector"
    if products:
        op = graph.ops[products[0]]
        lhs, rhs = as_tensor(op.operand_types[0]), as_tensor(op.operand_types[1])
        math = math_mode(wider(lhs.dtype, rhs.dtype), op.attrs.get("precision_config"), arithmetic)
    for name in ("matmul_flops", "padded_flops", "dilation_flops"):
        common.pop(name)
    return attention_row(shape, math, acc_dtype="f32", **common)


def _product_row(graph: Graph, group: Group, hero: int, common: dict[str, Any], arithmetic: Arithmetic) -> KernelRow:
    op = graph.ops[hero]
    lhs, rhs = as_tensor(op.operand_types[0]), as_tensor(op.operand_types[1])
    math = math_mode(wider(lhs.dtype, rhs.dtype), op.attrs.get("precision_config"), arithmetic)
    result = as_tensor(op.result_type).dtype
    is_conv = graph.categories[hero] is Category.CONV
    shape = conv_shape(op) if is_conv else matmul_shape(op)
    accumulator = "f32" if result.is_float and result.bits < 32 else result.name
    common |= {"in_dtype": lhs.dtype.name, "acc_dtype": accumulator, "elems": as_tensor(op.result_type).elements}
    klass = KernelClass.CONVOLUTION if is_conv else KernelClass.MATMUL
    if op.name == "chlo.ragged_dot":
        klass = KernelClass.MOE
        common["experts"] = as_tensor(op.operand_types[2]).elements if len(op.operand_types) > 2 else 0
    if group.merged:
        shape = _merged_shape(graph, group, dict(shape))
    return KernelRow(klass=klass, math=math, epilogue=_epilogue(graph, group, hero), **shape, **common)


def _merged_shape(graph: Graph, group: Group, shape: dict[str, int]) -> dict[str, int]:
    """The sizes of several products that share an operand: the other operands lie side by side."""
    ops = [graph.ops[node] for node in group.merged]
    sizes = [matmul_shape(op) for op in ops]
    side = "n" if all(size["m"] == shape["m"] for size in sizes) else "m"
    return {**shape, side: sum(size[side] for size in sizes)}


def _epilogue(graph: Graph, group: Group, hero: int) -> str:
    names = dict.fromkeys(graph.ops[node].name.split(".", 1)[1] for node in sorted(group.members) if node > hero)
    names.pop("broadcast_in_dim", None)
    return "+".join(names)


def _loop_class(graph: Graph, group: Group, done: Traffic) -> KernelClass:
    if done.vector_flops or done.transcendentals:
        return KernelClass.ELEMENTWISE
    names = {graph.ops[node].name for node in group.members}
    return KernelClass.COPY if names.isdisjoint(_GATHERS) else KernelClass.GATHER


def _sector_share(graph: Graph, group: Group) -> float:
    """Bytes that a copy of an eager call fetches for each that it wants: whole sectors where a transpose strides.

    PyTorch copies in the order of the result. Where neighbours of the result lie apart in memory, each thread of a warp
    fetches a sector of its own; XLA and Triton turn tiles in shared memory instead.
    """
    nodes = sorted(group.members)
    ops = [graph.ops[node] for node in nodes]
    chained = all(graph.inputs[after][:1] == graph.outputs[before] for before, after in pairwise(nodes))
    if not chained or any(op.name not in _STRIDED for op in ops):
        return 1.0
    kind = as_tensor(ops[0].operand_types[0])
    shape, strides = kind.shape, _contiguous(kind.shape)
    for op in ops:
        found = _reshaped(shape, strides, as_tensor(op.operand_types[0]).shape)
        if found is None:
            return 1.0
        order: Sequence[int] = op.attrs["permutation"] if op.name == _TRANSPOSE else range(len(found))
        strides = [found[axis] for axis in order]
        shape = as_tensor(op.result_types[0]).shape
    wide = [axis for axis, size in enumerate(shape) if size > 1]
    if not wide or strides[wide[-1]] == 1:
        return 1.0
    width = kind.dtype.bits / 8
    return max(1.0, min(_SECTOR_BYTES, width * strides[wide[-1]]) / (width * max(1, _WARP // shape[wide[-1]])))


def _contiguous(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _reshaped(shape: Sequence[int], strides: Sequence[int], asked: Sequence[int]) -> list[int] | None:
    """Strides of the same elements as a view of shape `asked`; None where none is."""
    runs: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if runs and size > 1 and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        elif size > 1:
            runs.append((size, stride))
    found: list[int] = []
    left, step = 1, 1
    for size in reversed(asked):
        if size > 1 and left == 1 and runs:
            left, step = runs.pop()
        if left % size:
            return None
        found.append(step)
        left, step = left // size, step * size
    return found[::-1]


def _largest(graph: Graph, sizes: dict[int, float]) -> ValueType | None:
    return graph.types[max(sizes, key=lambda value: sizes[value])] if sizes else None


def _dtype(kind: ValueType | None) -> str:
    return kind.dtype.name if isinstance(kind, TensorType) else ""
