"""What Shardy leaves out, by op: rules that return the ops to put in its place, or None where nothing is missing."""

from collections.abc import Callable, Mapping

from stablecast.ir.program import Op
from stablecast.lowering.partition.moves import concatenate, pad_rule, reverse, slice_rule
from stablecast.lowering.partition.opaque import custom_call
from stablecast.lowering.partition.ragged import ragged_dot, top_k
from stablecast.lowering.partition.site import Site
from stablecast.lowering.partition.windows import convolution, reduce_window, select_and_scatter

MODELS: Mapping[str, Callable[[Site], list[Op] | None]] = {
    "chlo.ragged_dot": ragged_dot,
    "chlo.top_k": top_k,
    "stablehlo.concatenate": concatenate,
    "stablehlo.convolution": convolution,
    "stablehlo.custom_call": custom_call,
    "stablehlo.pad": pad_rule,
    "stablehlo.reduce_window": reduce_window,
    "stablehlo.reverse": reverse,
    "stablehlo.select_and_scatter": select_and_scatter,
    "stablehlo.slice": slice_rule,
}
