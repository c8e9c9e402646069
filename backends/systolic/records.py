"""What a run says about one layer, under the names of SCALE-Sim's three reports."""

from __future__ import annotations

from dataclasses import dataclass

from stablecast.backends.systolic.calc_reads import DramStream


@dataclass(frozen=True, slots=True)
class SramStream:
    """First and last cycle and number of words of one operand between SRAM and array."""

    start: int
    stop: int
    words: float


@dataclass(frozen=True, slots=True)
class SparseStorage:
    """Words of the dense filter, of the compressed filter with metadata, and of the metadata alone."""

    original: int
    new: float
    metadata: float


@dataclass(frozen=True, slots=True)
class LayerReport:
    """Reports of one layer: cycles, utilisations in percent, bandwidths in words per cycle, traffic in words.

    `overall_cycles` is SCALE-Sim's "Total Cycles (incl. prefetch)"; `total_cycles` includes `stall_cycles`.
    """

    name: str
    overall_cycles: int
    total_cycles: int
    stall_cycles: int
    overall_util: float
    mapping_eff: float
    compute_util: float
    sram_ifmap: SramStream
    sram_filter: SramStream
    sram_ofmap: SramStream
    dram_ifmap: DramStream
    dram_filter: DramStream
    dram_ofmap: DramStream
    sparse: SparseStorage | None = None

    @property
    def metadata_bandwidth(self) -> float:
        """Average filter metadata read from SRAM, words per cycle."""
        return 0.0 if self.sparse is None else self.sparse.metadata / self.total_cycles

    def sram_bandwidths(self) -> tuple[float, float, float]:
        """Average words per cycle of ifmap, filter and ofmap SRAM."""
        cycles = self.total_cycles
        return self.sram_ifmap.words / cycles, self.sram_filter.words / cycles, self.sram_ofmap.words / cycles

    def dram_bandwidths(self) -> tuple[float, float, float]:
        """Average words per cycle of ifmap, filter and ofmap DRAM traffic, each over its own span."""
        return _bandwidth(self.dram_ifmap), _bandwidth(self.dram_filter), _bandwidth(self.dram_ofmap)


def _bandwidth(stream: DramStream) -> float:
    return stream.words / (stream.stop - stream.start + 1)
