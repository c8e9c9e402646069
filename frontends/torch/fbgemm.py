"""FBGEMM's operators on sparse features and tables of embeddings, for captures where FBGEMM is not installed.

Names and schemas are those of FBGEMM 0.3 (a public profile of a DLRM lists them), with the operators that its backward
passes call. Each is one call of a capture; what it computes is written here in terms of ATen. All tables of one call
have rows of the same width, as its plain arguments say (`total_D` over the number of tables).
"""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from stablecast.frontends.torch.private import torch

_SUM = 0
_PACKAGE = "fbgemm_gpu"

_TABLES = "Tensor weights_offsets, Tensor D_offsets"
_BAGS = "Tensor hash_size_cumsum, int total_hash_size_bits, Tensor indices, Tensor offsets, int pooling_mode"

SCHEMAS: Mapping[str, str] = {
    "permute_2D_sparse_data": "(Tensor permute, Tensor lengths, Tensor values, Tensor? weights=None, "
    "int? permuted_lengths_sum=None) -> (Tensor, Tensor, Tensor?)",
    "asynchronous_complete_cumsum": "(Tensor t_in) -> Tensor",
    "bounds_check_indices": "(Tensor rows_per_table, Tensor(a!) indices, Tensor(b!) offsets, int bounds_check_mode, "
    "Tensor(c!) warning, Tensor(d!)? weights=None) -> ()",
    "dense_embedding_codegen_lookup_function": f"(Tensor dev_weights, {_TABLES}, int total_D, int max_D, {_BAGS}, "
    "Tensor? indice_weights, Tensor? feature_requires_grad, int output_dtype=0) -> Tensor",
    "split_embedding_backward_codegen_dense_unweighted_exact_cuda": "(Tensor grad_output, Tensor dev_weights, "
    f"{_TABLES}, int max_D, {_BAGS}) -> Tensor",
    "split_embedding_codegen_lookup_adagrad_function": "(Tensor placeholder_autograd_tensor, Tensor dev_weights, "
    "Tensor uvm_weights, Tensor lxu_cache_weights, Tensor weights_placements, "
    f"{_TABLES}, int total_D, int max_D, {_BAGS}, "
    "Tensor? indice_weights, Tensor? feature_requires_grad, Tensor lxu_cache_locations, bool gradient_clipping, "
    "float max_gradient, bool stochastic_rounding, Tensor momentum1_dev, Tensor momentum1_uvm, "
    "Tensor momentum1_placements, Tensor momentum1_offsets, float eps=0., float learning_rate=0., int output_dtype=0) "
    "-> Tensor",
    "split_embedding_backward_codegen_adagrad_unweighted_exact_cuda": "(Tensor grad_output, Tensor(a!) dev_weights, "
    f"{_TABLES}, int max_D, {_BAGS}, Tensor(b!) momentum1_dev, float eps, float learning_rate) -> ()",
}
"""Operator -> schema without its name."""


def operators() -> Any:
    """`torch.ops.fbgemm`: FBGEMM's own operators where it is installed, else declarations of the ones in `SCHEMAS`."""
    if find_spec(_PACKAGE) is not None:
        import_module(_PACKAGE)
    elif not _KEPT:
        _KEPT.append(_declare())
    return torch.ops.fbgemm


_KEPT: list[Any] = []
"""A library's declarations go when it does."""


def _declare() -> Any:
    library = torch.library.Library("fbgemm", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        torch.library.register_fake(f"fbgemm::{name}", _FAKES[name], lib=library)
    for name, (keep, backward) in _GRADIENTS.items():
        torch.library.register_autograd(f"fbgemm::{name}", backward, setup_context=keep, lib=library)
    return library


# shapes


def _fake_permute(permute: Any, lengths: Any, values: Any, weights: Any = None, total: int | None = None) -> Any:
    count = values.shape[0] if total is None else total
    moved = None if weights is None else weights.new_empty(count)
    return lengths.new_empty(permute.shape[0], lengths.shape[1]), values.new_empty(count), moved


def _bags_of(offsets: Any, tables: int) -> int:
    return int((offsets.shape[0] - 1) // tables)


def _fake_pooled(weights: Any, tables: Any, total: int, offsets: Any) -> Any:
    return weights.new_empty(_bags_of(offsets, tables.shape[0]), total)


_FAKES: Mapping[str, Callable[..., Any]] = {
    "permute_2D_sparse_data": _fake_permute,
    "asynchronous_complete_cumsum": lambda t: t.new_empty(t.shape[0] + 1),
    "bounds_check_indices": lambda *_: None,
    "dense_embedding_codegen_lookup_function": lambda *args: _fake_pooled(args[0], args[1], args[3], args[8]),
    "split_embedding_backward_codegen_dense_unweighted_exact_cuda": lambda *args: args[1].new_empty(args[1].shape),
    "split_embedding_codegen_lookup_adagrad_function": lambda *args, **_: _fake_pooled(
        args[1], args[5], args[7], args[12]
    ),
    "split_embedding_backward_codegen_adagrad_unweighted_exact_cuda": lambda *_: None,
}


# gradients


def _keep_dense(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    weights, tables, dims, _total, width, sizes, bits, indices, offsets, pooling = inputs[:10]
    ctx.save_for_backward(weights, tables, dims, sizes, indices, offsets)
    ctx.plain = (width, bits, pooling, len(inputs))


def _dense_gradient(ctx: Any, gradient: Any) -> tuple[Any, ...]:
    weights, tables, dims, sizes, indices, offsets = ctx.saved_tensors
    width, bits, pooling, count = ctx.plain
    made = torch.ops.fbgemm.split_embedding_backward_codegen_dense_unweighted_exact_cuda(
        gradient, weights, tables, dims, width, sizes, bits, indices, offsets, pooling
    )
    return (made, *[None] * (count - 1))


def _keep_adagrad(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    (_, weights, _, _, _, tables, dims, _, width, sizes, bits, indices, offsets, pooling) = inputs[:14]
    ctx.save_for_backward(weights, tables, dims, sizes, indices, offsets, inputs[20])
    ctx.plain = (width, bits, pooling, *inputs[24:26], len(inputs))


def _adagrad_update(ctx: Any, gradient: Any) -> tuple[Any, ...]:
    """The rows are updated in the backward pass: there is no gradient to hand on."""
    weights, tables, dims, sizes, indices, offsets, squares = ctx.saved_tensors
    width, bits, pooling, eps, rate, count = ctx.plain
    torch.ops.fbgemm.split_embedding_backward_codegen_adagrad_unweighted_exact_cuda(
        gradient, weights, tables, dims, width, sizes, bits, indices, offsets, pooling, squares, eps, rate
    )
    return (None,) * count


_GRADIENTS: Mapping[str, tuple[Callable[..., None], Callable[..., tuple[Any, ...]]]] = {
    "dense_embedding_codegen_lookup_function": (_keep_dense, _dense_gradient),
    "split_embedding_codegen_lookup_adagrad_function": (_keep_adagrad, _adagrad_update),
}


# what they compute, in terms of ATen


def _segment_of(offsets: Any, count: int) -> Any:
    """[count]: the segment of each place; `offsets`: where segments begin, and the end of the last one."""
    places = torch.arange(count, device=offsets.device, dtype=offsets.dtype)
    return (offsets[None, 1:] <= places[:, None]).sum(1).clamp(max=offsets.shape[0] - 2)


def complete_cumsum(values: Any) -> Any:
    """[n] to [n + 1]: 0, then the sums up to and with each."""
    return torch.nn.functional.pad(values.cumsum(0).to(values.dtype), (1, 0))


def permute_2d(permute: Any, lengths: Any, values: Any, weights: Any = None, total: int | None = None) -> Any:
    """Segments of `values`, whose lengths are [features, bags], with their features in the order of `permute`."""
    count, bags = values.shape[0] if total is None else total, lengths.shape[1]
    moved = lengths.index_select(0, permute)
    begins, out = complete_cumsum(lengths.flatten()), complete_cumsum(moved.flatten())
    segment = _segment_of(out, count)
    source = permute.index_select(0, segment // bags) * bags + segment % bags
    places = torch.arange(count, device=values.device) - out.index_select(0, segment) + begins.index_select(0, source)
    return moved, values.index_select(0, places), None if weights is None else weights.index_select(0, places)


def bounded(rows: Any, indices: Any, offsets: Any, mode: int, warning: Any, weights: Any = None) -> Any:
    """Indices outside their table become 0, offsets end at the number of indices; what is written, in order."""
    table = _segment_of(offsets, indices.shape[0]) // _bags_of(offsets, rows.shape[0])
    inside = (indices >= 0) & (indices < rows.index_select(0, table))
    written = [torch.where(inside, indices, 0), offsets.clamp(max=indices.shape[0]), warning + (~inside).sum()]
    return written if weights is None else [*written, weights]


def _places(weights: Any, tables: Any, indices: Any, offsets: Any, width: int) -> tuple[Any, Any, Any]:
    """Rows of all tables [rows, width], and of each index its row and its bag."""
    segment = _segment_of(offsets, indices.shape[0])
    begins = tables.index_select(0, segment // _bags_of(offsets, tables.shape[0])) // width
    return weights.view(-1, width), begins + indices, segment


def _only_sums(pooling: int, *others: Any) -> None:
    if pooling != _SUM or any(other is not None for other in others):
        raise NotImplementedError("only unweighted sums of rows are known")


def pooled(weights: Any, tables: Any, total: int, indices: Any, offsets: Any) -> Any:
    """[bags, tables x width]: sums of the rows of each bag."""
    count = tables.shape[0]
    width, bags = total // count, _bags_of(offsets, count)
    rows, numbers, segment = _places(weights, tables, indices, offsets, width)
    sums = rows.new_zeros(count * bags, width).index_add(0, segment, rows.index_select(0, numbers))
    return sums.view(count, bags, width).transpose(0, 1).reshape(bags, total)


def _row_gradients(gradient: Any, tables: Any, segment: Any, width: int) -> Any:
    """[indices, width]: what each index adds to its row."""
    bags, count = gradient.shape[0], tables.shape[0]
    by_bag = gradient.view(bags, count, width).transpose(0, 1).reshape(count * bags, width)
    return by_bag.index_select(0, segment)


def dense_gradient(
    gradient: Any, weights: Any, tables: Any, dims: Any, width: int, sizes: Any, bits: int, indices: Any, offsets: Any,
    pooling: int,
) -> Any:  # fmt: skip
    """The gradient of every row."""
    _only_sums(pooling)
    rows, numbers, segment = _places(weights, tables, indices, offsets, width)
    return torch.zeros_like(rows).index_add(0, numbers, _row_gradients(gradient, tables, segment, width)).flatten()


def adagrad(
    gradient: Any, weights: Any, tables: Any, dims: Any, width: int, sizes: Any, bits: int, indices: Any, offsets: Any,
    pooling: int, squares: Any, eps: float, rate: float,
) -> Any:  # fmt: skip
    """Rows and their sums of squares after exact Adagrad: equal rows are sorted together and updated once."""
    _only_sums(pooling)
    rows, numbers, segment = _places(weights, tables, indices, offsets, width)
    numbers, order = numbers.sort()
    run = torch.nn.functional.pad((numbers[1:] != numbers[:-1]).cumsum(0), (1, 0))
    each = _row_gradients(gradient, tables, segment.index_select(0, order), width)
    summed = torch.zeros_like(each).index_add(0, run, each)
    target = torch.zeros_like(numbers).index_put((run,), numbers)
    held = squares.view(-1, width).index_add(0, target, summed * summed)
    step = summed / (held.index_select(0, target).sqrt() + eps)
    return rows.index_add(0, target, step, alpha=-rate).flatten(), held.flatten()


def _lookup_dense(
    weights: Any, tables: Any, dims: Any, total: int, width: int, sizes: Any, bits: int, indices: Any, offsets: Any,
    pooling: int, indice_weights: Any = None, wanted: Any = None, *_: Any,
) -> Any:  # fmt: skip
    _only_sums(pooling, indice_weights)
    return pooled(weights, tables, total, indices, offsets)


def _lookup_adagrad(
    keep: Any, weights: Any, uvm: Any, cache: Any, places: Any, tables: Any, dims: Any, total: int, width: int,
    sizes: Any, bits: int, indices: Any, offsets: Any, pooling: int, indice_weights: Any = None, *_: Any, **__: Any,
) -> Any:  # fmt: skip
    _only_sums(pooling, indice_weights)
    return pooled(weights, tables, total, indices, offsets)


RULES: Mapping[str, Callable[..., Any]] = {
    "fbgemm.permute_2D_sparse_data.default": permute_2d,
    "fbgemm.asynchronous_complete_cumsum.default": complete_cumsum,
    "fbgemm.bounds_check_indices.default": bounded,
    "fbgemm.dense_embedding_codegen_lookup_function.default": _lookup_dense,
    "fbgemm.split_embedding_backward_codegen_dense_unweighted_exact_cuda.default": dense_gradient,
    "fbgemm.split_embedding_codegen_lookup_adagrad_function.default": _lookup_adagrad,
    "fbgemm.split_embedding_backward_codegen_adagrad_unweighted_exact_cuda.default": adagrad,
}
"""Operator -> its results, then what it writes, in terms of ATen."""
