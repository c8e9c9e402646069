"""Dense linear algebra that frameworks leave to LAPACK, cuSOLVER, hipSOLVER or XLA's own expanders.

Counts are those of LAPACK Working Note 41 and of Golub and Van Loan, Matrix Computations (4th ed.); they are matrix
FLOPs, as blocked algorithms spend them in products.
"""

from collections.abc import Callable, Iterable
from itertools import product

from stablecast.ir.accounting.context import Context, tensor
from stablecast.ir.accounting.registry import register_work
from stablecast.ir.accounting.rules_linalg import complex_factor
from stablecast.ir.accounting.values import Basis, OpWork
from stablecast.ir.kernels import KernelClass
from stablecast.ir.program import Op
from stablecast.ir.types import TensorType

Count = Callable[[Op, float, float], float]
"""FLOPs of one m x n matrix."""


def _lapack(*routines: str) -> Iterable[str]:
    for kind, routine in product("sdcz", routines):
        yield f"lapack_{kind}{routine}_ffi"
        yield f"lapack_{kind}{routine}"


def _gpu(*routines: str) -> Iterable[str]:
    for vendor, routine in product(("cusolver", "hipsolver"), routines):
        yield f"{vendor}_{routine}_ffi"
        yield f"{vendor}_{routine}"


def _register(names: Iterable[str], notes: str, count: Count) -> None:
    listed = tuple(dict.fromkeys(names))

    @register_work(*listed, klass=KernelClass.CUSTOM, basis=Basis.FORMULA, notes=notes)
    def work(op: Op, context: Context) -> OpWork:
        kind = tensor(op.operand_types[0])
        m, n = _sizes(kind)
        batch = kind.elements / (m * n) if kind.elements else 0
        flops = batch * complex_factor(kind) * count(op, m, n)
        return OpWork(matmul_flops=flops, klass=KernelClass.CUSTOM, basis=Basis.FORMULA)


def _sizes(kind: TensorType) -> tuple[int, int]:
    return (kind.shape[-2], kind.shape[-1]) if kind.rank > 1 else (kind.elements, 1)


def _lu(op: Op, m: float, n: float) -> float:
    p = min(m, n)
    return 2 * (m * n * p - (m + n) * p * p / 2 + p**3 / 3)


def _qr(op: Op, m: float, n: float) -> float:
    p, q = max(m, n), min(m, n)
    return 2 * q * q * (p - q / 3)


def _form_q(op: Op, m: float, n: float) -> float:
    k = tensor(op.operand_types[1]).shape[-1]
    return 4 * m * n * k - 2 * (m + n) * k * k + 4 * k**3 / 3


def _apply_q(op: Op, m: float, n: float) -> float:
    """Operands are the reflectors, their factors and the matrix that Q multiplies."""
    k = tensor(op.operand_types[1]).shape[-1]
    rows, columns = _sizes(tensor(op.operand_types[2]))
    other = columns if rows == m else rows
    return 4 * rows * columns * k - 2 * other * k * k


def _svd(op: Op, m: float, n: float) -> float:
    """Golub-Reinsch; with vectors where some result beyond the first copy of the operand is square."""
    p, q = max(m, n), min(m, n)
    with_vectors = any(isinstance(kind, TensorType) and kind.rank > 1 and kind.elements for kind in op.result_types[2:])
    return 4 * p * p * q + 8 * p * q * q + 9 * q**3 if with_vectors else 4 * p * q * q - 4 * q**3 / 3


_register([*_lapack("potrf"), *_gpu("potrf", "potrf_batched")], "Cholesky: n^3/3", lambda op, m, n: n**3 / 3)
_register(
    [
        *_lapack("getrf"),
        *_gpu("getrf"),
        "cublas_getrf_batched_ffi",
        "hipblas_getrf_batched_ffi",
        "cublas_getrf_batched",
        "hipblas_getrf_batched",
        "LuDecomposition",
    ],
    "LU: 2/3 n^3 (square)",
    _lu,
)
_register(
    [
        *_lapack("geqrf", "geqp3"),
        *_gpu("geqrf"),
        "cublas_geqrf_batched_ffi",
        "hipblas_geqrf_batched_ffi",
        "cublas_geqrf_batched",
        "hipblas_geqrf_batched",
        "cuhybrid_geqp3",
        "hiphybrid_geqp3",
        "Qr",
        "QrDecomposition",
    ],
    "QR: 2 n^2 (m - n/3)",
    _qr,
)
_register(
    [*_lapack("orgqr", "ungqr"), *_gpu("orgqr"), "ProductOfElementaryHouseholderReflectors"],
    "Q from k reflectors: 4mnk - 2(m+n)k^2 + 4/3 k^3",
    _form_q,
)
_register(
    [*_lapack("ormqr", "unmqr"), *_gpu("ormqr")],
    "Q times a matrix from k reflectors: 4mnk - 2nk^2",
    _apply_q,
)
_register(
    [*_lapack("gesdd", "gesvd"), *_gpu("gesvd", "gesdd", "gesvdj", "gesvdp")],
    "SVD: 4m^2n + 8mn^2 + 9n^3 with vectors, 4mn^2 - 4/3 n^3 without",
    _svd,
)
_register(
    [*_lapack("syevd", "heevd"), *_gpu("syevd", "syevj"), "Eigh"],
    "symmetric eigenvectors: 9 n^3",
    lambda op, m, n: 9 * n**3,
)
_register(
    [*_lapack("geev", "gees"), *_gpu("geev"), *(f"{v}hybrid_eig_{t}" for v in ("cu", "hip") for t in ("real", "comp"))],
    "eigenvectors or Schur form: 25 n^3",
    lambda op, m, n: 25 * n**3,
)
_register([*_lapack("gehrd")], "Hessenberg form: 10/3 n^3", lambda op, m, n: 10 * n**3 / 3)
_register([*_lapack("sytrd", "hetrd"), *_gpu("sytrd")], "tridiagonal form: 4/3 n^3", lambda op, m, n: 4 * n**3 / 3)
_register(
    [*_lapack("trsm"), "cublas_trsm_batched", "hipblas_trsm_batched"],
    "triangular solve: n^2 per right-hand side",
    lambda op, m, n: n * tensor(op.operand_types[1]).elements / max(tensor(op.operand_types[0]).elements / (n * n), 1),
)
_register([*_gpu("syrk")], "symmetric product: n(n+1)k", lambda op, m, n: m * (m + 1) * n)
_register(
    ["cu_cholesky_update_ffi", "hip_cholesky_update_ffi"],
    "rank-one update: 3 n^2",
    lambda op, m, n: 3 * n * n,
)


@register_work(
    *_lapack("gtsv"),
    "cusparse_gtsv2_ffi",
    "hipsparse_gtsv2_ffi",
    *(f"{vendor}sparse_gtsv2_{kind}" for vendor in ("cu", "hip") for kind in ("f32", "f64")),
    *(f"{vendor}_tridiagonal_solve_perturbed" for vendor in ("cu", "hip")),
    basis=Basis.FORMULA,
    notes="tridiagonal solve: 3 vector FLOP a row + 5 per right-hand side",
)
def tridiagonal_solve(op: Op, context: Context) -> OpWork:
    rows, sides = op.operand_types[0].elements, tensor(op.operand_types[3]).elements
    return OpWork(vector_flops=3 * rows + 5 * sides, klass=KernelClass.CUSTOM, basis=Basis.FORMULA)


@register_work(
    "cu_lu_pivots_to_permutation",
    "hip_lu_pivots_to_permutation",
    "LuPivotsToPermutation",
    klass=KernelClass.GATHER,
    notes="0 FLOP; swaps indices",
)
def pivots(op: Op, context: Context) -> OpWork:
    return OpWork(klass=KernelClass.GATHER)
