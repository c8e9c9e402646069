"""Several ranks of one run on one clock."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stablecast.ir.errors import InputError
from stablecast.validation.collectives import MeasuredCollective, collectives
from stablecast.validation.measured import MeasuredRun

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AlignedRanks:
    """Ranks of a run whose clocks are laid on that of the first.

    `offset_s[r]` is added to the times of run r. `spread_s`: how far apart the ends of one collective still are over
    all ranks, median. `wait_s[r]`: mean time a collective of rank r takes beyond the shortest of all ranks: what it
    waits for later ones. `matched`: collectives used.
    """

    runs: tuple[MeasuredRun, ...]
    offset_s: FloatArray
    spread_s: float
    wait_s: FloatArray
    matched: int

    @property
    def step_s(self) -> float:
        """The mean step of the slowest rank."""
        return max(run.mean_step_s for run in self.runs)


def align(runs: Sequence[MeasuredRun]) -> AlignedRanks:
    """Lay the ranks on one clock: a collective ends at the same time on all of them.

    Raises `InputError` for no run, or where the ranks have no like sequence of collectives.
    """
    if not runs:
        raise InputError("no rank to align")
    seen = [[entry for entry in collectives(run) if entry.step >= 0] for run in runs]
    common = _common(seen)
    if len(runs) > 1 and not common:
        raise InputError("the ranks have no collectives in common", "give traces of the same steps of one run")
    ends = np.array([[rank[index].start_s + rank[index].duration_s for index in range(common)] for rank in seen])
    times = np.array([[rank[index].duration_s for index in range(common)] for rank in seen])
    offset = np.median(ends[:1] - ends, axis=1) if common else np.zeros(len(runs))
    aligned = ends + offset[:, None]
    spread = float(np.median(aligned.max(axis=0) - aligned.min(axis=0))) if common else 0.0
    wait = (times - times.min(axis=0)).mean(axis=1) if common else np.zeros(len(runs))
    return AlignedRanks(tuple(runs), offset, spread, wait, common)


def waits_s(runs: Sequence[MeasuredRun], chosen: MeasuredRun) -> Mapping[int, float]:
    """By position of a collective in `chosen`, how long it waited for other ranks, seconds.

    The rank that comes last does not wait: what its collective takes, the shortest of all ranks, is its own time.
    """
    if len(runs) < 2:
        return {}
    seen = [[entry for entry in collectives(run) if entry.step >= 0] for run in runs]
    common = _common(seen)
    own = seen[[run is chosen for run in runs].index(True)]
    return {
        own[index].position: own[index].duration_s - min(rank[index].duration_s for rank in seen)
        for index in range(common)
    }


def _common(seen: Sequence[Sequence[MeasuredCollective]]) -> int:
    """Length of the common beginning of the sequences of kinds."""
    size = min(len(rank) for rank in seen)
    for index in range(size):
        if len({rank[index].kind for rank in seen}) > 1:
            return index
    return size
