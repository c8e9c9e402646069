"""The collective combiner: independent small collectives of one kind become one, as XLA's combiners do.

Two collectives are independent if neither needs the other. Those with the same number of collectives after them (on
the longest way) always are, so these are put together, up to a size.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from stablecast.ir.device_program import Body, Collective, Node

THRESHOLD_BYTES: Mapping[str, int] = MappingProxyType(
    {"all_reduce": 30 * 2**20, "all_gather": 30 * 2**20, "reduce_scatter": 30 * 2**20}
)
"""Largest combined payload: XLA's defaults of `xla_gpu_all_reduce_combine_threshold_bytes` and its siblings."""


def combine_collectives(body: Body, thresholds: Mapping[str, int] = THRESHOLD_BYTES) -> Body:
    """`body` with independent collectives combined up to `thresholds` bytes each."""
    depth = _collectives_after(body)
    buckets: dict[tuple[object, ...], list[list[int]]] = {}
    for index, node in enumerate(body):
        if not isinstance(node, Collective) or node.kind not in thresholds:
            continue
        key = (node.kind, node.groups, node.dtype, node.reduce_op, depth[index])
        open_buckets = buckets.setdefault(key, [[]])
        filled = sum(_bytes(body[other]) for other in open_buckets[-1])
        if filled + node.message_bytes > thresholds[node.kind] and open_buckets[-1]:
            open_buckets.append([])
        open_buckets[-1].append(index)
    return merge_collectives(body, [bucket for lists in buckets.values() for bucket in lists if len(bucket) > 1])


def merge_collectives(body: Body, buckets: Sequence[Sequence[int]]) -> Body:
    """`body` with the collectives of each bucket made one, in the place of the last; none may need another of it."""
    return _rebuild(body, buckets) if buckets else body


def _bytes(node: Node) -> int:
    return node.message_bytes if isinstance(node, Collective) else 0


def _collectives_after(body: Body) -> list[int]:
    depth = [0] * len(body)
    for index in range(len(body) - 1, -1, -1):
        node = body[index]
        through = depth[index] + (1 if isinstance(node, Collective) else 0)
        for earlier in (*node.deps, *node.after):
            depth[earlier] = max(depth[earlier], through)
    return depth


def _rebuild(body: Body, buckets: Sequence[Sequence[int]]) -> Body:
    stands_for = list(range(len(body)))
    parts: dict[int, Sequence[int]] = {}
    for bucket in buckets:
        for index in bucket:
            stands_for[index] = bucket[-1]
        parts[bucket[-1]] = bucket
    order = _order(body, stands_for)
    place = {node: number for number, node in enumerate(order)}

    def moved(indices: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted({place[stands_for[index]] for index in indices}))

    nodes: list[Node] = []
    for index in order:
        members = [body[member] for member in parts.get(index, (index,))]
        deps = moved([dep for member in members for dep in member.deps])
        after = moved([dep for member in members for dep in member.after])
        nodes.append(replace(_combined(members), deps=deps, after=after))
    return tuple(nodes)


def _combined(members: Sequence[Node]) -> Node:
    last = members[-1]
    if not isinstance(last, Collective) or len(members) == 1:
        return last
    collectives = [member for member in members if isinstance(member, Collective)]
    return replace(
        last,
        operand_bytes=sum(member.operand_bytes for member in collectives),
        result_bytes=sum(member.result_bytes for member in collectives),
        merged=sum(member.merged for member in collectives),
        held_bytes=sum(member.held_bytes for member in collectives),
        ahead=all(member.ahead for member in collectives),
        origin=tuple(sorted({number for member in collectives for number in member.origin})),
    )


def _order(body: Body, stands_for: Sequence[int]) -> list[int]:
    needs: dict[int, set[int]] = {index: set() for index in set(stands_for)}
    for index, node in enumerate(body):
        for dep in (*node.deps, *node.after):
            if stands_for[dep] != stands_for[index]:
                needs[stands_for[index]].add(stands_for[dep])
    followers: dict[int, list[int]] = {index: [] for index in needs}
    for index, deps in needs.items():
        for dep in deps:
            followers[dep].append(index)
    missing = {index: len(deps) for index, deps in needs.items()}
    ready = [index for index, count in missing.items() if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for follower in followers[index]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, follower)
    return order
