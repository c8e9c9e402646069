"""One layer of a topology: a convolution or a matrix product, as the array sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LayerKind = Literal["conv", "gemm"]


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution over an `ifmap_h` x `ifmap_w` x `channels` input, or a matrix product given as one.

    A matrix product of M x K by K x N is an M x K input, a 1 x K filter, one channel and N filters (SCALE-Sim's
    form). `batch`, `pad_*`, `dilation_*` and `groups` are read by the corrected mode only; `sparse_n`:`sparse_m` is
    SCALE-Sim's layer-wise sparsity (1:1 is dense). `where` names file and line for messages.
    """

    name: str
    ifmap_h: int
    ifmap_w: int
    filter_h: int
    filter_w: int
    channels: int
    filters: int
    stride_h: int = 1
    stride_w: int = 1
    kind: LayerKind = "conv"
    sparse_n: int = 1
    sparse_m: int = 1
    batch: int = 1
    pad_h: int = 0
    pad_w: int = 0
    dilation_h: int = 1
    dilation_w: int = 1
    groups: int = 1
    where: str = field(default="", compare=False)

    @classmethod
    def gemm(cls, name: str, m: int, n: int, k: int, *, batch: int = 1, where: str = "") -> Layer:
        """The layer of `batch` products of M x K by K x N."""
        return cls(name, m, k, 1, k, 1, n, kind="gemm", batch=batch, where=where)

    @property
    def out_h(self) -> int:
        """Output rows as SCALE-Sim counts them: partial windows at the border are kept."""
        return -(-(self.ifmap_h - self.filter_h + self.stride_h) // self.stride_h)

    @property
    def out_w(self) -> int:
        """Output columns as SCALE-Sim counts them."""
        return -(-(self.ifmap_w - self.filter_w + self.stride_w) // self.stride_w)

    @property
    def m(self) -> int:
        """Output pixels (rows of the im2col matrix)."""
        return self.out_h * self.out_w

    @property
    def n(self) -> int:
        """Filters (columns of the filter matrix)."""
        return self.filters

    @property
    def k(self) -> int:
        """Words of one filter window."""
        return self.filter_h * self.filter_w * self.channels

    @property
    def partial_windows(self) -> bool:
        """True when a border window reaches past the input."""
        return (self.out_h - 1) * self.stride_h + self.filter_h > self.ifmap_h or (
            self.out_w - 1
        ) * self.stride_w + self.filter_w > self.ifmap_w

    @property
    def shared_words(self) -> bool:
        """True when the im2col matrix holds an input word more than once, or blanks."""
        overlap_h = self.filter_h > self.stride_h and self.out_h > 1
        overlap_w = self.filter_w > self.stride_w and self.out_w > 1
        return overlap_h or overlap_w or self.partial_windows

    @property
    def whole_out_h(self) -> int:
        """Output rows with padding and dilation, whole windows only (as frameworks count)."""
        return (self.ifmap_h + 2 * self.pad_h - self.dilation_h * (self.filter_h - 1) - 1) // self.stride_h + 1

    @property
    def whole_out_w(self) -> int:
        """Output columns with padding and dilation, whole windows only."""
        return (self.ifmap_w + 2 * self.pad_w - self.dilation_w * (self.filter_w - 1) - 1) // self.stride_w + 1
