"""Layers in 8 bits as TorchAO trains them: which products, gathers and casts change.

Every linear layer but the output's multiplies in 8 bits. `tensorwise` (and `yes`): one scale a tensor; tensor-parallel
gathers carry 8 bits, and with `yes` FSDP's too (`enable_fsdp_float8_all_gather`, which named recipes refuse). A tensor
is cast once in each graph that reads it, or what the device holds of it before it is gathered. `rowwise`: scales of
rows for one product and of columns for another, so that a tensor is cast for each; gathers carry 16 bits
(`torchtitan/models/llama/parallelize_llama.py`, `torchtitan/components/float8.py`, early 2025).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from stablecast.ir.device_program import Collective, DeviceProgram, Kernel, Node
from stablecast.ir.kernels import KernelClass, KernelRow, KernelTable

ROW_BYTES: Final = 3.0
"""Bytes of each element that a cast moves: read as 16 bits, written as 8. The largest value comes from the producer, or
a kernel that holds whole rows finds it."""
COLUMN_BYTES: Final = 5.0
"""By the largest value of a column: read once more for it."""
VOCAB: Final = 128256
_LEAST_LAYER: Final = 256
_LEAST: Final = 16
"""TorchAO's products want sizes that this divides."""
_LAYERS: Final = "/layers/"
_BACKWARD: Final = "backward"
_HOOK: Final = "_allgather_base_"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Which gathers of layers carry 8 bits, of activations and of parameters; and whether scales are those of rows."""

    activations: bool
    parameters: bool
    rows: bool


RECIPES: Final[Mapping[str, Recipe]] = {
    "yes": Recipe(True, True, False),
    "tensorwise": Recipe(True, False, False),
    "rowwise": Recipe(False, False, True),
}


@dataclass
class _Casts:
    """Bytes of the casts so far; elements of every operand by the node that makes it."""

    recipe: Recipe
    body: tuple[Node, ...]
    elements: dict[int, float] = field(default_factory=dict[int, float])
    done: set[tuple[object, ...]] = field(default_factory=set[tuple[object, ...]])
    nbytes: list[float] = field(default_factory=list[float])

    def product(self, node: Kernel, row: KernelRow) -> None:
        """Casts of the operands of a product that nothing has cast yet."""
        weights = [dep for dep in node.deps if _is_hook(self.body[dep])]
        others = [dep for dep in node.deps if dep not in weights]
        backward = node.scope.startswith(_BACKWARD)
        if weights:
            self._weight(node, row, backward)
            for source in others[:1]:
                self.elements[source] = float(row.batch * row.m * row.k)
        for source in others:
            self._operand(source, backward, column=not weights)

    def _weight(self, node: Kernel, row: KernelRow, backward: bool) -> None:
        if not self.recipe.parameters:
            self._add((node.scope.rpartition("/")[0].partition("FSDP")[2], backward), float(row.k * row.n), backward)

    def _operand(self, source: int, backward: bool, column: bool) -> None:
        made, elements = self.body[source], self.elements.get(source, 0.0)
        near = (made, *(self.body[dep] for dep in made.deps))
        gathers = [node for node in near if isinstance(node, Collective) and node.kind == "all_gather"]
        if self.recipe.activations and gathers:
            elements /= gathers[0].groups.size
        self._add((source, backward, column and self.recipe.rows), elements, column)

    def _add(self, key: tuple[object, ...], elements: float, column: bool) -> None:
        if key not in self.done and elements:
            self.done.add(key)
            self.nbytes.append(elements * (COLUMN_BYTES if column and self.recipe.rows else ROW_BYTES))


def as_torchao(program: DeviceProgram, recipe: Recipe) -> tuple[DeviceProgram, list[float]]:
    """`program` with layers in 8 bits, and the bytes that each cast moves."""
    table, casts = program.table, _Casts(recipe, program.body)
    rows, bodies, count = list(table.rows), list(table.bodies), list(table.count)
    body: list[Node] = []
    for node in program.body:
        if isinstance(node, Kernel):
            row = table.rows[node.row]
            if _is_narrow(row, node.scope):
                casts.product(node, row)
                rows[node.row] = _narrowed(row)
            elif row.klass == KernelClass.COPY and any(_halved(program.body[dep], recipe) for dep in node.deps):
                count[node.row] -= 1.0
                rows.append(replace(row, bytes_read=row.bytes_read / 2, bytes_written=row.bytes_written / 2))
                bodies += bodies[node.row : node.row + 1]
                count.append(1.0)
                node = replace(node, row=len(rows) - 1)
        elif isinstance(node, Collective) and _halved(node, recipe):
            node = replace(node, operand_bytes=node.operand_bytes // 2, result_bytes=node.result_bytes // 2)
        body.append(node)
    return replace(
        program, body=tuple(body), table=KernelTable(tuple(rows), np.array(count), tuple(bodies))
    ), casts.nbytes


def _halved(node: Node, recipe: Recipe) -> bool:
    hook = _is_hook(node)
    return _is_gather(node) and _LAYERS in node.scope and (recipe.parameters if hook else recipe.activations)


def _is_gather(node: Node) -> bool:
    return isinstance(node, Collective) and node.kind == "all_gather" and node.dtype == "bf16"


def _is_hook(node: Node) -> bool:
    """Whether a node is FSDP's gather of parameters, or the copy out of its buffer."""
    return node.scope.endswith((_HOOK, "split_with_sizes_copy"))


def _is_narrow(row: KernelRow, scope: str) -> bool:
    sizes = (row.m, row.n, row.k)
    return (
        row.klass == KernelClass.MATMUL
        and row.math == "bf16"
        and _LAYERS in scope
        and not any(s % _LEAST for s in sizes)
    )


def _narrowed(row: KernelRow) -> KernelRow:
    """A product with 8-bit operands; of groups of rows each has a matrix, unless the rows are summed over."""
    matrices = max(row.experts, 1) if row.elems == row.m * row.n else 1
    operands = row.batch * (row.m * row.k + matrices * row.k * row.n)
    return replace(row, math="fp8_e4m3", in_dtype="f8E4M3FN", bytes_read=max(row.bytes_read - operands, operands))


def in_float8(program: DeviceProgram) -> DeviceProgram:
    """`program` with every product of layers in 8 bits, and nothing else changed; the output layer stays."""
    table = program.table
    rows = tuple(_narrowed(row) if _is_layer(row) else row for row in table.rows)
    return replace(program, table=KernelTable(rows, table.count, table.bodies))


def _is_layer(row: KernelRow) -> bool:
    sizes = (row.m, row.n, row.k)
    plain = row.klass in (KernelClass.MATMUL, KernelClass.MOE) and row.math == "bf16" and min(sizes) >= _LEAST_LAYER
    return plain and not any(size >= VOCAB // 8 and VOCAB % size == 0 for size in sizes)
