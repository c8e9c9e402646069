"""The collective combiner: independent small collectives of one kind become one, as XLA's combiners do.

XLA's `CombineInstructionsByKey`: collectives are taken in post-order from the results of the step, put together as long
as none needs another and their results stay within a size, and reachability is followed anew after each bucket.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from stablecast.ir.device_program import Body, Collective, Node

THRESHOLD_BYTES: Mapping[str, int] = MappingProxyType(
    {"all_reduce": 30 * 2**20, "all_gather": 30 * 2**20, "reduce_scatter": 30 * 2**20}
)
"""Largest combined result: XLA's defaults of `xla_gpu_all_reduce_combine_threshold_bytes` and its siblings. XLA
measures the results of one device, so a reduce-scatter over n devices may take in n times as much."""


def plan_buckets(
    collectives: Mapping[int, Collective],
    needs: Sequence[Sequence[int]],
    rank: Mapping[int, int],
    thresholds: Mapping[str, int] = THRESHOLD_BYTES,
) -> list[list[int]]:
    """Which of `collectives` (by their node) become one; each bucket in ascending order, buckets of one left out.

    `needs`: for every node the earlier nodes that it needs. `rank`: the order in which buckets fill.
    """
    order = sorted(collectives, key=rank.__getitem__)
    bits = {node: 1 << place for place, node in enumerate(order)}
    behind = _behind(bits, needs)
    groups: dict[tuple[object, ...], list[int]] = {}
    for node in order:
        one = collectives[node]
        if one.result_bytes <= thresholds.get(one.kind, -1):
            groups.setdefault((one.kind, one.groups, one.dtype, one.reduce_op), []).append(node)
    found: list[list[int]] = []
    for members in groups.values():
        limit = thresholds[collectives[members[0]].kind]
        while len(members) > 1:
            bucket = _fill(members, collectives, behind, bits, limit)
            members = [node for node in members if node not in bucket]
            if len(bucket) > 1:
                _join(bucket, behind, bits)
                found.append(sorted(bucket))
    return found


def _behind(bits: Mapping[int, int], needs: Sequence[Sequence[int]]) -> dict[int, int]:
    """Of each collective the collectives that it needs, as a set of their `bits`."""
    through = [0] * len(needs)
    behind: dict[int, int] = {}
    for node, earlier in enumerate(needs):
        mask = 0
        for dep in earlier:
            mask |= through[dep]
        if node in bits:
            behind[node] = mask
            mask |= bits[node]
        through[node] = mask
    return behind


def _fill(
    members: Sequence[int],
    collectives: Mapping[int, Collective],
    behind: Mapping[int, int],
    bits: Mapping[int, int],
    limit: int,
) -> list[int]:
    """The first of `members`, and those after it that fit with it and do not need each other."""
    bucket: list[int] = []
    held, filled, needed = 0, 0, 0
    for node in members:
        if needed & bits[node] or behind[node] & held:
            continue
        size = collectives[node].result_bytes
        if bucket and filled + size > limit:
            break
        bucket.append(node)
        filled += size
        held |= bits[node]
        needed |= behind[node]
    return bucket


def _join(bucket: Sequence[int], behind: dict[int, int], bits: Mapping[int, int]) -> None:
    """What needs one of the bucket now needs all of it, and all that any of it needs."""
    own = needed = 0
    for node in bucket:
        own |= bits[node]
        needed |= behind[node]
    for node, mask in behind.items():
        if mask & own:
            behind[node] = mask | own | needed
    for node in bucket:
        behind[node] = needed


def bucket_order(needs: Sequence[Sequence[int]], buckets: Sequence[Sequence[int]]) -> list[int]:
    """The nodes in an order in which the members of every bucket are neighbours: where the last one was, or earlier
    where something needs them before that.
    """
    stands_for, parts = _stand_ins(len(needs), buckets)
    return [member for index in _order(needs, stands_for) for member in parts.get(index, (index,))]


def merge_collectives(body: Body, buckets: Sequence[Sequence[int]]) -> Body:
    """`body` with the collectives of each bucket made one, in the place of the last; none may need another of it."""
    return _rebuild(body, buckets) if buckets else body


def _rebuild(body: Body, buckets: Sequence[Sequence[int]]) -> Body:
    stands_for, parts = _stand_ins(len(body), buckets)
    order = _order([(*node.deps, *node.after) for node in body], stands_for)
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


def _stand_ins(count: int, buckets: Sequence[Sequence[int]]) -> tuple[list[int], dict[int, Sequence[int]]]:
    """For every node the one that stands for it, the last of its bucket; and buckets by that one."""
    stands_for = list(range(count))
    parts: dict[int, Sequence[int]] = {}
    for bucket in buckets:
        for index in bucket:
            stands_for[index] = bucket[-1]
        parts[bucket[-1]] = bucket
    return stands_for, parts


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


def _order(nodes: Sequence[Sequence[int]], stands_for: Sequence[int]) -> list[int]:
    """What stands for the nodes, in their order; a bucket that something waits for before its last member comes early,
    and all that it needs.
    """
    needs: dict[int, set[int]] = {index: set() for index in set(stands_for)}
    for index, earlier in enumerate(nodes):
        for dep in earlier:
            if stands_for[dep] != stands_for[index]:
                needs[stands_for[index]].add(stands_for[dep])
    urgency = {index: index for index in needs}
    for index in reversed(_sorted(needs, urgency)):
        for dep in needs[index]:
            urgency[dep] = min(urgency[dep], urgency[index])
    return _sorted(needs, urgency)


def _sorted(needs: Mapping[int, set[int]], urgency: Mapping[int, int]) -> list[int]:
    """The keys of `needs`, each after what it needs; of those that may come next the most urgent, then the first."""
    followers: dict[int, list[int]] = {index: [] for index in needs}
    for index, deps in needs.items():
        for dep in deps:
            followers[dep].append(index)
    missing = {index: len(deps) for index, deps in needs.items()}
    ready = [(urgency[index], index) for index, count in missing.items() if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for follower in followers[index]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (urgency[follower], follower))
    return order
