"""Compute nodes of other tools' traces as rows of a kernel table."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from stablecast.ir.chakra import IOInfo, Node, NodeType
from stablecast.ir.device_program import Unmodelled
from stablecast.ir.kernels import FloatArray, KernelClass, KernelRow, KernelTable

STAGE_SCHEMA = "symbolic_tensor_network"
REMOTE_MEMORY = "remote_memory"
_ASSUMED_MATH = "bf16"
_MATHS: Mapping[str, str] = MappingProxyType({"f32": "fp32", "f64": "fp64", "f16": "fp16", "bf16": "bf16"})
"""Element type of the operands, where nodes name it -> arithmetic."""
_STAGE_CLASSES: Mapping[str, KernelClass] = MappingProxyType(
    {
        "M": KernelClass.MATMUL,
        "E": KernelClass.ELEMENTWISE,
        "E2": KernelClass.ELEMENTWISE,
        "A": KernelClass.ELEMENTWISE,
        "R": KernelClass.COPY,
        "B": KernelClass.COPY,
        "SLICE": KernelClass.COPY,
        "CUSTOM": KernelClass.CUSTOM,
    }
)
"""`op_type` of STAGE's nodes: product, functions of one or two tensors, sum, reshape, broadcast or routing, slice."""
_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "float": "f32",
        "double": "f64",
        "c10::Half": "f16",
        "c10::BFloat16": "bf16",
        "long int": "i64",
        "int": "i32",
        "bool": "i1",
        "unsigned char": "ui8",
    }
)


@dataclass(frozen=True, slots=True)
class Compute:
    """What a node says of its kernel, and under what scope reports list it."""

    row: KernelRow
    scope: str


@dataclass(slots=True)
class RowBook:
    """Distinct rows in the order in which they are met; kernels of different given durations are kept apart.

    `schema`: what the head of the trace says of its producer.
    """

    schema: str = ""
    notes: list[str] = field(default_factory=list[str])
    _rows: list[KernelRow] = field(default_factory=list[KernelRow])
    _micros: list[int] = field(default_factory=list[int])
    _runs: list[int] = field(default_factory=list[int])
    _index: dict[tuple[KernelRow, int], int] = field(default_factory=dict[tuple[KernelRow, int], int])

    def row(self, compute: Compute, micros: int) -> int:
        """The number of the row; one more run of it is counted."""
        number = self._index.setdefault((compute.row, micros), len(self._rows))
        if number == len(self._rows):
            self._rows.append(compute.row)
            self._micros.append(micros)
            self._runs.append(0)
        self._runs[number] += 1
        return number

    def table(self) -> tuple[KernelTable, FloatArray | None, tuple[Unmodelled, ...]]:
        """The table, seconds of its rows where any node has a duration, and kernels whose work nobody said."""
        counts = np.array(self._runs, dtype=np.float64)
        timed = any(self._micros)
        durations = np.array(self._micros) * 1e-6 if timed else None
        return KernelTable(tuple(self._rows), counts), durations, self._unmodelled()

    def _unmodelled(self) -> tuple[Unmodelled, ...]:
        everything = sum(row.work.nbytes * runs for row, runs in zip(self._rows, self._runs, strict=True)) or 1.0
        found: dict[str, list[float]] = {}
        for row, runs in zip(self._rows, self._runs, strict=True):
            if not row.modelled:
                sums = found.setdefault(row.label, [0.0, 0.0])
                sums[0] += runs
                sums[1] += row.work.nbytes * runs
        return tuple(
            Unmodelled(label, runs, nbytes, min(1.0, nbytes / everything), "the trace does not say its work")
            for label, (runs, nbytes) in sorted(found.items(), key=lambda item: -item[1][1])
        )

    def memory(self, node: Node) -> Compute:
        """A transfer with remote memory."""
        size = node.value("tensor_size")
        nbytes = float(size) if isinstance(size, int) else 0.0
        loads = node.type == NodeType.MEM_LOAD
        self.notes.append("transfers with remote memory are priced as copies within the device")
        read, written = (nbytes, 0.0) if loads else (0.0, nbytes)
        label = "load" if loads else "store"
        row = KernelRow(KernelClass.COPY, bytes_read=read, bytes_written=written, library=REMOTE_MEMORY, label=label)
        return Compute(row, node.name)

    def compute(self, node: Node) -> Compute:
        """A compute node: by the work that it states, else by the bytes of its operands."""
        operations, size = node.value("num_ops"), node.value("tensor_size")
        scope = node.name
        if isinstance(operations, int) and isinstance(size, int):
            if self.schema == STAGE_SCHEMA:
                return Compute(self._stage(node, operations, size), scope.replace(".", "/"))
            return Compute(self._stated(operations, size, _tensor_bytes(node.inputs)[1]), scope)
        return Compute(self._bare(node), scope)

    def _stated(self, operations: int, size: int, dtype: str) -> KernelRow:
        """Operations at the matrix peak against bytes, as the simulators that read such traces do."""
        if operations <= 1 or (dtype and dtype not in _MATHS):
            flops = float(operations) if operations > 1 else 0.0
            return KernelRow(KernelClass.CUSTOM, in_dtype=dtype, vector_flops=flops, bytes_read=float(size))
        math = _MATHS.get(dtype, _ASSUMED_MATH)
        element = dtype if dtype in _MATHS else _ASSUMED_MATH
        self.notes.append(f"compute nodes state operations and bytes only: taken as {math} products of unknown shape")
        return KernelRow(
            KernelClass.CUSTOM, math, element, "f32", element, matmul_flops=float(operations), bytes_read=float(size)
        )

    def _stage(self, node: Node, operations: int, size: int) -> KernelRow:
        """STAGE counts a multiply-add as one operation and writes the bytes of the result."""
        self.notes.append(f"STAGE's traces: a multiply-add counts two FLOP, products are {_ASSUMED_MATH}")
        kind = node.value("op_type")
        klass = _STAGE_CLASSES.get(kind, KernelClass.CUSTOM) if isinstance(kind, str) else KernelClass.CUSTOM
        inputs = _stage_sizes(node, "inputs")
        row = KernelRow(
            klass,
            out_dtype=_ASSUMED_MATH,
            elems=size,
            inputs=len(inputs),
            bytes_read=float(sum(inputs)),
            bytes_written=float(size),
            label=kind if isinstance(kind, str) else "",
        )
        if klass is KernelClass.MATMUL:
            m, n, k = _product_shape(operations, size, inputs)
            typed = replace(row, math=_ASSUMED_MATH, in_dtype=_ASSUMED_MATH, acc_dtype="f32")
            return replace(typed, m=m, n=n, k=k, matmul_flops=2.0 * operations)
        return row if klass is KernelClass.COPY else replace(row, vector_flops=float(operations))

    def _bare(self, node: Node) -> KernelRow:
        read, dtype = _tensor_bytes(node.inputs)
        written, out = _tensor_bytes(node.outputs)
        label = node.name.split("(")[0].strip()[:80] or node.name[:80]
        return KernelRow(
            KernelClass.CUSTOM,
            in_dtype=dtype,
            out_dtype=out or dtype,
            bytes_read=float(read),
            bytes_written=float(written),
            label=label,
            modelled=0,
        )


def _stage_sizes(node: Node, name: str) -> list[int]:
    value = node.value(name)
    if not isinstance(value, tuple):
        return []
    try:
        return [int(float(str(text))) for text in value[1::2]]
    except ValueError:
        return []


def _product_shape(operations: int, result: int, inputs: list[int]) -> tuple[int, int, int]:
    """m, n, k such that m k n = operations, m n = result and k n = the second operand; zeros where there are none."""
    if not result or operations % result or len(inputs) < 2:
        return 0, 0, 0
    k, second = operations // result, inputs[1]
    if k < 1 or second < 1 or second % k or result % (second // k):
        return 0, 0, 0
    return result // (second // k), second // k, k


def _tensor_bytes(info: IOInfo | None) -> tuple[int, str]:
    """Bytes of the tensors that PyTorch's execution traces list, and the type of the first."""
    values, types = (info.values, info.types) if info else ("", "")
    tensors: list[list[Any]] = []
    _collect(_literal(values), tensors)
    kinds: list[str] = []
    _collect_kinds(_literal(types), kinds)
    return sum(int(tensor[3]) * int(tensor[4]) for tensor in tensors), next(iter(kinds), "")


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text) if text else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _collect(value: Any, into: list[list[Any]]) -> None:
    if not isinstance(value, list):
        return
    items = cast(list[Any], value)
    if len(items) == 6 and all(isinstance(item, int) for item in items[:5]) and isinstance(items[5], str):
        into.append(items)
        return
    for item in items:
        _collect(item, into)


def _collect_kinds(value: Any, into: list[str]) -> None:
    for text in cast(list[Any], value) if isinstance(value, list) else ():
        if isinstance(text, str) and "Tensor(" in text:
            name = text.rpartition("Tensor(")[2].split(")")[0].split(",")[0]
            into.append(_DTYPES.get(name, ""))
