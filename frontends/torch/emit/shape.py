"""Views, joins, pads and repeats."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from collections.abc import Sequence
from typing import Any

from stablecast.frontends.torch.aliases import contiguous_strides, memory_order
from stablecast.frontends.torch.emit.builder import Val, axis_of
from stablecast.frontends.torch.emit.emitter import Emitter
from stablecast.frontends.torch.emit.registry import emits


@emits(
    "view.reshape",
    "aten.view",
    "aten.reshape",
    "aten._unsafe_view",
    "aten.view_copy",
    "aten._reshape_alias",
    "aten._reshape_copy",
)
def reshape(e: Emitter, x: Val, *_: Any, **__: Any) -> Val:
    return e.reshape(x, e.out.shape)


@emits("view.permute", "aten.permute", "aten.permute_copy", "prims.transpose")
def permute(e: Emitter, x: Val, order: Sequence[int]) -> Val:
    return e.transpose(x, [axis_of(dim, x.rank) for dim in order])


@emits("view.slice")
def slice_(e: Emitter, x: Val, dim: int, start: int, end: int, step: int) -> Val:
    return e.slice_dim(x, dim, start, end, step)


@emits("view.select")
def select(e: Emitter, x: Val, dim: int, index: int) -> Val:
    return e.reshape(e.slice_dim(x, dim, index, index + 1), e.out.shape)


@emits("view.expand", "aten.expand", "aten.expand_copy", "aten.broadcast_to")
def expand(e: Emitter, x: Val, *_: Any, **__: Any) -> Val:
    return e.broadcast(x, e.out.shape)


@emits("prims.broadcast_in_dim")
def broadcast_in_dim(e: Emitter, x: Val, shape: Sequence[int], dims: Sequence[int]) -> Val:
    return e.broadcast_in_dim(x, shape, dims)


@emits("view.bitcast")
def bitcast(e: Emitter, x: Val, shape: Sequence[int], dtype: str) -> Val:
    """torch views bytes along the last dimension; StableHLO wants a dimension of its own for the parts."""
    from stablecast.frontends.torch.aliases import itemsize

    was, now = itemsize(x.dtype), itemsize(dtype)
    shape = tuple(shape)
    if was == now:
        return e.bitcast(x, shape, dtype)
    if was > now:
        return e.reshape(e.bitcast(x, (*x.shape, was // now), dtype), shape)
    parts = now // was
    return e.bitcast(e.reshape(x, (*shape, parts)), shape, dtype)


@emits("view.flatten")
def flatten_memory(e: Emitter, x: Val, order: Sequence[int]) -> Val:
    return e.reshape(e.transpose(x, order), e.out.shape)


@emits("view.unflatten")
def unflatten_memory(e: Emitter, x: Val, order: Sequence[int], shape: Sequence[int]) -> Val:
    inner = e.reshape(x, [shape[axis] for axis in order])
    inverse = sorted(range(len(order)), key=lambda place: order[place])
    return e.transpose(inner, inverse)


@emits("view.as_real")
def as_real(e: Emitter, x: Val) -> Val:
    parts = [e.reshape(part, (*x.shape, 1)) for part in (e.real(x), e.imag(x))]
    return e.concat(parts, x.rank)


@emits("view.as_complex")
def as_complex(e: Emitter, x: Val) -> Val:
    last = x.rank - 1
    real, imag = (e.reshape(e.slice_dim(x, last, index, index + 1), x.shape[:-1]) for index in (0, 1))
    return e.complex(real, imag)


@emits("view.conj")
def conj(e: Emitter, x: Val) -> Val:
    return e.complex(e.real(x), e.neg(e.imag(x)))


@emits("view.neg")
def negative_view(e: Emitter, x: Val) -> Val:
    return e.neg(x)


def _flat(e: Emitter, x: Val, order: Sequence[int]) -> Val:
    return e.reshape(e.transpose(x, order), (math.prod(x.shape),))


@emits("view.strided", "aten.as_strided_copy")
def strided(e: Emitter, x: Val, order: Sequence[int], shape: Sequence[int], strides: Sequence[int], offset: int) -> Val:
    """`as_strided` over a storage: a slice, and a transpose where dimensions are out of order, else a gather."""
    shape = tuple(shape)
    flat = _flat(e, x, order)
    count = math.prod(shape)
    sorted_axes = memory_order(shape, strides)
    inner = tuple(shape[axis] for axis in sorted_axes)
    if _steps(inner, contiguous_strides(inner), [strides[axis] for axis in sorted_axes]):
        block = e.reshape(e.slice(flat, [offset], [offset + count]), inner)
        return e.transpose(block, sorted(range(len(shape)), key=lambda place: sorted_axes[place]))
    return _gather_flat(e, flat, shape, strides, offset)


def _steps(shape: Sequence[int], wanted: Sequence[int], strides: Sequence[int]) -> bool:
    return all(size == 1 or a == b for size, a, b in zip(shape, wanted, strides, strict=True))


def _positions(e: Emitter, shape: Sequence[int], strides: Sequence[int], offset: int) -> Val:
    index = e.splat(offset, shape, "i64")
    for axis, stride in enumerate(strides):
        if shape[axis] > 1 and stride:
            index = e.add(index, e.scale(e.iota(shape, axis), stride))
    return index


def _gather_flat(e: Emitter, flat: Val, shape: tuple[int, ...], strides: Sequence[int], offset: int) -> Val:
    index = e.reshape(_positions(e, shape, strides, offset), (math.prod(shape), 1))
    numbers = {
        "offset_dims": [],
        "collapsed_slice_dims": [0],
        "operand_batching_dims": [],
        "start_indices_batching_dims": [],
        "start_index_map": [0],
        "index_vector_dim": 1,
    }
    return e.reshape(e.gather(flat, index, numbers, [1], (math.prod(shape),)), shape)


@emits("scatter.strided")
def scatter_strided(
    e: Emitter, x: Val, part: Val, order: Sequence[int], shape: Sequence[int], strides: Sequence[int], offset: int
) -> Val:
    flat = _flat(e, x, order)
    axes = memory_order(shape, strides)
    inner = tuple(shape[axis] for axis in axes)
    if _steps(inner, contiguous_strides(inner), [strides[axis] for axis in axes]):
        block = e.reshape(e.transpose(part, axes), (math.prod(shape),))
        flat = block if block.shape == flat.shape else e.update(flat, block, [offset])
    else:
        index = e.reshape(_positions(e, tuple(shape), strides, offset), (math.prod(shape), 1))
        flat = e.scatter(flat, index, e.reshape(part, (math.prod(shape),)), POINTS, "set")
    outer = e.reshape(flat, [x.shape[axis] for axis in order])
    return e.transpose(outer, sorted(range(x.rank), key=lambda place: order[place]))


POINTS = {
    "update_window_dims": [],
    "inserted_window_dims": [0],
    "input_batching_dims": [],
    "scatter_indices_batching_dims": [],
    "scattered_dims_to_operand_dims": [0],
    "index_vector_dim": 1,
}


@emits("scatter.slice")
def scatter_slice(e: Emitter, x: Val, part: Val, dim: int, start: int, end: int, step: int) -> Val:
    if step == 1:
        return e.update(x, part, [start if axis == dim else 0 for axis in range(x.rank)])
    high = x.shape[dim] - start - (part.shape[dim] - 1) * step - 1
    low = [start if axis == dim else 0 for axis in range(x.rank)]
    tail = [high if axis == dim else 0 for axis in range(x.rank)]
    inner = [step - 1 if axis == dim else 0 for axis in range(x.rank)]
    spread = e.pad(part, e.splat(0, (), x.dtype), low, tail, inner)
    mask = e.pad(e.splat(True, part.shape, "i1"), e.splat(False, (), "i1"), low, tail, inner)
    return e.select(mask, spread, x)


@emits("scatter.select")
def scatter_select(e: Emitter, x: Val, part: Val, dim: int, index: int) -> Val:
    block = e.reshape(part, [1 if axis == dim else size for axis, size in enumerate(x.shape)])
    return e.update(x, block, [index if axis == dim else 0 for axis in range(x.rank)])


@emits("aten.slice_scatter")
def slice_scatter(
    e: Emitter, x: Val, part: Val, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Val:
    dim = axis_of(dim, x.rank)
    low = max(0, min(x.shape[dim], (start or 0) + (x.shape[dim] if (start or 0) < 0 else 0)))
    return scatter_slice(e, x, e.convert(part, x.dtype), dim, low, 0, step)


@emits("aten.select_scatter")
def select_scatter(e: Emitter, x: Val, part: Val, dim: int, index: int) -> Val:
    dim = axis_of(dim, x.rank)
    return scatter_select(e, x, e.convert(part, x.dtype), dim, index % x.shape[dim])


def _mask_diagonal(e: Emitter, shape: Sequence[int], offset: int, one: int, two: int) -> Val:
    return e.compare(e.shift(e.iota(shape, one), offset), e.iota(shape, two), "EQ")


@emits("view.diagonal")
def diagonal(e: Emitter, x: Val, offset: int, one: int, two: int) -> Val:
    """The rows of the diagonal are picked with a mask and a sum over the second dimension."""
    mask = _mask_diagonal(e, x.shape, offset, one, two)
    picked = e.reduce(e.select(mask, x, e.splat(0, x.shape, x.dtype)), [two], "or" if x.dtype == "i1" else "add")
    kept = [axis for axis in range(x.rank) if axis != two]
    place = kept.index(one)
    length = e.out.shape[-1]
    start = max(0, -offset)
    picked = e.slice_dim(picked, place, start, start + length)
    return e.transpose(picked, [axis for axis in range(picked.rank) if axis != place] + [place])


@emits("scatter.diagonal")
def scatter_diagonal(e: Emitter, x: Val, part: Val, offset: int, one: int, two: int) -> Val:
    kept = [axis for axis in range(x.rank) if axis != two]
    place = kept.index(one)
    order = list(range(part.rank - 1))
    order.insert(place, part.rank - 1)
    rows = e.transpose(part, order)
    start = max(0, -offset)
    low = [start if axis == place else 0 for axis in range(rows.rank)]
    high = [x.shape[one] - start - rows.shape[place] if axis == place else 0 for axis in range(rows.rank)]
    spread = e.broadcast_in_dim(e.pad(rows, e.splat(0, (), x.dtype), low, high), x.shape, kept)
    return e.select(_mask_diagonal(e, x.shape, offset, one, two), spread, x)


@emits("aten.cat", "aten.concat")
def cat(e: Emitter, parts: list[Val], dim: int = 0) -> Val:
    rank = len(e.out.shape)
    kept = [part for part in parts if part.rank == rank]
    return e.concat([e.convert(part, e.out.dtype) for part in kept], axis_of(dim, rank))


@emits("fsdp.copy_in")
def copy_in(e: Emitter, parts: list[Val]) -> Val:
    flat = [e.convert(e.reshape(part, (math.prod(part.shape),)), e.out.dtype) for part in parts]
    return e.concat(flat, 0)


@emits("aten.stack")
def stack(e: Emitter, parts: list[Val], dim: int = 0) -> Val:
    rank = len(e.out.shape)
    axis = axis_of(dim, rank)
    rows = [e.reshape(e.convert(part, e.out.dtype), (*part.shape[:axis], 1, *part.shape[axis:])) for part in parts]
    return e.concat(rows, axis)


@emits("aten._chunk_cat")
def chunk_cat(e: Emitter, parts: list[Val], dim: int, chunks: int) -> Val:
    rows: list[Val] = []
    for part in parts:
        size = part.shape[dim]
        high = [(-size % chunks) if axis == dim else 0 for axis in range(part.rank)]
        padded = e.pad(part, e.splat(0, (), part.dtype), [0] * part.rank, high)
        rows.append(
            e.convert(
                e.reshape(padded, (*padded.shape[:dim], chunks, math.prod(padded.shape[dim:]) // chunks)), e.out.dtype
            )
        )
    return e.reshape(e.concat(rows, dim + 1), e.out.shape)


@emits("aten.constant_pad_nd", "aten.pad")
def constant_pad(e: Emitter, x: Val, pads: Sequence[int], value: Any = 0) -> Val:
    low, high = [0] * x.rank, [0] * x.rank
    for place in range(len(pads) // 2):
        low[x.rank - 1 - place], high[x.rank - 1 - place] = pads[2 * place], pads[2 * place + 1]
    return e.pad(x, e.splat(value, (), x.dtype), low, high)


@emits("aten.repeat")
def repeat(e: Emitter, x: Val, times: Sequence[int]) -> Val:
    shape = (1,) * (len(times) - x.rank) + x.shape
    spread = [size for pair in zip(times, shape, strict=True) for size in pair]
    wide = e.broadcast_in_dim(e.reshape(x, shape), spread, range(1, 2 * len(shape), 2))
    return e.reshape(wide, e.out.shape)


@emits("aten.flip")
def flip(e: Emitter, x: Val, dims: Sequence[int]) -> Val:
    return e.reverse(x, [axis_of(dim, x.rank) for dim in dims])


@emits("aten.roll")
def roll(e: Emitter, x: Val, shifts: Any, dims: Any = ()) -> Val:
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    if not dims:
        flat = e.reshape(x, (math.prod(x.shape),))
        return e.reshape(_rolled(e, flat, shifts[0], 0), x.shape)
    for shift, dim in zip(shifts, [dims] if isinstance(dims, int) else dims, strict=True):
        x = _rolled(e, x, shift, axis_of(dim, x.rank))
    return x


def _rolled(e: Emitter, x: Val, shift: int, dim: int) -> Val:
    size = x.shape[dim]
    cut = (size - shift) % size if size else 0
    return x if not cut else e.concat([e.slice_dim(x, dim, cut, size), e.slice_dim(x, dim, 0, cut)], dim)


@emits("aten.slice_backward")
def slice_backward(e: Emitter, grad: Val, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Val:
    dim = axis_of(dim, len(sizes))
    size = sizes[dim]
    low = max(0, min(size, start + size if start < 0 else start))
    high = size - low - (grad.shape[dim] - 1) * step - 1
    place = lambda value: [value if axis == dim else 0 for axis in range(grad.rank)]  # noqa: E731
    return e.pad(grad, e.splat(0, (), grad.dtype), place(low), place(high), place(step - 1))


@emits("aten.select_backward")
def select_backward(e: Emitter, grad: Val, sizes: Sequence[int], dim: int, index: int) -> Val:
    dim = axis_of(dim, len(sizes))
    index = index % sizes[dim]
    row = e.reshape(grad, [1 if axis == dim else size for axis, size in enumerate(sizes)])
    low = [index if axis == dim else 0 for axis in range(row.rank)]
    high = [sizes[dim] - index - 1 if axis == dim else 0 for axis in range(row.rank)]
    return e.pad(row, e.splat(0, (), grad.dtype), low, high)


@emits("aten.tril", "aten.triu")
def triangle(e: Emitter, x: Val, diagonal: int = 0) -> Val:
    rows = e.shift(e.iota(x.shape, x.rank - 2), diagonal)
    columns = e.iota(x.shape, x.rank - 1)
    kept = e.compare(rows, columns, "GE" if e.op.startswith("aten.tril") else "LE")
    return e.select(kept, x, e.splat(0, x.shape, x.dtype))


@emits("view.unfold", "aten.unfold")
def unfold(e: Emitter, x: Val, dim: int, size: int, step: int) -> Val:
    windows = e.out.shape[dim]
    parts: list[Val] = []
    for start in range(size):
        part = e.slice_dim(x, dim, start, start + (windows - 1) * step + 1, step)
        parts.append(e.reshape(part, (*part.shape, 1)))
    return e.concat(parts, x.rank)
