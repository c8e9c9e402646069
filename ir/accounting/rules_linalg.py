"""Factorisations, solves, transforms and random bits."""

import math

from stablecast.ir.accounting.context import Context, reads_of, tensor, writes_of
from stablecast.ir.accounting.registry import hlo, rule
from stablecast.ir.accounting.values import Basis, OpWork
from stablecast.ir.dtypes import DTypeKind
from stablecast.ir.kernels import KernelClass
from stablecast.ir.program import Op
from stablecast.ir.types import TensorType

PHILOX = 25
"""FLOPs of a 32-bit word of Philox4x32-10: ten rounds of four products, four xors and two key sums, for four words
(Salmon et al., SC 2011)."""

THREEFRY = 56
"""FLOPs of a 32-bit word of Threefry2x32-20: twenty rounds of add, rotate (3) and xor, five key injections of two or
three sums, for two words (Salmon et al., SC 2011)."""

_WORD_FLOPS = {"THREE_FRY": THREEFRY, "PHILOX": PHILOX, "DEFAULT": PHILOX}


def complex_factor(kind: TensorType) -> int:
    """Real FLOPs of a complex multiply-add over those of a real one."""
    return 4 if kind.dtype.is_complex else 1


@rule(*hlo("cholesky"), klass=KernelClass.CUSTOM, basis=Basis.FORMULA, notes="n^3/3 matmul FLOPs a matrix")
def cholesky(op: Op, context: Context) -> OpWork:
    """LAPACK Working Note 41: n^3/3 + O(n^2)."""
    kind = tensor(op.operand_types[0])
    n = kind.shape[-1]
    return OpWork(
        matmul_flops=complex_factor(kind) * kind.elements * n / 3,
        reads=reads_of(op),
        writes=writes_of(op),
        klass=KernelClass.CUSTOM,
        basis=Basis.FORMULA,
    )


@rule(
    *hlo("triangular_solve"),
    klass=KernelClass.CUSTOM,
    basis=Basis.FORMULA,
    notes="n^2 matmul FLOPs per right-hand side",
)
def triangular_solve(op: Op, context: Context) -> OpWork:
    """LAPACK Working Note 41: n^2 m for m right-hand sides."""
    matrix, rhs = tensor(op.operand_types[0]), tensor(op.operand_types[1])
    n = matrix.shape[-1]
    return OpWork(
        matmul_flops=complex_factor(matrix) * rhs.elements * n,
        reads=reads_of(op),
        writes=writes_of(op),
        klass=KernelClass.CUSTOM,
        basis=Basis.FORMULA,
    )


@rule(
    *hlo("fft"),
    klass=KernelClass.FFT,
    basis=Basis.FORMULA,
    notes="5 N log2 N vector FLOPs a complex transform, half for a real one; N the product of the lengths",
)
def fft(op: Op, context: Context) -> OpWork:
    """The figure that FFT benchmarks use (FFTW: 5 N log2 N complex, 2.5 N log2 N real)."""
    lengths: tuple[int, ...] = op.attrs["fft_length"]
    points = math.prod(lengths)
    operand, result = tensor(op.operand_types[0]), tensor(op.result_type)
    is_real = DTypeKind.FLOAT in (operand.dtype.kind, result.dtype.kind)
    rank = len(lengths)
    batch = math.prod(operand.shape[: operand.rank - rank])
    flops = batch * 5 * points * math.log2(points) if points > 1 else 0
    return OpWork(
        vector_flops=flops / 2 if is_real else flops,
        reads=reads_of(op),
        writes=writes_of(op),
        klass=KernelClass.FFT,
        basis=Basis.FORMULA,
    )


@rule(
    *hlo("rng_bit_generator"),
    basis=Basis.FORMULA,
    notes=f"{PHILOX} FLOP per 32-bit word with Philox (the default), {THREEFRY} with Threefry",
)
def rng_bit_generator(op: Op, context: Context) -> OpWork:
    text = str(op.attrs.get("rng_algorithm", "DEFAULT"))
    algorithm = text.removeprefix("#stablehlo<rng_algorithm ").removeprefix("#mhlo.rng_algorithm<").rstrip(">")
    words = -(-op.result_types[1].nbytes // 4)
    return OpWork(
        vector_flops=words * _WORD_FLOPS.get(algorithm, PHILOX),
        reads=reads_of(op),
        writes=writes_of(op),
        basis=Basis.FORMULA,
    )


@rule(
    *hlo("rng"),
    basis=Basis.FORMULA,
    notes=f"{PHILOX} FLOP per 32-bit word + 2 to scale; normal: 1 transcendental more",
)
def rng(op: Op, context: Context) -> OpWork:
    words = -(-op.result_type.nbytes // 4)
    elements = op.result_type.elements
    is_normal = str(op.attrs.get("rng_distribution", "")).rstrip(">").endswith("NORMAL")
    return OpWork(
        vector_flops=words * PHILOX + 2 * elements,
        transcendentals=elements if is_normal else 0,
        reads=reads_of(op),
        writes=writes_of(op),
        basis=Basis.FORMULA,
    )


@rule("mhlo.xla.rng_get_and_update_state", basis=Basis.FORMULA, notes="adds to a state of 16 B")
def rng_state(op: Op, context: Context) -> OpWork:
    return OpWork(vector_flops=1, reads=(), writes=writes_of(op), basis=Basis.FORMULA)
