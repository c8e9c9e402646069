"""Collectives and point-to-point transfers over named mesh axes."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from stablecast.frontends.torch.emit.builder import Val
from stablecast.frontends.torch.emit.emitter import Emitter
from stablecast.frontends.torch.emit.registry import emits
from stablecast.frontends.torch.graph import Group
from stablecast.ir.errors import InputError

ALL_PAIRS = 1024
"""Up to this many devices a permute lists the pairs of every group; beyond, those of the captured rank's own."""

_FOLDS = {
    "sum": "add",
    "avg": "add",
    "product": "multiply",
    "min": "minimum",
    "max": "maximum",
    "band": "and_",
    "bor": "or_",
}


def strided(ranks: Sequence[int]) -> int | None:
    """The step between the ranks of a group, None where it varies."""
    if len(ranks) < 2:
        return 1
    step = ranks[1] - ranks[0]
    return step if step > 0 and all(b - a == step for a, b in pairwise(ranks)) else None


def groups_attribute(e: Emitter, name: str) -> Any:
    """Replica groups of the process group `name`: mesh axes where it follows them, so that size does not matter."""
    found = e.group_attributes.get(name)
    if found is None:
        found = e.group_attributes[name] = _groups_attribute(e, e.group(name))
    return found


def _groups_attribute(e: Emitter, group: Group) -> Any:
    if group.axes:
        return _over_axes(e, e.settings.axes, group.axes)
    world = math.prod(size for _, size in e.settings.axes)
    size, step = len(group.ranks), strided(group.ranks)
    if (
        step is not None
        and world % (size * step) == 0
        and group.ranks[0] // (size * step) * size * step + group.ranks[0] % step == group.ranks[0]
    ):
        axes = (("outer", world // (size * step)), ("group", size), ("inner", step))
        return _over_axes(e, axes, ("group",))
    if size == world:
        return _over_axes(e, (("group", world),), ("group",))
    return e.ir.DenseIntElementsAttr.get(np.array([group.ranks], dtype=np.int64))


def _over_axes(e: Emitter, axes: Sequence[tuple[str, int]], along: Sequence[str]) -> Any:
    mesh = ", ".join(f"<name = {json.dumps(name)}, size = {size}>" for name, size in axes)
    refs = ", ".join(f"#stablehlo.axis_ref<name = {json.dumps(name)}>" for name in along)
    return e.ir.Attribute.parse(
        f"#stablehlo.replica_group_mesh_axes<mesh = #stablehlo.mesh<axes = [{mesh}]>, axes = [{refs}]>"
    )


def _channel(e: Emitter, kind: int = 1) -> Any:
    e.channels += 1
    return e.hlo.ChannelHandle.get(e.channels, kind)


def _averaged(e: Emitter, x: Val, how: str, group: str) -> Val:
    return e.scale(x, 1 / len(e.group(group).ranks)) if how == "avg" else x


def _fold(e: Emitter, op: Any, how: str, dtype: str) -> None:
    name = _FOLDS.get(how)
    if name is None:
        raise InputError(f"a collective with the reduction '{how}' has no StableHLO form")
    e.body(op, (dtype, dtype), lambda a, b: [e.binary(name, a, b)])


@emits("coll.all_reduce")
def all_reduce(e: Emitter, x: Val, how: str, group: str) -> Val:
    op = e.hlo.AllReduceOp(
        [e.type(x.shape, x.dtype)],
        [x.value],
        groups_attribute(e, group),
        channel_handle=_channel(e),
        use_global_device_ids=e.ir.UnitAttr.get(),
    )
    _fold(e, op, how, x.dtype)
    return _averaged(e, e.done(op.results[0], x.shape, x.dtype), how, group)


@emits("coll.all_gather")
def all_gather(e: Emitter, x: Val, group: str) -> Val:
    size = len(e.group(group).ranks)
    x = e.reshape(x, x.shape or (1,))
    shape = (x.shape[0] * size, *x.shape[1:])
    op = e.hlo.AllGatherOp(
        [e.type(shape, x.dtype)],
        [x.value],
        all_gather_dim=0,
        replica_groups=groups_attribute(e, group),
        channel_handle=_channel(e),
        use_global_device_ids=e.ir.UnitAttr.get(),
    )
    return e.reshape(e.done(op.results[0], shape, x.dtype), e.out.shape)


@emits("coll.reduce_scatter")
def reduce_scatter(e: Emitter, x: Val, how: str, group: str) -> Val:
    size = len(e.group(group).ranks)
    if x.shape[0] % size:
        x = e.reshape(x, (size, math.prod(x.shape) // size))
    shape = (x.shape[0] // size, *x.shape[1:])
    op = e.hlo.ReduceScatterOp(
        e.type(shape, x.dtype),
        x.value,
        scatter_dimension=0,
        replica_groups=groups_attribute(e, group),
        channel_handle=_channel(e),
        use_global_device_ids=e.ir.UnitAttr.get(),
    )
    _fold(e, op, how, x.dtype)
    return _averaged(e, e.reshape(e.done(op.results[0], shape, x.dtype), e.out.shape), how, group)


@emits("coll.all_to_all")
def all_to_all(e: Emitter, x: Val, outs: Sequence[int], ins: Sequence[int], group: str) -> Val:
    """Even splits: `all_to_all`. One piece to one peer: `collective_permute`. Uneven: a custom call with its shapes."""
    if sum(size > 0 for size in outs) == 1 and sum(size > 0 for size in ins) == 1 and len(outs) > 1:
        return _permute(e, x, [size > 0 for size in ins].index(True), group)
    if len(set(outs)) > 1 or len(set(ins)) > 1:
        e.without_form(e.op, "splits differ between peers")
        return e.custom_call("c10d.all_to_all_single", [x], side_effect=True)[0]
    return _all_to_all(e, x, 0, 0, group)


def _all_to_all(e: Emitter, x: Val, split: int, concat: int, group: str) -> Val:
    size = len(e.group(group).ranks)
    op = e.hlo.AllToAllOp([x.value], split, concat, size, groups_attribute(e, group), channel_handle=_channel(e))
    shape = list(x.shape)
    shape[split] //= size
    shape[concat] *= size
    return e.reshape(e.done(op.results[0], shape, x.dtype), e.out.shape)


@emits("coll.all_to_all_dims")
def all_to_all_dims(e: Emitter, x: Val, split: int, concat: int, group: str) -> Val:
    return _all_to_all(e, x, split, concat, group)


def _permute(e: Emitter, x: Val, target: int, group: str) -> Val:
    ranks = e.group(group).ranks
    shift = (target - ranks.index(e.settings.rank)) % len(ranks)
    pairs = [(row[i], row[(i + shift) % len(row)]) for row in _siblings(e, e.group(group)) for i in range(len(row))]
    table = e.ir.DenseIntElementsAttr.get(np.array(pairs, dtype=np.int64))
    made = e.hlo.collective_permute(x.value, table, channel_handle=_channel(e))
    return e.reshape(e.done(made, x.shape, x.dtype), e.out.shape)


def _siblings(e: Emitter, group: Group) -> list[tuple[int, ...]]:
    world = math.prod(size for _, size in e.settings.axes)
    step, size = strided(group.ranks), len(group.ranks)
    if world > ALL_PAIRS or step is None or world % (size * step):
        return [group.ranks]
    table = np.arange(world).reshape(world // (size * step), size, step).transpose(0, 2, 1).reshape(-1, size)
    return [tuple(map(int, row)) for row in table]


@emits("coll.broadcast")
def broadcast(e: Emitter, x: Val, source: int, group: str) -> Val:
    op = e.hlo.CollectiveBroadcastOp(x.value, groups_attribute(e, group), channel_handle=_channel(e))
    return e.done(op.result, x.shape, x.dtype)


def _transfer(e: Emitter, op: Any, peer: int, tag: int) -> None:
    """The peer by its rank, and the tag that its own end has too."""
    kind = e.ir.IntegerType.get_signless(64)
    op.operation.attributes["stablecast.peer"] = e.ir.IntegerAttr.get(kind, peer)
    op.operation.attributes["stablecast.tag"] = e.ir.IntegerAttr.get(kind, tag)


@emits("coll.send")
def send(e: Emitter, x: Val, peer: int, tag: int, group: str) -> list[Val]:
    token = e.hlo.create_token()
    op = e.hlo.SendOp([x.value], token, _channel(e), is_host_transfer=e.ir.BoolAttr.get(False))
    _transfer(e, op, peer, tag)
    e.count += 2
    return []


@emits("coll.recv")
def recv(e: Emitter, peer: int, tag: int, group: str) -> Val:
    token = e.hlo.create_token()
    op = e.hlo.RecvOp(
        [e.type(*e.out), e.hlo.TokenType.get()], token, _channel(e), is_host_transfer=e.ir.BoolAttr.get(False)
    )
    _transfer(e, op, peer, tag)
    e.count += 2
    return Val(op.results[0], *e.out)
