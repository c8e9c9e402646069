"""Sustained shares from training tables, and the rule for devices without any: fitted with one chip left out at a time.

A share is what makes the base's median over a device's largest products (or streams) equal to the measured one. Of the
forms of `rates.Rule` the one that predicted left-out chips best was taken and frozen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from stablecast.backends.device import Device
from stablecast.backends.learned import frame
from stablecast.backends.learned.fitting import Measured
from stablecast.backends.learned.rates import (
    MEMORY,
    Anchor,
    Rates,
    Rule,
    Share,
    chip_of,
    density_of,
    lanes_of,
    memory_of,
    process_of,
)

EXPONENTS: Final = (0.0, 1 / 3, 0.5, 2 / 3, 1.0)
FROZEN: Final = (1 / 3, True)
"""Exponent and `by_lanes` of the rule, frozen before any test table was scored; training compares, but keeps it."""

_SHARE_MAX: Final = 1.0
_START: Final = 0.8
_ROWS_MIN: Final = 8
_LARGE_PRODUCT: Final = 30.0
_COMPUTE_BOUND: Final = 3.0
_LARGE_STREAM: Final = 8.0


@dataclass(frozen=True, slots=True)
class Observation:
    """One device's measured share in one family."""

    device: Device
    family: str
    share: float
    table: str
    rows: int

    @property
    def chip(self) -> str:
        return chip_of(self.device.name)


def observe(data: Measured, family: str) -> Observation | None:
    """The share that the largest rows of a table sustain; `family`: of products, or `memory` for streams.

    None where too few rows are large enough to tell.
    """
    start = Rates({family: Share(_START, "", True)}, data.rates.base)
    base = frame.base_of(data.kernels, data.device, start)
    own = np.maximum(data.measured_s - data.extra_s, 1e-9)
    if family == MEMORY:
        cache = data.device.l2_bytes.value if data.device.l2_bytes else 1e7
        large = base.rows.nbytes > _LARGE_STREAM * cache
    else:
        large = (base.compute_s > _COMPUTE_BOUND * base.memory_s) & (base.core_s > _LARGE_PRODUCT * base.launch_s)
    if large.sum() < _ROWS_MIN:
        return None
    share = _START * float(np.median((base.launch_s + base.core_s)[large] / own[large]))
    return Observation(data.device, family, min(share, _SHARE_MAX), data.table, int(large.sum()))


def pooled(found: Sequence[Observation]) -> dict[tuple[str, str], Observation]:
    """One observation a device and family: the table with most large rows speaks."""
    best: dict[tuple[str, str], Observation] = {}
    for one in found:
        key = (one.device.name, one.family)
        if key not in best or one.rows > best[key].rows:
            best[key] = one
    return best


def make_rule(observations: Sequence[Observation], exponent: float, by_lanes: bool = True) -> Rule:
    """The rule whose anchors are the measured GPUs."""
    anchors = tuple(
        Anchor(
            one.family,
            round(one.share, 4),
            one.device.name,
            one.chip,
            one.device.vendor,
            process_of(one.device),
            lanes_of(one.device),
            density_of(one.device, one.family) if one.family != MEMORY else None,
            density_of(one.device, "fp32"),
            memory_of(one.device) if one.family == MEMORY else "",
        )
        for one in sorted(observations, key=lambda one: (one.family, one.device.name))
        if one.device.kind == "gpu"
    )
    return Rule(anchors, exponent, by_lanes)


def chip_errors(observations: Sequence[Observation], exponent: float, by_lanes: bool) -> dict[tuple[str, str], float]:
    """|log(ruled / measured)| of every GPU and family, the rule made without its chip."""
    found: dict[tuple[str, str], float] = {}
    for chip in sorted({one.chip for one in observations}):
        rule = make_rule([one for one in observations if one.chip != chip], exponent, by_lanes)
        for one in observations:
            ruled = rule.share(one.device, one.family) if one.chip == chip and one.family != MEMORY else None
            if ruled is not None:
                found[one.device.name, one.family] = float(abs(np.log(ruled / one.share)))
    return found


def rule_and_errors(observations: Sequence[Observation]) -> tuple[Rule, Mapping[str, float]]:
    """The frozen rule on these observations, and the mean error over left-out chips of every form that was compared.

    Every chip and family counts once.
    """
    errors: dict[str, float] = {}
    chips = {one.device.name: one.chip for one in observations}
    for exponent, by_lanes in ((exponent, by_lanes) for exponent in EXPONENTS for by_lanes in (True, False)):
        by_chip: dict[tuple[str, str], list[float]] = {}
        for (device, family), error in chip_errors(observations, exponent, by_lanes).items():
            by_chip.setdefault((chips[device], family), []).append(error)
        name = f"exponent {exponent:.3f}{', by lanes' if by_lanes else ''}"
        errors[name] = float(np.mean([np.mean(values) for values in by_chip.values()])) if by_chip else 0.0
    errors["memory, by its kind"] = _memory_error(observations)
    return make_rule(observations, *FROZEN), errors


def _memory_error(observations: Sequence[Observation]) -> float:
    """The mean |log(ruled / measured)| of memory shares over left-out chips."""
    found: dict[str, list[float]] = {}
    own = [one for one in observations if one.family == MEMORY and one.device.kind == "gpu"]
    for one in own:
        ruled = make_rule([other for other in own if other.chip != one.chip], *FROZEN).memory_share(one.device)
        if ruled is not None:
            found.setdefault(one.chip, []).append(float(abs(np.log(ruled / one.share))))
    return float(np.mean([np.mean(values) for values in found.values()])) if found else 0.0
