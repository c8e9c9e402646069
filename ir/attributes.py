"""Decoded attributes of ops that have structure: dimension numbers, windows, custom calls."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class DotDims:
    """Dimension numbers of `dot_general`: indices of operand dimensions."""

    lhs_batch: tuple[int, ...]
    rhs_batch: tuple[int, ...]
    lhs_contracting: tuple[int, ...]
    rhs_contracting: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ConvDims:
    """Dimension numbers of `convolution`: indices of dimensions of input, kernel and output."""

    input_batch: int
    input_feature: int
    input_spatial: tuple[int, ...]
    kernel_input_feature: int
    kernel_output_feature: int
    kernel_spatial: tuple[int, ...]
    output_batch: int
    output_feature: int
    output_spatial: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GatherDims:
    """Dimension numbers of `gather` (and `dynamic_gather`)."""

    offset_dims: tuple[int, ...]
    collapsed_slice_dims: tuple[int, ...]
    operand_batching_dims: tuple[int, ...]
    start_indices_batching_dims: tuple[int, ...]
    start_index_map: tuple[int, ...]
    index_vector_dim: int


@dataclass(frozen=True, slots=True)
class ScatterDims:
    """Dimension numbers of `scatter`."""

    update_window_dims: tuple[int, ...]
    inserted_window_dims: tuple[int, ...]
    input_batching_dims: tuple[int, ...]
    scatter_indices_batching_dims: tuple[int, ...]
    scatter_dims_to_operand_dims: tuple[int, ...]
    index_vector_dim: int


@dataclass(frozen=True, slots=True)
class RaggedDotDims:
    """Dimension numbers of `chlo.ragged_dot`."""

    dot: DotDims
    lhs_ragged: tuple[int, ...]
    rhs_group: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dense:
    """A constant's elements: `values` for a splat (one) or a small tensor (all, row-major), None if large."""

    values: tuple[Any, ...] | None
    splat: bool

    @property
    def scalar(self) -> Any:
        """The value that every element has, None where they differ or are unknown."""
        return self.values[0] if self.splat and self.values else None


@dataclass(frozen=True, slots=True)
class Opaque:
    """An attribute that no rule needs: its type name, kept so that nothing is lost silently."""

    kind: str


@dataclass(frozen=True, slots=True)
class CustomCall:
    """Target and configuration of a custom call. `config`: backend configuration as text or by key."""

    target: str
    config: str = ""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Shift:
    """A permutation that sends every shard `by` places along a mesh axis; `cyclic` where the ends meet."""

    axis: str
    by: int
    cyclic: bool
