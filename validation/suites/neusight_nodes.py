"""NeuSight's operator graphs: a node of a model, and the kernels that PyTorch starts for it.

Sizes and kinds are the peer's; which kernels run, and what each reads, is PyTorch's: operands that broadcast are read
in their own size, `torch.matmul` makes permuted operands contiguous, gradients of pointwise operations read what was
saved beside the gradient, an addition passes its gradient on, and a tensor with several readers sums what comes back.
Views cost nothing.
"""

import ast
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from stablecast.backends import kernel_specs as specs
from stablecast.backends.device import Device
from stablecast.ir.kernels import KernelRow
from stablecast.validation.suites.base import Record
from stablecast.validation.suites.neusight import plain, vector_row

WORTH_A_KERNEL: Final = 64
FLOAT_BYTES: Final = 4
_VIEWS: Final = frozenset({"getitem", "misc", "output", "split"})
_UNTYPED_STREAMS: Final = frozenset({"max", "masked", "where", "sub", "mul", "add", "div", "neg", "truediv"})
"""First words of names of untyped nodes that pass over memory where their result is large."""
_OTHER_LOOKS: Final = frozenset({"view", "reshape", "permute", "transpose"})
"""First words of names of views whose readers' gradients are summed."""
_HOST: Final = ("size", "getattr", "dim", "output")
_LARGE: Final = 1 << 16
_COMPILED: Final = ("compiled",)
_STREAMS: Final = frozenset({"where", "masked_fill", "dropout", "contiguous", "cumsum", "EMBEDDING"})
_SELECTIONS: Final = frozenset({"where", "masked_fill", "dropout"})
_BINARY: Final = frozenset({"VECadd", "VECsub", "VECmul", "VECdiv", "VECpow"})
_SECTORS: Final = 8
"""4-byte elements in a sector of 32 bytes, which a load that strides fetches whole (see `lowering.rows`)."""
_SAVED: Final = frozenset({"VECtanh", "VECrelu", "VECgelu"})
"""Pointwise operations whose gradient is one kernel over the gradient and what was saved."""

Part = tuple[str, Sequence[Any]]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A node of an operator graph; `op`: its type (`Linear`, `VECadd`, `fused`, `misc`, ...).

    `readers`: names of the nodes that take its result. `also_written`: elements of results that it writes besides.
    """

    name: str
    op: str
    forward: tuple[Part, ...]
    backward: tuple[Part, ...]
    accumulate: tuple[Part, ...]
    inputs: tuple[Shape, ...]
    output: Shape
    readers: tuple[str, ...] = ()
    also_written: int = 0

    @staticmethod
    def of(record: Record) -> "Node":
        """A node as the table has it; `contiguous` of what no view rearranged hands it on."""
        forward, backward, accumulate = (parts_of(record[name]) for name in ("FwOps", "BwOps", "AccOps"))
        shapes, output = shapes_of(record["InputShapes"]), shape_of(record["OutputShape"])
        readers, read = (tuple(sorted(re.findall(r"'([^']+)'", record[name]))) for name in ("Next", "Prev"))
        op = record["OpName"]
        if op == "contiguous" and not any(_word(name) in _OTHER_LOOKS for name in read):
            op = "misc"
        return Node(record["Name"], op, forward, backward, accumulate, shapes, output, readers)

    @property
    def elements(self) -> int:
        return math.prod(self.output)

    @property
    def is_large(self) -> bool:
        """Whether its result is worth a kernel."""
        return self.elements >= WORTH_A_KERNEL

    @property
    def word(self) -> str:
        """The first word of its name."""
        return _word(self.name)


def _word(name: str) -> str:
    return re.split(r"[_~]", name)[0]


def without_idle(node: Node, config: Mapping[str, Any]) -> Node:
    """`node`, or one that launches nothing where it is the dropout of attention's probabilities and the model's Hugging
    Face configuration gives that a rate of 0: PyTorch then returns what it was given."""
    idle = node.op == "dropout" and node.output[-1:] == node.output[-2:-1] and config.get("attention_dropout") == 0.0
    return replace(node, op="misc", forward=(), backward=()) if idle else node


@cache
def shapes_of(text: str) -> tuple[Shape, ...]:
    """`[(4, 8), (8,)]` as shapes; most nodes of a table have been seen before."""
    return tuple(tuple(shape) for shape in ast.literal_eval(text or "[]"))


@cache
def shape_of(text: str) -> Shape:
    """`(4, 8)` as a shape."""
    return tuple(ast.literal_eval(text or "()"))


@cache
def parts_of(text: str) -> tuple[Part, ...]:
    return tuple((str(kind), dims) for kind, dims in ast.literal_eval(text or "[]"))


def forward_kernels(device: Device, node: Node) -> list[KernelRow]:
    """The kernels of a node's forward pass, eager or (op `fused`) compiled."""
    if node.op == "fused":
        return _fused(device, node) if node.is_large else []
    if node.op == "EMBEDDING":
        return [specs.embedding(device, "f32", math.prod(node.output[:-1]), node.output[-1])]
    if node.op in _VIEWS:
        passes = node.op == "misc" and node.word in _UNTYPED_STREAMS and node.elements >= _LARGE
        return [specs.elementwise(device, "f32", node.elements, 1, 1)] if passes else []
    if node.op in _STREAMS:
        return [_over(specs.elementwise(device, "f32", node.elements, 1, 1), node)] if node.is_large else []
    if len(node.forward) == 1 and node.forward[0][0] in _BINARY:
        kind, (rows, columns) = node.forward[0]
        return [_over(vector_row(device, kind.removeprefix("VEC"), rows, columns), node)]
    rows = [row for part in node.forward if (row := part_row(device, _batched(node, part))) is not None]
    return rows + _operand_copies(device, node)


def _over(row: KernelRow, node: Node) -> KernelRow:
    """`row` with the node's own operands, each read in its own size; masks hold a byte an element."""
    whole = max(sum(math.prod(shape) == node.elements for shape in node.inputs), 1)
    read = sum(math.prod(shape) for shape in node.inputs)
    if node.op in ("where", "masked_fill"):
        read -= 0.75 * math.prod(node.inputs[0])
    written = 1.25 * row.bytes_written if node.op == "dropout" else row.bytes_written
    return replace(row, inputs=whole, bytes_read=float(FLOAT_BYTES * read), bytes_written=written)


def backward_kernels(device: Device, node: Node) -> list[KernelRow]:
    """The kernels of a node's backward pass, and those that add its weights' gradients to what is there."""
    added = [row for part in node.accumulate if (row := part_row(device, part)) is not None]
    if node.word == "split":
        return [specs.copy(device, "f32", math.prod(node.inputs[0])), *added] if node.backward or node.inputs else added
    return [*_gradients(device, node), *added]


def _maximum_gradients(device: Device, node: Node) -> list[KernelRow]:
    """`where(self == other, grad / 2, grad).masked_fill_(self < other, 0)` (derivatives.yaml): bytes each reads and
    writes for an element, a mask holding one."""
    streams = ((4, 1), (4, 4), (9, 4), (4, 1), (5, 4))
    row = specs.elementwise(device, "f32", node.elements, 1, 1)
    count = float(node.elements)
    return [replace(row, bytes_read=read * count, bytes_written=written * count) for read, written in streams]


def _gradients(device: Device, node: Node) -> list[KernelRow]:
    if node.op == "misc" and node.word == "max" and node.elements >= _LARGE and node.output in node.inputs:
        return _maximum_gradients(device, node)
    looks = node.op in _VIEWS and node.word in _OTHER_LOOKS and node.elements >= _LARGE
    if not looks and (node.op in _VIEWS or not node.backward or not node.forward):
        return []
    back = sum(not name.startswith(_HOST) for name in node.readers)
    sums = [specs.elementwise(device, "f32", node.elements)] * (back - 1) if node.is_large else []
    if looks:
        return sums
    return [*sums, *_own_gradients(device, node)]


def _own_gradients(device: Device, node: Node) -> list[KernelRow]:
    if node.op in _STREAMS:
        return _stream_gradients(device, node)
    kind, dims = node.forward[0]
    if kind in ("VECsoftmax", "VECln"):
        own = part_row(device, (kind, dims))
        assert own is not None
        found = [replace(own, bytes_read=2 * own.bytes_read, inputs=2, transcendentals=0)]
        if kind == "VECln":
            gamma = specs.reduce(device, "f32", dims[1], dims[0])
            found.append(replace(gamma, bytes_read=2 * gamma.bytes_read, inputs=2))
        return found
    if kind in _SAVED:
        return [specs.elementwise(device, "f32", dims[0], dims[1], 2)]
    if kind in _BINARY:
        both = sum(math.prod(shape) == node.elements for shape in node.inputs) > 1
        if kind == "VECadd":
            return []
        return [vector_row(device, kind.removeprefix("VEC"), *dims)] * 2 if both else [_scaled(device, *dims)]
    found = [row for part in node.backward if part[0] != "MEM" and (row := part_row(device, part)) is not None]
    if kind == "Linear":
        found.append(specs.reduce(device, "f32", dims[2], dims[0]))
    return [*found, *_gradient_copies(device, node)]


def _scaled(device: Device, rows: int, columns: int) -> KernelRow:
    return specs.elementwise(device, "f32", rows, columns, 1)


def _stream_gradients(device: Device, node: Node) -> list[KernelRow]:
    """Of what moves data: a selection masks the gradient, a copy passes it on, a lookup fills and scatters."""
    if node.op == "EMBEDDING":
        tokens, width = math.prod(node.output[:-1]), node.output[-1]
        fill = specs.elementwise(device, "f32", math.prod(node.backward[0][1][0]), 1, 0)
        return [fill, specs.embedding(device, "f32", tokens, width)]
    if not node.is_large or node.op not in _SELECTIONS:
        return []
    row = specs.elementwise(device, "f32", node.elements, 1, 1)
    mask = node.elements if node.op == "dropout" else math.prod(node.inputs[0])
    return [replace(row, bytes_read=row.bytes_read + mask)]


def _batched(node: Node, part: Part) -> Part:
    """A product of two operands with batch dimensions that the graph calls linear is a batched one."""
    kind, dims = part
    shapes = [shape for shape in node.inputs if len(shape) == 4]
    if kind == "Linear" and len(shapes) == 2:
        batch = math.prod(node.output[:-2])
        return "BMM", (batch, dims[0] // batch, dims[1], dims[2])
    return part


def _operand_copies(device: Device, node: Node) -> list[KernelRow]:
    """`torch.matmul` makes operands contiguous whose heads were moved before their positions, unless the batch is 1.

    Probabilities are what softmax wrote and need none. Keys [batch, heads, width, positions] lie with their width
    innermost: their copy strides.
    """
    if node.op != "BMM":
        return []
    heads = [shape for shape in node.inputs if len(shape) == 4 and shape[0] > 1 and shape[-1] != shape[-2]]
    copies = [specs.copy(device, "f32", math.prod(shape)) for shape in heads]
    if len(heads) == 2 and node.readers != _COMPILED:
        copies[1] = replace(copies[1], bytes_read=_SECTORS * copies[1].bytes_read)
    return copies


def _gradient_copies(device: Device, node: Node) -> list[KernelRow]:
    """Gradients of heads go back among the positions, whatever the batch; the result's own comes as heads moved."""
    if node.op != "BMM" or len(node.output) != 4:
        return []
    copies = [specs.copy(device, "f32", math.prod(shape)) for shape in node.inputs if shape[-1] != shape[-2]]
    if len(copies) == 2:
        return [copies[0], replace(copies[1], bytes_read=_SECTORS * copies[1].bytes_read)]
    return copies * 2 if node.output[0] > 1 else copies


def compiled(nodes: Sequence[Node]) -> list[Node]:
    """The nodes as Inductor fuses them further than the peer's graph, their products' operands cut by Triton's tiles.

    A pointwise node joins the normalisation that reads it, or else its only reader if that is pointwise too; where
    others read it as well it is written besides. Casts to the type that is there and views are no kernels.
    """
    by_name = {node.name: node for node in nodes}
    into = {node.name: target for node in nodes if (target := _joined(node, by_name)) is not None}
    parts: dict[str, list[Node]] = {}
    for name, target in into.items():
        parts.setdefault(target.name, []).append(by_name[name])

    def whole(node: Node) -> Node:
        inputs, written = list(node.inputs), 0
        for part in map(whole, parts.get(node.name, [])):
            if part.output in inputs:
                inputs.remove(part.output)
            inputs += part.inputs
            written += part.also_written + (part.elements if len(_real_readers(part, by_name)) > 1 else 0)
        return replace(node, op="fused", inputs=tuple(inputs), also_written=written)

    return [
        whole(node) if _is_pointwise(node) or _is_normalisation(node) else replace(node, readers=_COMPILED)
        for node in nodes
        if node.name not in into
    ]


def _joined(node: Node, by_name: Mapping[str, Node]) -> Node | None:
    """The node whose kernel a pointwise node joins."""
    if not _is_pointwise(node):
        return None
    readers = _real_readers(node, by_name)
    same = [reader for reader in readers if reader.elements == node.elements]
    first = next((reader for reader in same if _is_normalisation(reader)), None)
    alone = same[0] if len(readers) == 1 and same and _is_pointwise(same[0]) else None
    return first or alone


def _real_readers(node: Node, by_name: Mapping[str, Node]) -> list[Node]:
    """Readers that compute, found through those that only look at the same elements in another way."""
    found: list[Node] = []
    for name in node.readers:
        reader = by_name.get(name)
        if reader is None or not reader.is_large:
            continue
        looks = reader.op in _VIEWS or (reader.op == "fused" and not reader.forward)
        found += _real_readers(reader, by_name) if looks else [reader]
    return found


def _is_normalisation(node: Node) -> bool:
    return any(kind in ("VECsoftmax", "VECln") for kind, _ in node.forward)


def _is_pointwise(node: Node) -> bool:
    kinds = {kind for kind, _ in node.forward}
    whole = bool(kinds) and all(kind.startswith("VEC") for kind in kinds) and not _is_normalisation(node)
    return node.is_large and (whole or node.op in ("where", "masked_fill"))


def _fused(device: Device, node: Node) -> list[KernelRow]:
    """One compiled kernel: it reads what its result's elements need of its inputs, and writes its output, each once."""
    kinds = {kind for kind, _ in node.forward}
    if not kinds:
        return []
    read = float(FLOAT_BYTES * sum(math.prod(shape) for shape in node.inputs if _spreads(shape, node.output)))
    written = float(FLOAT_BYTES * (node.elements + node.also_written))
    columns = node.output[-1] if node.output else 1
    rows = max(node.elements // max(columns, 1), 1)
    if "VECsoftmax" in kinds:
        row = specs.softmax(device, "f32", rows, columns)
    elif "VECln" in kinds:
        row = specs.layernorm(device, "f32", rows, columns)
    else:
        row = specs.elementwise(device, "f32", node.elements, 1, 1)
    return [replace(row, bytes_read=max(read, float(FLOAT_BYTES * node.elements)), bytes_written=written)]


def _spreads(shape: Shape, output: Shape) -> bool:
    """Whether a tensor of `shape` has an element for each of `output`, by its size or by broadcasting."""
    if math.prod(shape) == math.prod(output):
        return True
    pairs = zip(reversed(shape), reversed(output), strict=False)
    return len(shape) <= len(output) and all(size in (1, whole) for size, whole in pairs)


def part_row(device: Device, part: Part) -> KernelRow | None:
    """The kernel of one part of a node; None for what only concerns the host."""
    kind, dims = part
    if kind == "Linear":
        m, k, n = dims
        return plain(specs.matmul(device, "f32", m, n, k))
    if kind == "BMM":
        batch, m, k, n = dims
        return plain(specs.matmul(device, "f32", m, n, k, batch))
    if kind == "MEM":
        elements = sum(math.prod(shape) for shape in dims)
        return specs.elementwise(device, "f32", elements, 1, 0) if elements >= WORTH_A_KERNEL else None
    if kind.startswith("VEC"):
        rows, columns = dims
        return vector_row(device, kind.removeprefix("VEC"), rows, columns)
    return None
