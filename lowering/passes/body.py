"""Bodies under change: new orders, who reads what, peaks of memory, and passes over every body of a program."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from stablecast.ir.device_program import Body, Branch, Collective, DeviceProgram, Loop, Node


def readers(body: Body) -> list[list[int]]:
    """Of each node, those that read its result, in order."""
    found: list[list[int]] = [[] for _ in body]
    for index, node in enumerate(body):
        for dep in dict.fromkeys(node.deps):
            found[dep].append(index)
    return found


def reordered(body: Sequence[Node], order: Sequence[int]) -> Body:
    """The nodes of `body` in `order`, which names each once and keeps every node behind what it waits for."""
    place = {old: new for new, old in enumerate(order)}
    return tuple(
        replace(
            body[old],
            deps=tuple(sorted(place[dep] for dep in body[old].deps)),
            after=tuple(sorted(place[dep] for dep in body[old].after)),
        )
        for old in order
    )


def asynchronous(body: Body) -> Body:
    """`body` with every collective started without waiting for its end."""
    return tuple(replace(node, asynchronous=True) if isinstance(node, Collective) else node for node in body)


def free_nodes(body: Body) -> list[bool]:
    """Which nodes may run before all others: they, and all that they wait for, need parameters and counters only."""
    free: list[bool] = []
    for node in body:
        own = getattr(node, "ahead", False)
        free.append(own and all(free[dep] for dep in (*node.deps, *node.after)))
    return free


def ancestors(body: Body, node: int) -> list[int]:
    """`node` and all that it waits for, in order of issue."""
    found: set[int] = set()
    waiting = [node]
    while waiting:
        index = waiting.pop()
        if index not in found:
            found.add(index)
            waiting += [*body[index].deps, *body[index].after]
    return sorted(found)


def each_body(body: Body, change: Callable[[Body], Body]) -> Body:
    """`change` applied to the bodies inside `body`, then to `body` itself."""
    nodes: list[Node] = []
    for node in body:
        if isinstance(node, Loop):
            nodes.append(replace(node, body=each_body(node.body, change)))
        elif isinstance(node, Branch):
            nodes.append(replace(node, bodies=tuple(each_body(inner, change) for inner in node.bodies)))
        else:
            nodes.append(node)
    return change(tuple(nodes))


def peak_bytes(body: Body) -> int:
    """Largest total of results that wait for a reader, in bytes; what nothing reads lives on to the end."""
    last = list(range(len(body)))
    seen = [False] * len(body)
    for index, node in enumerate(body):
        for dep in node.deps:
            last[dep], seen[dep] = index, True
    dying: dict[int, int] = {}
    live = peak = 0
    for index, node in enumerate(body):
        live += node.held_bytes
        if seen[index]:
            dying[last[index]] = dying.get(last[index], 0) + node.held_bytes
        inner = 0
        if isinstance(node, Loop):
            inner = peak_bytes(node.body)
        elif isinstance(node, Branch):
            inner = max(map(peak_bytes, node.bodies), default=0)
        peak = max(peak, live + inner)
        live -= dying.pop(index, 0)
    return peak


def with_body(program: DeviceProgram, body: Body) -> DeviceProgram:
    """`program` with another body, and with the temporaries that it then needs: more or less by the change in peak.

    What it asks of an allocator is known no longer where that changes.
    """
    buffers, more = program.buffers, peak_bytes(body) - peak_bytes(program.body)
    if buffers is not None:
        buffers = replace(buffers, temp_bytes=max(buffers.temp_bytes + more, 0))
    return replace(program, body=body, buffers=buffers, allocations=None if more else program.allocations)
