"""The kernel table: one row per distinct kernel, by column, so that backends work on arrays."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from operator import attrgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stablecast.ir.program import Op
from stablecast.ir.work import Work

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


class KernelClass(StrEnum):
    """What kind of kernel it is; backends choose their model by it."""

    MATMUL = "matmul"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    MOE = "moe"
    REDUCTION = "reduction"
    ELEMENTWISE = "elementwise"
    GATHER = "gather"
    SCATTER = "scatter"
    SORT = "sort"
    FFT = "fft"
    COPY = "copy"
    CUSTOM = "custom"


COMPILED: Final = "compiled"
"""`KernelRow.library` of what a compiler wrote for one program; empty: a library's or a framework's own kernel."""


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One distinct kernel; a shape field that does not apply is 0, and a text is empty.

    `klass`: `KernelClass`. `math`: what multiplies: `tf32 | bf16 | bf16x3 | fp16 | fp8_e4m3 | int8 | fp32 | fp64 ...`
    on the matrix unit or by plain FMA, `vector` where no product of matrices is in it.
    matmul: `batch, m, n, k`, `trans_a`, `trans_b` (1: the contracted dimension is not the inner one of that operand);
    for a convolution they hold its im2col shape. conv: input `n_, h, w, c` as `cn, ch, cw, cc`, output channels `co`,
    window `cr, cs`, `stride`, `pad`, `lhs_dilation`, `rhs_dilation` (of the last spatial dimension), `groups`.
    attention: `batch, hq, hkv, sq, skv, d, causal, window, direction (fwd | bwd), phase (prefill | decode)`. moe:
    `experts, topk`. reduce and elementwise: `elems` (output, or iterations), `reduced` (elements folded into one),
    `inputs` (boundary operands). FLOPs: `matmul_flops` with edge padding, of which `padded_flops` hit it;
    `dilation_flops`: further ones that an implementation would spend on the zeros of a dilated input, if it does not
    skip them; `vector_flops`, `transcendentals`. `bytes_read`, `bytes_written`: with the device memory.
    `launches`: kernels started. `waits`, `row_waits`: accesses to device memory that their slowest threads make one
    after the other beyond the first of each launch, to what lies near by and to rows anywhere in a large table; 0 where
    nothing is known of them. `estimated_cycles`: what its compiler thinks it takes, 0 if it does not say.
    `library`: `cublas`, `cudnn`, `triton`, `xla`, a custom-call target. `modelled`: False for opaque kernels whose
    work nobody said.
    """

    klass: str = KernelClass.ELEMENTWISE
    math: str = "vector"
    in_dtype: str = ""
    acc_dtype: str = ""
    out_dtype: str = ""
    batch: int = 1
    m: int = 0
    n: int = 0
    k: int = 0
    trans_a: int = 0
    trans_b: int = 0
    epilogue: str = ""
    cn: int = 0
    ch: int = 0
    cw: int = 0
    cc: int = 0
    co: int = 0
    cr: int = 0
    cs: int = 0
    stride: int = 0
    pad: int = 0
    lhs_dilation: int = 0
    rhs_dilation: int = 0
    groups: int = 0
    hq: int = 0
    hkv: int = 0
    sq: int = 0
    skv: int = 0
    d: int = 0
    causal: int = 0
    window: int = 0
    direction: str = ""
    phase: str = ""
    experts: int = 0
    topk: int = 0
    elems: int = 0
    reduced: int = 0
    inputs: int = 0
    matmul_flops: float = 0
    padded_flops: float = 0
    dilation_flops: float = 0
    vector_flops: float = 0
    transcendentals: float = 0
    bytes_read: float = 0
    bytes_written: float = 0
    launches: int = 1
    waits: float = 0
    row_waits: float = 0
    library: str = ""
    label: str = ""
    estimated_cycles: float = 0
    modelled: int = 1

    @property
    def useful_flops(self) -> float:
        """Matrix FLOPs without padding and dilation zeros."""
        return self.matmul_flops - self.padded_flops

    @property
    def work(self) -> Work:
        return Work(self.matmul_flops, self.vector_flops, self.transcendentals, self.bytes_read, self.bytes_written)

    @property
    def shape(self) -> str:
        """The shape in words, for reports."""
        if self.klass == KernelClass.CONVOLUTION:
            stride = f" s{self.stride}" if self.stride > 1 else ""
            return f"{self.cn}x{self.ch}x{self.cw}x{self.cc}→{self.co} {self.cr}x{self.cs}{stride} {self.math}"
        if self.klass == KernelClass.MATMUL:
            batch = f"{self.batch}x" if self.batch > 1 else ""
            return f"{batch}{self.m}x{self.n}x{self.k} {self.math}"
        if self.klass == KernelClass.ATTENTION:
            return f"{self.batch}x{self.hq}x{self.sq}x{self.skv}x{self.d} {self.math}"
        reduced = f" /{self.reduced}" if self.reduced > 1 else ""
        return f"{self.elems}{reduced} {self.out_dtype}"


_FIELDS = tuple(fields(KernelRow))
_NAMES = tuple(field.name for field in _FIELDS)
_TEXT = frozenset(field.name for field in _FIELDS if field.type in (str, "str"))
_FLOAT = frozenset(field.name for field in _FIELDS if field.type in (float, "float"))


def _column(rows: Sequence[KernelRow], name: str) -> npt.NDArray[Any]:
    values = map(attrgetter(name), rows)
    if name not in _TEXT:
        return np.fromiter(values, np.float64 if name in _FLOAT else np.int64, len(rows))
    texts = list(values)
    number = {text: position for position, text in enumerate(dict.fromkeys(texts))}
    index = np.fromiter(map(number.__getitem__, texts), np.intp, len(rows))
    return np.array(list(number), dtype=str)[index]


@dataclass(frozen=True)
class KernelTable:
    """Columns of `KernelRow`, one entry a distinct kernel: `table.m` is an int64 array, `table.klass` a text array.

    `count[i]`: how often kernel i runs in a step, loops multiplied out. `bodies[i]`: the ops of row i.
    """

    rows: tuple[KernelRow, ...]
    count: FloatArray
    bodies: tuple[tuple[Op, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def body(self, row: int) -> tuple[Op, ...]:
        """The ops that row `row` stands for; empty where the kernel came from elsewhere."""
        return self.bodies[row] if self.bodies else ()

    @cached_property
    def columns(self) -> Mapping[str, Any]:
        """Every column by name."""
        return {name: _column(self.rows, name) for name in _NAMES}

    def __getattr__(self, name: str) -> Any:
        if name in _NAMES:
            return self.columns[name]
        raise AttributeError(f"KernelTable has no column '{name}'")

    @cached_property
    def useful_flops(self) -> FloatArray:
        return self.columns["matmul_flops"] - self.columns["padded_flops"]

    def select(self, mask: BoolArray) -> "KernelTable":
        """The rows where `mask` is true."""
        index = np.nonzero(mask)[0]
        bodies = tuple(self.bodies[i] for i in index) if self.bodies else ()
        return KernelTable(tuple(self.rows[i] for i in index), self.count[index], bodies)

    def with_columns(self, columns: Mapping[str, Any]) -> "KernelTable":
        """The same kernels with `columns` in place of the present ones; `rows` keep saying what they said."""
        changed = KernelTable(self.rows, self.count, self.bodies)
        vars(changed)["columns"] = columns
        return changed

    @staticmethod
    def of(rows: Iterable[KernelRow], count: FloatArray | None = None) -> "KernelTable":
        """A table of `rows`, each run once unless `count` says otherwise."""
        listed = tuple(rows)
        return KernelTable(listed, np.ones(len(listed)) if count is None else count)


class KernelTableBuilder:
    """Collects kernels and gives equal ones the same row number."""

    def __init__(self) -> None:
        self._rows: list[KernelRow] = []
        self._bodies: list[tuple[Op, ...]] = []
        self._index: dict[KernelRow, int] = {}
        self._keys: dict[Any, int] = {}

    def known(self, key: Any) -> int | None:
        """The row number that `key` was added under, None if it is new."""
        return self._keys.get(key)

    def row(self, number: int) -> KernelRow:
        return self._rows[number]

    def add(self, key: Any, row: KernelRow, body: Sequence[Op]) -> int:
        """The number of `row`, under which `key` is then known; an equal row keeps the number that it has."""
        number = self._index.setdefault(row, len(self._rows))
        if number == len(self._rows):
            self._rows.append(row)
            self._bodies.append(tuple(body))
        self._keys[key] = number
        return number

    def build(self, count: Mapping[int, float]) -> KernelTable:
        """The table; `count`: row -> runs in a step."""
        runs = np.array([count.get(row, 0.0) for row in range(len(self._rows))])
        return KernelTable(tuple(self._rows), runs, tuple(self._bodies))
