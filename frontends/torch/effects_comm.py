"""Communication: c10d and functional collectives, point to point, and FSDP's own copies, as functional nodes."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from stablecast.frontends.torch import private
from stablecast.frontends.torch.graph import Ref, Spec
from stablecast.frontends.torch.private import process_group_name, torch

if TYPE_CHECKING:
    from stablecast.frontends.torch.record import OpInfo, Recorder

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp", "_dtensor"})
_REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "sum")


def handler_of(namespace: str, name: str) -> Callable[..., Any] | None:
    """The handler of a communication op; None for one that is not known."""
    return _HANDLERS.get(f"{namespace}.{name}")


def _finish(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs, out: Any, group: str = "") -> Any:
    rec.call(info, args, kwargs, out, group)
    return out


def _one(rec: "Recorder", op: str, args: Args, spec: Spec) -> Ref:
    (ref,) = rec.emit(op, args, (spec,), keep=True)
    assert ref is not None
    return ref


def _reduction(op: Any) -> str:
    return _REDUCTIONS[int(op.op())] if isinstance(op, torch.ScriptObject) else str(op).lower().rsplit(".", 1)[-1]


def all_gather_base(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    output, source, group = args[0], args[1], process_group_name(args[2])
    value = rec.ref(source)
    rec.group(group)
    out = info.func(*args, **kwargs)
    rec.aliases.write(rec.alias(output), _one(rec, "coll.all_gather", (value, group), rec.spec(output)))
    return _finish(rec, info, args, kwargs, out, group)


def reduce_scatter_base(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    output, source, group = args[0], args[1], process_group_name(args[2])
    value = rec.ref(source)
    rec.group(group)
    out = info.func(*args, **kwargs)
    made = _one(rec, "coll.reduce_scatter", (value, _reduction(args[3]), group), rec.spec(output))
    rec.aliases.write(rec.alias(output), made)
    return _finish(rec, info, args, kwargs, out, group)


def coalesced(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    """`allgather_into_tensor_coalesced_` and `reduce_scatter_tensor_coalesced_`: one collective for each pair."""
    outputs, sources, group = args[0], args[1], process_group_name(args[2])
    values = [rec.ref(source) for source in sources]
    rec.group(group)
    out = info.func(*args, **kwargs)
    gathers = "allgather" in info.full
    for output, value in zip(outputs, values, strict=True):
        if gathers:
            made = _one(rec, "coll.all_gather", (value, group), rec.spec(output))
        else:
            made = _one(rec, "coll.reduce_scatter", (value, _reduction(args[3]), group), rec.spec(output))
        rec.aliases.write(rec.alias(output), made)
    return _finish(rec, info, args, kwargs, out, group)


def all_reduce_list(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    tensors, group = args[0], process_group_name(args[1])
    values = [rec.ref(tensor) for tensor in tensors]
    rec.group(group)
    out = info.func(*args, **kwargs)
    for tensor, value in zip(tensors, values, strict=True):
        made = _one(rec, "coll.all_reduce", (value, _reduction(args[2]), group), rec.spec(tensor))
        rec.aliases.write(rec.alias(tensor), made)
    return _finish(rec, info, args, kwargs, out, group)


def broadcast_list(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    tensors, group = args[0], process_group_name(args[1])
    values = [rec.ref(tensor) for tensor in tensors]
    rec.group(group)
    out = info.func(*args, **kwargs)
    for tensor, value in zip(tensors, values, strict=True):
        rec.aliases.write(
            rec.alias(tensor), _one(rec, "coll.broadcast", (value, int(args[2]), group), rec.spec(tensor))
        )
    return _finish(rec, info, args, kwargs, out, group)


def all_gather_lists(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    """`all_gather` into a list of tensors: one collective, then a slice for each."""
    outputs, sources, group = args[0], args[1], process_group_name(args[2])
    values = [rec.ref(source) for source in sources]
    size = len(rec.group(group).ranks)
    out = info.func(*args, **kwargs)
    for parts, source, value in zip(outputs, sources, values, strict=True):
        spec = rec.spec(source)
        row = Spec((1, *spec.shape), spec.dtype)
        (flat,) = rec.emit("view.reshape", (value, row.shape), (row,))
        whole = _one(rec, "coll.all_gather", (flat, group), Spec((size, *spec.shape), spec.dtype))
        for index, part in enumerate(parts):
            (made,) = rec.emit("view.select", (whole, 0, index), (rec.spec(part),))
            assert made is not None
            rec.aliases.write(rec.alias(part), made)
    return _finish(rec, info, args, kwargs, out, group)


def all_to_all_base(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    output, source, group = args[0], args[1], process_group_name(args[2])
    value = rec.ref(source)
    size = len(rec.group(group).ranks)
    out = info.func(*args, **kwargs)
    outs = list(args[3]) or [output.shape[0] // size] * size
    ins = list(args[4]) or [source.shape[0] // size] * size
    made = _one(rec, "coll.all_to_all", (value, outs, ins, group), rec.spec(output))
    rec.aliases.write(rec.alias(output), made)
    return _finish(rec, info, args, kwargs, out, group)


def send(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    group = process_group_name(args[1])
    ranks = rec.group(group).ranks
    values = [rec.ref(tensor) for tensor in args[0]]
    out = info.func(*args, **kwargs)
    for value in values:
        rec.emit("coll.send", (value, ranks[int(args[2])], int(args[3]), group), (), keep=True)
    return _finish(rec, info, args, kwargs, out, group)


def receive(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    group = process_group_name(args[1])
    ranks = rec.group(group).ranks
    out = info.func(*args, **kwargs)
    for tensor in args[0]:
        made = _one(rec, "coll.recv", (ranks[int(args[2])], int(args[3]), group), rec.spec(tensor))
        rec.aliases.write(rec.alias(tensor), made)
    return _finish(rec, info, args, kwargs, out, group)


def no_data(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    """Barriers and checks: they move nothing."""
    return _finish(rec, info, args, kwargs, info.func(*args, **kwargs))


def functional(kind: str) -> Callable[..., Any]:
    """A functional collective: `kind` with its own arguments, the group last."""

    def handle(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
        group = process_group_name(args[-1])
        rec.group(group)
        many = isinstance(args[0], (list, tuple))
        values = [rec.ref(tensor) for tensor in (args[0] if many else [args[0]])]
        out = info.func(*args, **kwargs)
        made = list(out) if many else [out]
        more = [arg for arg in args[1:-1] if not (kind in ("all_gather", "reduce_scatter") and isinstance(arg, int))]
        for value, tensor in zip(values, made, strict=True):
            ref = _one(rec, f"coll.{kind}", (value, *more, group), rec.spec(tensor))
            if info.writes:
                rec.aliases.write(rec.alias(tensor), ref)
            else:
                rec.fresh(tensor, ref)
        return _finish(rec, info, args, kwargs, out, group)

    return handle


def wait(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    """`wait_tensor`: the consumer's dependence is in the values; the call itself is kept as a launch."""
    alias = rec.alias(args[0])
    out = info.func(*args, **kwargs)
    if out is not args[0]:
        rec.bind(out, alias)
    return _finish(rec, info, args, kwargs, out)


def wrap(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    """A collective's result on its way: eager waits for it at the first use."""
    rec.alias(args[0])
    out = private.in_flight(args[0])
    return _finish(rec, info, args, kwargs, out)


def shard_dim_all_to_all(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    source, gather_dim, shard_dim, name = args
    group = process_group_name(name)
    rec.group(group)
    value = rec.ref(source)
    out = info.func(*args, **kwargs)
    made = _one(rec, "coll.all_to_all_dims", (value, int(shard_dim), int(gather_dim), group), rec.spec(out))
    rec.fresh(out, made)
    return _finish(rec, info, args, kwargs, out, group)


def isend(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    group = process_group_name(args[3])
    ranks = rec.group(group).ranks
    rec.emit("coll.send", (rec.ref(args[0]), ranks[int(args[1])], int(args[2]), group), (), keep=True)
    out = info.func(*args, **kwargs)
    rec.bind(out, rec.alias(args[0]))
    return _finish(rec, info, args, kwargs, out, group)


def copy_in(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    """FSDP's copy-in: the shards laid end to end, as values, with no scatter into the gathered buffer."""
    values = [rec.ref(tensor) for tensor in args[0]]
    out = info.func(*args, **kwargs)
    source = out[0]
    (ref,) = rec.emit("fsdp.copy_in", (values,), (rec.spec(source),))
    assert ref is not None
    alias = rec.aliases.fresh(rec.spec(source), source.stride(), ref)
    setattr(source, rec.mark, alias)
    rec.bind(out[1], rec.alias(args[1]))
    return _finish(rec, info, args, kwargs, out)


def copy_out(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    """FSDP's copy-out: slices of the gathered buffer, each into its own tensor."""
    value = rec.ref(args[0])
    sizes, dim = args[1], kwargs.get("dim", 0) if len(args) < 3 else args[2]
    targets = kwargs["out"]
    out = info.func(*args, **kwargs)
    start = 0
    spec = rec.graph.specs[value]
    axis = dim % len(spec.shape)
    for size, target in zip(sizes, targets, strict=True):
        shape = tuple(size if place == axis else length for place, length in enumerate(spec.shape))
        (part,) = rec.emit("view.slice", (value, axis, start, start + size, 1), (Spec(shape, spec.dtype),))
        wanted = rec.spec(target)
        (made,) = rec.emit("view.reshape", (part, wanted.shape), (wanted,))
        assert made is not None
        rec.aliases.write(rec.alias(target), made)
        start += size
    return _finish(rec, info, args, kwargs, out)


def chunk_cat(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    """FSDP's copy-in before a reduce-scatter."""
    values = [rec.ref(tensor) for tensor in args[0]]
    target = kwargs["out"]
    out = info.func(*args, **kwargs)
    (made,) = rec.emit("aten._chunk_cat.default", (values, args[1], args[2]), (rec.spec(target),))
    assert made is not None
    rec.aliases.write(rec.alias(target), made)
    return _finish(rec, info, args, kwargs, out)


def copy(rec: "Recorder", info: "OpInfo", args: Args, kwargs: Kwargs) -> Any:
    from stablecast.frontends.torch.effects import copy as plain_copy

    return plain_copy(rec, info, args, kwargs)


_HANDLERS: Mapping[str, Callable[..., Any]] = {
    "c10d._allgather_base_": all_gather_base,
    "c10d._reduce_scatter_base_": reduce_scatter_base,
    "c10d.allgather_into_tensor_coalesced_": coalesced,
    "c10d.reduce_scatter_tensor_coalesced_": coalesced,
    "c10d.allreduce_": all_reduce_list,
    "c10d.allreduce_coalesced_": all_reduce_list,
    "c10d.reduce_": all_reduce_list,
    "c10d.broadcast_": broadcast_list,
    "c10d.allgather_": all_gather_lists,
    "c10d.alltoall_base_": all_to_all_base,
    "c10d.send": send,
    "c10d.recv_": receive,
    "c10d.barrier": no_data,
    "c10d.check_for_nan": no_data,
    "_c10d_functional.all_reduce": functional("all_reduce"),
    "_c10d_functional.all_reduce_": functional("all_reduce"),
    "_c10d_functional.all_reduce_coalesced": functional("all_reduce"),
    "_c10d_functional.all_reduce_coalesced_": functional("all_reduce"),
    "_c10d_functional.all_gather_into_tensor": functional("all_gather"),
    "_c10d_functional.all_gather_into_tensor_coalesced": functional("all_gather"),
    "_c10d_functional.reduce_scatter_tensor": functional("reduce_scatter"),
    "_c10d_functional.reduce_scatter_tensor_coalesced": functional("reduce_scatter"),
    "_c10d_functional.all_to_all_single": functional("all_to_all"),
    "_c10d_functional.broadcast": functional("broadcast"),
    "_c10d_functional.broadcast_": functional("broadcast"),
    "_c10d_functional.wait_tensor": wait,
    "_c10d_functional._wrap_tensor_autograd": wrap,
    "_c10d_functional.isend": isend,
    "_dtensor.shard_dim_alltoall": shard_dim_all_to_all,
    "fsdp.all_gather_copy_in": copy_in,
    "fsdp.split_with_sizes_copy": copy_out,
    "fsdp.chunk_cat": chunk_cat,
    "fsdp.copy_": copy,
}
