"""Copies around collectives: payloads brought together and cut apart again, operands laid out for their collective."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from stablecast.ir.device_program import Body, Collective, Kernel, Node
from stablecast.ir.kernels import KernelClass, KernelRow


@dataclass(frozen=True, slots=True)
class Copy:
    """`launches` copies of `nbytes` in all, read and written, before or after a node."""

    launches: int
    nbytes: float
    before: bool = False


AddRow = Callable[[KernelRow], int]
"""Puts a row into the kernel table, counts its run, and gives its number."""


def contiguous_reductions(body: Body) -> dict[int, Copy]:
    """Of every all-reduce that several became: one copy brings its operands together, and one cuts out each result.

    XLA:GPU's `AllReduceContiguous`.
    """
    return {
        index: Copy(node.merged + 1, 2.0 * node.operand_bytes)
        for index, node in enumerate(body)
        if isinstance(node, Collective) and node.kind == "all_reduce" and node.merged > 1
    }


def with_copies(body: Body, copies: Mapping[int, Copy], add_row: AddRow) -> Body:
    """`body` with the copies of its nodes as kernels of their own."""
    if not copies:
        return body
    start: dict[int, int] = {}
    end: dict[int, int] = {}
    position = 0
    for index in range(len(body)):
        start[index] = position
        position += 2 if index in copies else 1
        end[index] = position - 1
    nodes: list[Node] = []
    for index, node in enumerate(body):
        deps = tuple(end[dep] for dep in node.deps)
        after = tuple(end[dep] for dep in node.after)
        copy = copies.get(index)
        if copy is None:
            nodes.append(replace(node, deps=deps, after=after))
            continue
        kernel = _kernel(node, copy, add_row)
        if copy.before:
            nodes += [replace(kernel, deps=deps), replace(node, deps=(start[index],), after=after)]
        else:
            nodes += [replace(node, deps=deps, after=after), replace(kernel, deps=(start[index],))]
    return tuple(nodes)


def _kernel(node: Node, copy: Copy, add_row: AddRow) -> Kernel:
    dtype = node.dtype if isinstance(node, Collective) else ""
    row = KernelRow(
        klass=KernelClass.COPY,
        in_dtype=dtype,
        out_dtype=dtype,
        inputs=1,
        bytes_read=copy.nbytes,
        bytes_written=copy.nbytes,
        launches=copy.launches,
        label="layout copy",
    )
    held = int(copy.nbytes) if copy.before else node.held_bytes
    ahead = isinstance(node, Kernel | Collective) and node.ahead
    return Kernel(add_row(row), (), copy.launches, node.scope, node.location, held_bytes=held, ahead=ahead)
