"""Collective matmul: a product and the collective beside it, in steps that pass pieces around a ring.

After "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models" (ASPLOS 2023):
an all-gather in front of a product becomes n - 1 permutes of the shard, each beside the product of the one before; a
reduce-scatter behind a product becomes the same of partial sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from stablecast.ir.attributes import Shift
from stablecast.ir.device_program import Body, Branch, Collective, DeviceProgram, Kernel, Loop, Node
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import FloatArray, KernelClass, KernelRow, KernelTable
from stablecast.lowering.passes.body import each_body, free_nodes, readers, with_body

_LARGEST_GROUP: Final = 64
_MEGABYTE: Final = 2**20


class CollectiveMatmul:
    """All-gathers before and reduce-scatters after a product, of =N MB or more (1), go round a ring beside it."""

    def __init__(self, value: str = "") -> None:
        try:
            size = float(value or 1.0)
        except ValueError:
            size = -1.0
        if size < 0.0:
            raise InputError(f"pass 'collective-matmul' takes MB, not '{value}'", "write collective-matmul=1")
        self._nbytes = size * _MEGABYTE

    def __call__(self, program: DeviceProgram) -> DeviceProgram:
        rows = _Rows(list(program.table.rows))
        body = each_body(program.body, lambda one: _windowed(one, rows, self._nbytes))
        if len(rows.rows) == len(program.table):
            return program
        bodies = program.table.bodies + ((),) * (len(rows.rows) - len(program.table)) if program.table.bodies else ()
        counts = np.zeros(len(rows.rows))
        _count(body, 1.0, counts)
        return replace(with_body(program, body), table=KernelTable(tuple(rows.rows), counts, bodies))


def _count(body: Body, runs: float, counts: FloatArray) -> None:
    """Add how often each row runs; loops of unknown length once."""
    for node in body:
        if isinstance(node, Kernel):
            counts[node.row] += runs
        elif isinstance(node, Loop):
            _count(node.body, runs * (node.count if isinstance(node.count, int) else 1), counts)
        elif isinstance(node, Branch):
            for number, one in enumerate(node.bodies):
                _count(one, runs * (1.0 if node.probability is None else node.probability[number]), counts)


@dataclass(slots=True)
class _Rows:
    """The kernel table as it grows by pieces of products."""

    rows: list[KernelRow]

    def piece(self, number: int, pieces: int) -> int:
        """The row of one of `pieces` equal parts of the product in row `number`, split by rows."""
        whole = self.rows[number]
        made = replace(
            whole,
            m=max(whole.m // pieces, 1),
            elems=whole.elems // pieces,
            matmul_flops=whole.matmul_flops / pieces,
            padded_flops=whole.padded_flops / pieces,
            vector_flops=whole.vector_flops / pieces,
            transcendentals=whole.transcendentals / pieces,
            bytes_read=whole.bytes_read / pieces,
            bytes_written=whole.bytes_written / pieces,
        )
        if made in self.rows:
            return self.rows.index(made)
        self.rows.append(made)
        return len(self.rows) - 1


def _windowed(body: Body, rows: _Rows, nbytes: float) -> Body:
    reads = readers(body)
    free = free_nodes(body)
    pairs: dict[int, int] = {}
    for index, node in enumerate(body):
        if (
            not isinstance(node, Collective)
            or node.message_bytes < nbytes
            or not 1 < node.groups.size <= _LARGEST_GROUP
        ):
            continue
        if node.kind == "all_gather" and not free[index]:
            users = reads[index]
            if len(users) == 1 and _is_product(body[users[0]], rows) and users[0] not in pairs.values():
                pairs[index] = users[0]
        elif node.kind == "reduce_scatter" and len(node.deps) == 1:
            made = node.deps[0]
            if _is_product(body[made], rows) and reads[made] == [index] and made not in pairs.values():
                pairs[index] = made
    return _rebuilt(body, pairs, rows) if pairs else body


def _is_product(node: Node, rows: _Rows) -> bool:
    return isinstance(node, Kernel) and rows.rows[node.row].klass == KernelClass.MATMUL


def _rebuilt(body: Body, pairs: dict[int, int], rows: _Rows) -> Body:
    """Every pair in pieces, in the place of its later node."""
    first = {min(pair): max(pair) for pair in pairs.items()}
    collective_of = {max(pair): pair[0] for pair in pairs.items()}
    place: dict[int, tuple[int, ...]] = {}
    nodes: list[Node] = []

    def waits(indices: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted({new for old in indices for new in place[old]}))

    for index, node in enumerate(body):
        if index in first:
            continue
        if index not in collective_of:
            place[index] = (len(nodes),)
            nodes.append(replace(node, deps=waits(node.deps), after=waits(node.after)))
            continue
        comm_at = collective_of[index]
        comm, kernel = body[comm_at], body[pairs[comm_at]]
        assert isinstance(comm, Collective) and isinstance(kernel, Kernel)  # noqa: PT018
        outer = [
            dep
            for dep in (*comm.deps, *comm.after, *kernel.deps, *kernel.after)
            if dep not in (comm_at, pairs[comm_at])
        ]
        made = _pieces(comm, kernel, waits(outer), len(nodes), rows, gather=comm_at < pairs[comm_at])
        ends = tuple(range(len(nodes), len(nodes) + len(made)))
        place[comm_at] = place[pairs[comm_at]] = ends
        nodes += made
    return tuple(nodes)


def _pieces(
    comm: Collective, kernel: Kernel, outer: tuple[int, ...], base: int, rows: _Rows, *, gather: bool
) -> list[Node]:
    """Products of n pieces and n - 1 permutes: before each next product (all-gather) or after each (reduce-scatter)."""
    size = comm.groups.size
    row = rows.piece(kernel.row, size)
    shard = comm.message_bytes // size
    ring = replace(
        comm,
        kind="collective_permute",
        operand_bytes=shard,
        result_bytes=shard,
        asynchronous=True,
        held_bytes=comm.held_bytes // size,
        shift=Shift(comm.groups.axes[0], 1, True) if len(comm.groups.axes) == 1 else None,
        after=(),
    )
    found: list[Node] = []
    permute = -1
    for number in range(size):
        own = outer if permute < 0 or not gather else (*outer, permute)
        held = kernel.held_bytes // size
        product = replace(kernel, row=row, deps=tuple(sorted(own)), after=(), held_bytes=held)
        waited = outer if permute < 0 else (permute,)
        if gather and number < size - 1:
            permute = base + len(found)
            found += [replace(ring, deps=waited), product]
        elif not gather and number < size - 1:
            found.append(product)
            sent = base + len(found) - 1
            permute_deps = (sent,) if permute < 0 else tuple(sorted((permute, sent)))
            permute = base + len(found)
            found.append(replace(ring, deps=permute_deps))
        elif gather:
            found.append(product)
        else:
            last = tuple(sorted({*own, permute}))
            found.append(replace(product, deps=last, origin=(*kernel.origin, *comm.origin)))
    return found
