"""Elementwise ops: one vector FLOP, or one transcendental, per element of the result.

Which ops are transcendental follows XLA's own cost analysis (openxla, HloCostAnalysis::HandleElementwiseOp), extended
to the CHLO functions that expand to polynomials. Complex elements count their real operations.
"""

from stablecast.ir.accounting.context import Context, reads_of, tensor, writes_of
from stablecast.ir.accounting.registry import Rule, hlo, rule
from stablecast.ir.accounting.values import Basis, OpWork
from stablecast.ir.dtypes import DTypeKind
from stablecast.ir.kernels import KernelClass
from stablecast.ir.program import Op

_ARITHMETIC = (
    "abs",
    "add",
    "and",
    "ceil",
    "clamp",
    "compare",
    "count_leading_zeros",
    "divide",
    "floor",
    "is_finite",
    "maximum",
    "minimum",
    "multiply",
    "negate",
    "not",
    "or",
    "popcnt",
    "reduce_precision",
    "remainder",
    "round_nearest_afz",
    "round_nearest_even",
    "select",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
    "sign",
    "subtract",
    "xor",
)
_TRANSCENDENTAL = (
    "atan2",
    "cbrt",
    "cosine",
    "exponential",
    "exponential_minus_one",
    "log",
    "log_plus_one",
    "logistic",
    "power",
    "rsqrt",
    "sine",
    "sqrt",
    "tan",
    "tanh",
)
_MHLO_TRANSCENDENTAL = ("acos", "acosh", "asin", "asinh", "atanh", "cosh", "erf", "sinh")
_CHLO_ARITHMETIC = (
    "broadcast_add",
    "broadcast_and",
    "broadcast_compare",
    "broadcast_divide",
    "broadcast_maximum",
    "broadcast_minimum",
    "broadcast_multiply",
    "broadcast_next_after",
    "broadcast_or",
    "broadcast_remainder",
    "broadcast_select",
    "broadcast_shift_left",
    "broadcast_shift_right_arithmetic",
    "broadcast_shift_right_logical",
    "broadcast_subtract",
    "broadcast_xor",
    "conj",
    "is_inf",
    "is_neg_inf",
    "is_pos_inf",
    "mulhi",
    "next_after",
    "square",
)
_CHLO_TRANSCENDENTAL = (
    "_asin_acos_kernel",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "bessel_i1e",
    "broadcast_atan2",
    "broadcast_polygamma",
    "broadcast_power",
    "broadcast_zeta",
    "cosh",
    "digamma",
    "erf",
    "erf_inv",
    "erfc",
    "lgamma",
    "polygamma",
    "sinh",
    "tan",
    "zeta",
)
_COMPLEX_FLOPS = {"multiply": 6, "divide": 11, "abs": 3, "square": 6}
"""Real FLOPs of one complex element: (a+bi)(c+di) = 4 products, 2 sums; a quotient adds |d|^2 and two divisions."""

_COMPLEX_TRANSCENDENTALS = {"abs": 1}


def _suffix(op: Op) -> str:
    return op.name.split(".", 1)[1].removeprefix("broadcast_")


def _is_complex(op: Op) -> bool:
    return any(tensor(kind).dtype.kind is DTypeKind.COMPLEX for kind in op.operand_types)


@rule(
    *hlo(*_ARITHMETIC),
    "mhlo.mulhi",
    *(f"chlo.{name}" for name in _CHLO_ARITHMETIC),
    control=True,
    notes="1 FLOP per element of the result; complex: 2 (multiply 6, divide 11, abs 3 + 1 transcendental)",
)
def arithmetic(op: Op, context: Context) -> OpWork:
    """One vector FLOP per element, integers and booleans included."""
    elements = op.result_type.elements
    if not _is_complex(op):
        return OpWork(vector_flops=elements, reads=reads_of(op), writes=writes_of(op))
    name = _suffix(op)
    return OpWork(
        vector_flops=elements * _COMPLEX_FLOPS.get(name, 2),
        transcendentals=elements * _COMPLEX_TRANSCENDENTALS.get(name, 0),
        reads=reads_of(op),
        writes=writes_of(op),
    )


@rule(
    *hlo(*_TRANSCENDENTAL),
    *(f"mhlo.{name}" for name in _MHLO_TRANSCENDENTAL),
    *(f"chlo.{name}" for name in _CHLO_TRANSCENDENTAL),
    control=True,
    notes="1 transcendental per element of the result; complex: 3",
)
def transcendental(op: Op, context: Context) -> OpWork:
    """One transcendental per element; a complex one is made of about three real ones (exp, sin, cos)."""
    each = 3 if _is_complex(op) else 1
    return OpWork(transcendentals=op.result_type.elements * each, reads=reads_of(op), writes=writes_of(op))


@rule(
    *hlo("convert", "complex", "real", "imag"),
    "chlo.broadcast_complex",
    control=True,
    notes="0 FLOP; every operand and result once",
)
def conversion(op: Op, context: Context) -> OpWork:
    """Elementwise, but no arithmetic: only bytes."""
    return OpWork(reads=reads_of(op), writes=writes_of(op))


@rule(*hlo("uniform_quantize"), notes="4 FLOP per element: scale, shift, round, clamp")
def quantize(op: Op, context: Context) -> OpWork:
    return OpWork(vector_flops=4 * op.result_type.elements, reads=reads_of(op), writes=writes_of(op))


@rule(*hlo("uniform_dequantize"), notes="2 FLOP per element: shift, scale")
def dequantize(op: Op, context: Context) -> OpWork:
    return OpWork(vector_flops=2 * op.result_type.elements, reads=reads_of(op), writes=writes_of(op))


@rule("mhlo.stochastic_convert", notes="3 FLOP per element: add the random bits, mask, convert")
def stochastic_convert(op: Op, context: Context) -> OpWork:
    return OpWork(vector_flops=3 * op.result_type.elements, reads=reads_of(op), writes=writes_of(op))


def _per_element(flops: float, per_feature: float) -> Rule:
    def work(op: Op, context: Context) -> OpWork:
        features = op.operand_types[1].elements
        return OpWork(
            vector_flops=flops * op.operand_types[0].elements,
            transcendentals=per_feature * features,
            reads=reads_of(op),
            writes=writes_of(op),
            klass=KernelClass.REDUCTION,
            basis=Basis.FORMULA,
        )

    return work


rule(
    *hlo("batch_norm_inference"),
    basis=Basis.FORMULA,
    notes="4 FLOP per element (subtract, scale twice, add), 1 rsqrt per feature",
)(_per_element(4, 1))
rule(
    *hlo("batch_norm_training"),
    klass=KernelClass.REDUCTION,
    basis=Basis.FORMULA,
    notes="8 FLOP per element (mean 1, variance 3, normalise 4), 1 rsqrt per feature",
)(_per_element(8, 1))
rule(
    *hlo("batch_norm_grad"),
    klass=KernelClass.REDUCTION,
    basis=Basis.FORMULA,
    notes="12 FLOP per element (normalise 2, two sums 3, gradient 7), 1 rsqrt per feature",
)(_per_element(12, 1))
