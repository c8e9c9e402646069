"""What the fusion rules need to know of each op: how it may share a kernel with its neighbours."""

from collections.abc import Mapping
from enum import IntEnum
from itertools import pairwise
from types import MappingProxyType

from stablecast.ir.program import Op
from stablecast.ir.types import TensorType


class Category(IntEnum):
    """How an op takes part in fusion.

    `FREE`: moves nothing, its result is its operand. `CONSTANT`: a literal. `GENERATOR`: cheap enough to be computed
    again in every kernel that reads it. `LOOP`: one result element from few operand elements. `REDUCE`: folds
    dimensions; producers fuse into it. `MATMUL`, `CONV`: library kernels with epilogues. `INPUT`: other kernels that
    producers fuse into. `HERO`: stands alone. `COLLECTIVE`, `CONTROL`, `CALL`, `FUSION` (one that the producer
    made): as named.
    """

    FREE = 0
    CONSTANT = 1
    GENERATOR = 2
    LOOP = 3
    REDUCE = 4
    MATMUL = 5
    CONV = 6
    INPUT = 7
    HERO = 8
    COLLECTIVE = 9
    CONTROL = 10
    CALL = 11
    FUSION = 12


def _names(dialect: str, *names: str) -> list[str]:
    return [f"{dialect}.{name}" for name in names]


_LOOP = _names(
    "stablehlo",
    *[
        "abs",
        "add",
        "and",
        "atan2",
        "cbrt",
        "ceil",
        "clamp",
        "compare",
        "complex",
        "concatenate",
        "convert",
        "cosine",
        "count_leading_zeros",
        "divide",
        "dynamic_slice",
        "exponential",
        "exponential_minus_one",
        "floor",
        "gather",
        "imag",
        "is_finite",
        "log",
        "log_plus_one",
        "logistic",
        "map",
        "maximum",
        "minimum",
        "multiply",
        "negate",
        "not",
        "or",
        "pad",
        "popcnt",
        "power",
        "real",
        "real_dynamic_slice",
        "reduce_precision",
        "remainder",
        "reverse",
        "round_nearest_afz",
        "round_nearest_even",
        "rsqrt",
        "select",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "sine",
        "slice",
        "sqrt",
        "subtract",
        "tan",
        "tanh",
        "transpose",
        "xor",
        "uniform_quantize",
        "uniform_dequantize",
        "torch_index_select",
        "dynamic_update_slice",
        "dynamic_pad",
        "dynamic_gather",
        "bitcast_convert",
    ],
) + _names(
    "chlo",
    *[
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan",
        "atanh",
        "bessel_i1e",
        "broadcast_add",
        "broadcast_and",
        "broadcast_atan2",
        "broadcast_compare",
        "broadcast_complex",
        "broadcast_divide",
        "broadcast_maximum",
        "broadcast_minimum",
        "broadcast_multiply",
        "broadcast_next_after",
        "broadcast_or",
        "broadcast_polygamma",
        "broadcast_power",
        "broadcast_remainder",
        "broadcast_select",
        "broadcast_shift_left",
        "broadcast_shift_right_arithmetic",
        "broadcast_shift_right_logical",
        "broadcast_subtract",
        "broadcast_xor",
        "broadcast_zeta",
        "conj",
        "cosh",
        "digamma",
        "erf",
        "erf_inv",
        "erfc",
        "is_inf",
        "is_neg_inf",
        "is_pos_inf",
        "lgamma",
        "next_after",
        "polygamma",
        "sinh",
        "square",
        "tan",
        "zeta",
        "_asin_acos_kernel",
    ],
)
_MHLO_LOOP = _names("mhlo", "copy", "erf", "domain")
_FREE = (
    _names("stablehlo", *["reshape", "optimization_barrier", "tuple", "get_tuple_element", "dynamic_reshape"])
    + _names("mhlo", "bitcast", "tuple", "get_tuple_element")
    + _names(
        "sdy",
        "sharding_constraint",
        "propagation_barrier",
        "sharding_group",
        "reshard",
        "all_slice",
        "func_data_flow_edge",
    )
)
_COLLECTIVE = _names(
    "stablehlo",
    *[
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "collective_permute",
        "collective_broadcast",
        "cross-replica-sum",
    ],
)

CATEGORIES: Mapping[str, Category] = MappingProxyType(
    dict.fromkeys(_LOOP + _MHLO_LOOP, Category.LOOP)
    | dict.fromkeys(_FREE, Category.FREE)
    | dict.fromkeys(_COLLECTIVE, Category.COLLECTIVE)
    | dict.fromkeys(
        _names("stablehlo", "iota", "broadcast_in_dim", "broadcast", "dynamic_broadcast_in_dim"), Category.GENERATOR
    )
    | dict.fromkeys(_names("stablehlo", "dynamic_iota", "partition_id", "replica_id"), Category.GENERATOR)
    | dict.fromkeys(("chlo.constant_like", "stablehlo.create_token", "stablehlo.after_all"), Category.CONSTANT)
    | dict.fromkeys(("stablehlo.constant", "mhlo.constant", "chlo.constant", "arith.constant"), Category.CONSTANT)
    | dict.fromkeys(("stablehlo.dot_general", "stablehlo.dot", "chlo.ragged_dot"), Category.MATMUL)
    | dict.fromkeys(("stablehlo.convolution", "stablehlo.dynamic_conv"), Category.CONV)
    | dict.fromkeys(("stablehlo.reduce_window", "stablehlo.scatter", "stablehlo.select_and_scatter"), Category.INPUT)
    | dict.fromkeys(("stablehlo.while", "stablehlo.case", "stablehlo.if"), Category.CONTROL)
    | dict.fromkeys(
        ("func.call", "stablehlo.composite", "sdy.named_computation", "sdy.manual_computation"), Category.CALL
    )
    | {"stablehlo.reduce": Category.REDUCE, "mhlo.fusion": Category.FUSION}
)

_ANNOTATIONS = frozenset(
    {
        "Sharding",
        "SPMDFullToShardShape",
        "SPMDShardToFullShape",
        "annotate_device_placement",
        "MoveToDevice",
        "MoveToHost",
    }
)
EXPENSIVE = frozenset(
    _names(
        "stablehlo",
        *[
            "exponential",
            "log",
            "tanh",
            "logistic",
            "power",
            "sine",
            "cosine",
            "tan",
            "atan2",
            "cbrt",
            "exponential_minus_one",
        ],
    )
    + _names("chlo", *["erf", "erfc", "erf_inv", "lgamma", "digamma", "tan", "bessel_i1e"])
)
"""Ops that a compiler does not compute twice to save traffic unless few kernels read them."""


def category(op: Op) -> Category:
    """The category of `op`; an op that is in no list stands alone."""
    found = CATEGORIES.get(op.name)
    if found is None and op.name.startswith("mhlo."):
        found = CATEGORIES.get("stablehlo." + op.name.removeprefix("mhlo."))
    if found is None:
        if op.name == "stablehlo.custom_call" and op.attrs.get("call_target_name") in _ANNOTATIONS:
            return Category.FREE
        return Category.HERO
    if found is Category.REDUCE and _keeps_elements(op):
        return Category.LOOP
    if found is Category.LOOP and op.name == "stablehlo.transpose" and _moves_only_unit_dims(op):
        return Category.FREE
    if found is Category.GENERATOR and op.operands and _same_elements(op):
        return Category.FREE
    return found


def _same_elements(op: Op) -> bool:
    return op.operand_types[0].nbytes == op.result_types[0].nbytes


def _keeps_elements(op: Op) -> bool:
    return op.operand_types[0].elements == op.result_types[0].elements


def _moves_only_unit_dims(op: Op) -> bool:
    kind = op.operand_types[0]
    if not isinstance(kind, TensorType):
        return False
    order = [dim for dim in op.attrs["permutation"] if kind.shape[dim] != 1]
    return order == sorted(order)


def swaps_two(op: Op) -> bool:
    """Whether a transpose swaps two neighbouring blocks of dimensions: a matrix product reads that by its strides.

    Blocks before them may stay as they are (a batch).
    """
    kind = op.operand_types[0]
    if not isinstance(kind, TensorType):
        return True
    order = [dim for dim in op.attrs["permutation"] if kind.shape[dim] != 1]
    runs = 1 + sum(after != before + 1 for before, after in pairwise(_ranked(order)))
    return runs <= 2 or (_ranked(order)[0] == 0 and runs <= 3)


def _ranked(order: list[int]) -> list[int]:
    places = {dim: place for place, dim in enumerate(sorted(order))}
    return [places[dim] for dim in order]
