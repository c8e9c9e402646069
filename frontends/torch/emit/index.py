"""Reads and writes by index: embedding, gather, scatter, advanced indexing."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from collections.abc import Sequence
from typing import Any

from stablecast.frontends.torch.emit.builder import Val, axis_of
from stablecast.frontends.torch.emit.emitter import Emitter
from stablecast.frontends.torch.emit.registry import emits


def take_rows(e: Emitter, x: Val, index: Val, axis: int = 0) -> Val:
    """Slices of `x` along `axis`: its shape with that dimension replaced by those of `index`."""
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    shape = (*before, *index.shape, *after)
    count = index.rank
    numbers = {
        "offset_dims": [*range(axis), *range(axis + count, len(shape))],
        "collapsed_slice_dims": [axis],
        "operand_batching_dims": [],
        "start_indices_batching_dims": [],
        "start_index_map": [axis],
        "index_vector_dim": count,
    }
    return e.gather(x, index, numbers, [*before, 1, *after], shape)


def put_rows(e: Emitter, x: Val, index: Val, rows: Val, axis: int, how: str) -> Val:
    """`x` with slices along `axis` combined with `rows`, whose dimension there is that of the flat index."""
    numbers = {
        "update_window_dims": [place for place in range(rows.rank) if place != axis],
        "inserted_window_dims": [axis],
        "input_batching_dims": [],
        "scatter_indices_batching_dims": [],
        "scattered_dims_to_operand_dims": [axis],
        "index_vector_dim": 1,
    }
    return e.scatter(x, e.reshape(index, (index.shape[0], 1)), rows, numbers, how)


def from_front(e: Emitter, index: Val, size: int) -> Val:
    """Indices that count from the end made to count from the front."""
    low = e.compare(index, e.splat(0, index.shape, index.dtype), "LT")
    return e.select(low, e.shift(index, size), index)


@emits("aten.embedding")
def embedding(e: Emitter, weight: Val, index: Val, *_: Any, **__: Any) -> Val:
    return take_rows(e, weight, index)


@emits("aten.embedding_dense_backward")
def embedding_dense_backward(e: Emitter, grad: Val, index: Val, count: int, padding: int, scale: bool) -> Val:
    flat = math.prod(index.shape)
    rows = e.reshape(grad, (flat, grad.shape[-1]))
    places = e.reshape(index, (flat,))
    if padding >= 0:
        kept = e.compare(places, e.splat(padding, places.shape, places.dtype), "NE")
        rows = e.select(e.broadcast_in_dim(kept, rows.shape, (0,)), rows, e.splat(0, rows.shape, rows.dtype))
    wide = e.convert(rows, "f32") if rows.dtype in ("bf16", "f16") else rows
    zeros = e.splat(0, (count, grad.shape[-1]), wide.dtype)
    return put_rows(e, zeros, places, wide, 0, "add")


@emits("aten.index_select")
def index_select(e: Emitter, x: Val, dim: int, index: Val) -> Val:
    if not x.rank:
        return x
    return take_rows(e, x, e.reshape(index, (math.prod(index.shape),)), axis_of(dim, x.rank))


def _along(e: Emitter, x: Val, index: Val, axis: int) -> tuple[Val, dict[str, Any]]:
    """Index vectors and numbers for one element at each place of `index` along `axis`; other dimensions are batch."""
    same = [place for place in range(x.rank) if place != axis]
    batch = [place for place in same if x.shape[place] == index.shape[place]]
    rest = [place for place in range(x.rank) if place not in batch]
    columns = [
        e.reshape(index if place == axis else e.iota(index.shape, place, index.dtype), (*index.shape, 1))
        for place in rest
    ]
    numbers = {"batch": batch, "rest": rest, "vector": index.rank}
    return e.concat(columns, index.rank), numbers


@emits("aten.gather")
def gather(e: Emitter, x: Val, dim: int, index: Val, **__: Any) -> Val:
    if not x.rank:
        return e.reshape(x, e.out.shape)
    starts, parts = _along(e, x, index, axis_of(dim, x.rank))
    numbers = {
        "offset_dims": [],
        "collapsed_slice_dims": parts["rest"],
        "operand_batching_dims": parts["batch"],
        "start_indices_batching_dims": parts["batch"],
        "start_index_map": parts["rest"],
        "index_vector_dim": parts["vector"],
    }
    return e.gather(x, starts, numbers, [1] * x.rank, index.shape)


_HOW = {"sum": "add", "add": "add", "prod": "multiply", "multiply": "multiply", "amax": "maximum", "amin": "minimum"}


@emits("aten.scatter", "aten.scatter_add", "aten.scatter_reduce")
def scatter(e: Emitter, x: Val, dim: int, index: Val, source: Any, reduce: str | None = None, **__: Any) -> Val:
    how = "add" if e.op.startswith("aten.scatter_add") else _HOW.get(reduce or "", "set")
    if how != "set" and reduce == "mean":
        raise NotImplementedError("scatter with a mean")
    updates = e.operand(source, x.dtype, index.shape) if not isinstance(source, Val) else e.convert(source, x.dtype)
    if updates.shape != index.shape:
        updates = e.slice(updates, [0] * index.rank, index.shape)
    starts, parts = _along(e, x, index, axis_of(dim, x.rank))
    numbers = {
        "update_window_dims": [],
        "inserted_window_dims": parts["rest"],
        "input_batching_dims": parts["batch"],
        "scatter_indices_batching_dims": parts["batch"],
        "scattered_dims_to_operand_dims": parts["rest"],
        "index_vector_dim": parts["vector"],
    }
    return e.scatter(x, starts, updates, numbers, how)


@emits("aten.index_add", "aten.index_copy")
def index_add(e: Emitter, x: Val, dim: int, index: Val, source: Val, alpha: float = 1) -> Val:
    how = "add" if e.op.startswith("aten.index_add") else "set"
    axis = axis_of(dim, x.rank)
    return put_rows(
        e, x, e.reshape(index, (math.prod(index.shape),)), e.scale(e.convert(source, x.dtype), alpha), axis, how
    )


@emits("aten.index_fill")
def index_fill(e: Emitter, x: Val, dim: int, index: Val, value: Any) -> Val:
    axis = axis_of(dim, x.rank)
    shape = tuple(index.shape[0] if place == axis else size for place, size in enumerate(x.shape))
    return put_rows(e, x, index, e.operand(value, x.dtype, shape), axis, "set")


def _split_indices(e: Emitter, x: Val, indices: Sequence[Val | None]) -> tuple[list[int], list[Val], tuple[int, ...]]:
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if any(index.dtype in ("i1", "ui8") for index in given):
        raise NotImplementedError("indexing with a mask has a shape that depends on data")
    rank = max(index.rank for index in given)
    shape = [1] * rank
    for index in given:
        for place, size in enumerate(index.shape):
            here = rank - index.rank + place
            shape[here] = max(shape[here], size) if size != 1 else shape[here]
    spread = [
        from_front(e, e.broadcast(e.convert(index, "i64"), shape), x.shape[axis])
        for axis, index in zip(axes, given, strict=True)
    ]
    return axes, spread, tuple(shape)


@emits("aten.index", "aten._unsafe_index")
def index(e: Emitter, x: Val, indices: Sequence[Val | None]) -> Val:
    """Advanced indexing: the indexed dimensions stand where they were if they are together, else in front."""
    axes, spread, shape = _split_indices(e, x, indices)
    together = axes == list(range(axes[0], axes[0] + len(axes)))
    starts = e.concat([e.reshape(part, (*shape, 1)) for part in spread], len(shape))
    rest = [axis for axis in range(x.rank) if axis not in axes]
    place = axes[0] if together else 0
    before = [axis for axis in rest if axis < axes[0]] if together else []
    out = [x.shape[axis] for axis in before] + list(shape) + [x.shape[axis] for axis in rest[len(before) :]]
    numbers = {
        "offset_dims": [*range(place), *range(place + len(shape), len(out))],
        "collapsed_slice_dims": axes,
        "operand_batching_dims": [],
        "start_indices_batching_dims": [],
        "start_index_map": axes,
        "index_vector_dim": len(shape),
    }
    return e.gather(x, starts, numbers, [1 if axis in axes else size for axis, size in enumerate(x.shape)], out)


@emits("aten.index_put", "aten._unsafe_index_put", "aten._index_put_impl")
def index_put(e: Emitter, x: Val, indices: Sequence[Val | None], values: Val, accumulate: bool = False, *_: Any) -> Val:
    masks = [one for one in indices if one is not None]
    if len(masks) == 1 and masks[0].dtype == "i1" and math.prod(values.shape) == 1 and indices[0] is not None:
        mask = e.broadcast_in_dim(masks[0], x.shape, range(masks[0].rank))
        value = e.broadcast_in_dim(e.convert(e.reshape(values, ()), x.dtype), x.shape, ())
        return e.select(mask, e.add(x, value) if accumulate else value, x)
    axes, spread, shape = _split_indices(e, x, indices)
    rest = [axis for axis in range(x.rank) if axis not in axes]
    together = axes == list(range(axes[0], axes[0] + len(axes)))
    before = [axis for axis in rest if axis < axes[0]] if together else []
    out = [x.shape[axis] for axis in before] + list(shape) + [x.shape[axis] for axis in rest[len(before) :]]
    updates = e.broadcast(e.convert(values, x.dtype), out)
    place = len(before)
    starts = e.concat([e.reshape(part, (*shape, 1)) for part in spread], len(shape))
    numbers = {
        "update_window_dims": [*range(place), *range(place + len(shape), len(out))],
        "inserted_window_dims": axes,
        "input_batching_dims": [],
        "scatter_indices_batching_dims": [],
        "scattered_dims_to_operand_dims": axes,
        "index_vector_dim": len(shape),
    }
    return e.scatter(x, starts, updates, numbers, "add" if accumulate else "set")


@emits("aten.one_hot")
def one_hot(e: Emitter, x: Val, classes: int = -1) -> Val:
    wide = e.broadcast_in_dim(x, e.out.shape, range(x.rank))
    return e.convert(e.compare(wide, e.iota(e.out.shape, x.rank, x.dtype), "EQ"), e.out.dtype)


@emits("aten.take")
def take(e: Emitter, x: Val, places: Val) -> Val:
    flat = e.reshape(x, (math.prod(x.shape),))
    return take_rows(e, flat, places)
