"""Times of a kernel table by the chosen backends, with the analytical one where they do not reach."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stablecast.backends.analytical import uncovered_reasons
from stablecast.backends.device import Device
from stablecast.backends.estimates import Estimates, FloatArray
from stablecast.backends.registry import DEFAULT, Choice, get_backend
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelTable


@dataclass(frozen=True, slots=True)
class Priced:
    """Estimates of every row, the backend of each, and what these took for granted.

    `detail`: further columns that backends with a method `detail(kernels, device)` give, NaN where a row has none.
    """

    estimates: Estimates
    backend: npt.NDArray[np.str_]
    assumptions: tuple[str, ...]
    detail: Mapping[str, FloatArray] = field(default_factory=dict[str, FloatArray])

    def detail_of(self, row: int) -> dict[str, float]:
        """The further columns that row `row` has."""
        return {name: float(values[row]) for name, values in self.detail.items() if np.isfinite(values[row])}


def price(table: KernelTable, device: Device, choice: Choice) -> Priced:
    """Times of every row of `table` on `device`.

    Rows that the chosen backend does not cover fall to the analytical one. Raises `InputError` where no backend has a
    time for a row, naming the device and what it lacks.
    """
    owner = np.array([choice.name_for(klass) for klass in table.klass], dtype="<U64")
    for name in choice.names:
        mask = owner == name
        if name != DEFAULT and mask.any():
            index = np.nonzero(mask)[0]
            covered = get_backend(name).covers(table.select(mask), device)
            owner[index[~covered]] = DEFAULT
    rows = len(table)
    time, low, high = np.zeros(rows), np.zeros(rows), np.zeros(rows)
    source, bound = np.full(rows, "", dtype="<U16"), np.full(rows, "", dtype="<U16")
    assumptions: list[str] = []
    detail: dict[str, FloatArray] = {}
    for name in dict.fromkeys(map(str, owner)):
        mask = owner == name
        part = table if mask.all() else table.select(mask)
        backend = get_backend(name)
        if name == DEFAULT and not backend.covers(part, device).all():
            raise _uncovered(part, device)
        estimates = backend.estimate(part, device)
        time[mask], low[mask], high[mask] = estimates.time_s, estimates.low_s, estimates.high_s
        source[mask], bound[mask] = estimates.source, estimates.bound
        assumptions += backend.assumptions(device)
        describe: Callable[[KernelTable, Device], Mapping[str, FloatArray]] | None = getattr(backend, "detail", None)
        if describe is not None:
            for column, values in describe(part, device).items():
                detail.setdefault(column, np.full(rows, np.nan))[mask] = values
    return Priced(Estimates(time, low, high, source, bound), owner, tuple(assumptions), detail)


def _uncovered(table: KernelTable, device: Device) -> InputError:
    reasons = uncovered_reasons(table, device)
    kinds = ", ".join(sorted(set(map(str, table.klass))))
    return InputError("; ".join(reasons) or f"no backend prices kernels of class {kinds} on {device.name}")
