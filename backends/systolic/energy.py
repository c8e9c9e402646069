"""Energy of a layer from its words and multiply-adds, with a small table of energies per access.

Source of the table: M. Horowitz, "Computing's energy problem (and what we can do about it)", ISSCC 2014, 45 nm at
0.9 V: 8-bit multiply 0.2 pJ and add 0.03 pJ; 64 bits from an 8 kB, 32 kB and 1 MB cache 10, 20 and 100 pJ; 64 bits from
DRAM 1.3 to 2.6 nJ. A word is one byte. The SRAM energies are interpolated over size on logarithmic axes. The figures
serve to compare designs of that technology, not to predict a chip of another.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log

import numpy as np

from stablecast.backends.systolic.config import SystolicConfig
from stablecast.backends.systolic.corrected_layers import product_of
from stablecast.backends.systolic.layers import Layer
from stablecast.backends.systolic.records import LayerReport

_BYTES_PER_ACCESS = 8
_MAC_PJ = 0.2 + 0.03
_SRAM_KB = (8.0, 32.0, 1024.0)
_SRAM_PJ = (10.0, 20.0, 100.0)
_DRAM_PJ = (1300.0, 2600.0)


@dataclass(frozen=True, slots=True)
class Energy:
    """Picojoules of one layer; DRAM as the low and high end of the source's range."""

    compute_pj: float
    sram_pj: float
    dram_low_pj: float
    dram_high_pj: float

    @property
    def low_pj(self) -> float:
        """Sum with the low end of DRAM."""
        return self.compute_pj + self.sram_pj + self.dram_low_pj

    @property
    def high_pj(self) -> float:
        """Sum with the high end of DRAM."""
        return self.compute_pj + self.sram_pj + self.dram_high_pj


def sram_pj_per_word(kb: float) -> float:
    """Energy of one word from an SRAM of `kb` kB; the ends of the table's range hold beyond it."""
    logarithm = float(np.interp(log(kb), [log(size) for size in _SRAM_KB], [log(price) for price in _SRAM_PJ]))
    return exp(logarithm) / _BYTES_PER_ACCESS


def energy(layer: Layer, report: LayerReport, config: SystolicConfig) -> Energy:
    """Energy of `layer` with the traffic of `report`, its report under `config` (dense multiply-adds)."""
    m, n, k, times = product_of(layer)
    sram = (
        report.sram_ifmap.words * sram_pj_per_word(config.ifmap_kb)
        + report.sram_filter.words * sram_pj_per_word(config.filter_kb)
        + report.sram_ofmap.words * sram_pj_per_word(config.ofmap_kb)
    )
    words = report.dram_ifmap.words + report.dram_filter.words + report.dram_ofmap.words
    low, high = (words * price / _BYTES_PER_ACCESS for price in _DRAM_PJ)
    return Energy(m * n * k * times * _MAC_PJ, sram, low, high)
