"""Times of a kernel table by the chosen backends, with the analytical one where they do not reach."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stablecast.backends.analytical import uncovered_reasons
from stablecast.backends.device import Device
from stablecast.backends.estimates import Estimates
from stablecast.backends.registry import DEFAULT, Choice, get_backend
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelTable


@dataclass(frozen=True, slots=True)
class Priced:
    """Estimates of every row, the backend of each, and what these took for granted."""

    estimates: Estimates
    backend: npt.NDArray[np.str_]
    assumptions: tuple[str, ...]


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
    return Priced(Estimates(time, low, high, source, bound), owner, tuple(assumptions))


def _uncovered(table: KernelTable, device: Device) -> InputError:
    reasons = uncovered_reasons(table, device)
    kinds = ", ".join(sorted(set(map(str, table.klass))))
    return InputError("; ".join(reasons) or f"no backend prices kernels of class {kinds} on {device.name}")
