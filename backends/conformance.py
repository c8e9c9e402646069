"""The conformance suite that any backend can be held against: `check_backend(MyBackend())`.

Plugin authors call it from a test of their own:

    from stablecast.backends.conformance import check_backend

    def test_conforms():
        assert check_backend(MyBackend()) == []
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from stablecast.backends.catalogue import Catalogue
from stablecast.backends.device import Device
from stablecast.backends.estimates import Backend, Estimates, Source
from stablecast.backends.kernel_specs import kernel_row
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelClass, KernelRow, KernelTable

DEVICES = ("a100-sxm-80gb", "h100-sxm", "mi300x", "tpu-v5p", "v100-sxm2", "cpu")
_BOUNDS = frozenset({"compute", "memory", "launch", "unknown"})
_LADDER = (256, 1024, 4096)


def sample_rows(device: Device) -> list[KernelRow]:
    """Kernels of every class that can be asked for by sizes, small to large, in element types that `device` knows."""
    rows: list[KernelRow] = []
    for dtype in ("f32", "bf16"):
        for kind, sizes in _ladder():
            try:
                rows.append(kernel_row(kind, device, dtype, **sizes))
            except InputError:
                continue
    for klass in (KernelClass.COPY, KernelClass.GATHER, KernelClass.SORT, KernelClass.CUSTOM):
        rows += [
            KernelRow(
                klass=klass,
                in_dtype="f32",
                out_dtype="f32",
                elems=size,
                inputs=1,
                bytes_read=4.0 * size,
                bytes_written=4.0 * size,
            )
            for size in (2**10, 2**16, 2**24)
        ]
    return rows


def _ladder() -> Iterator[tuple[str, dict[str, int | str]]]:
    for size in _LADDER:
        yield "matmul", {"m": size, "n": size, "k": size}
        yield "elementwise", {"m": size, "n": size}
        yield "reduce", {"m": size, "n": size}
        yield "softmax", {"m": size, "n": size}
        yield "layernorm", {"m": size, "n": size}


def check_backend(backend: Backend, devices: Sequence[str] = DEVICES) -> list[str]:
    """What `backend` does wrong on `devices`, one sentence each; empty if it conforms."""
    faults: list[str] = []
    if not isinstance(backend, Backend):
        return ["it lacks one of name, covers, estimate and assumptions"]
    if not backend.name or not backend.name.isidentifier():
        faults.append(f"its name '{backend.name}' is not an identifier")
    catalogue = Catalogue()
    for name in devices:
        device = catalogue.device(name)
        faults += [f"{name}: {fault}" for fault in _check_device(backend, device)]
    return faults


def _check_device(backend: Backend, device: Device) -> list[str]:
    table = KernelTable.of(sample_rows(device))
    covered = backend.covers(table, device)
    if covered.dtype != np.bool_ or covered.shape != (len(table),):
        return [f"covers gives {covered.dtype}{list(covered.shape)}, not bool[{len(table)}]"]
    table = table.select(covered)
    if not len(table):
        return []
    estimates = backend.estimate(table, device)
    faults = _check_estimates(estimates, len(table))
    if faults:
        return faults
    if not all(isinstance(text, str) and text for text in backend.assumptions(device)):
        faults.append("its assumptions are not sentences")
    return faults + _check_consistency(backend, device, table, estimates)


def _check_estimates(estimates: Estimates, rows: int) -> list[str]:
    faults: list[str] = []
    for label in ("time_s", "low_s", "high_s"):
        values = getattr(estimates, label)
        if values.shape != (rows,):
            return [f"{label} has shape {list(values.shape)}, not [{rows}]"]
        if not np.isfinite(values).all() or (values <= 0).any():
            faults.append(f"{label} is not positive and finite everywhere")
    if not faults and ((estimates.low_s > estimates.time_s) | (estimates.time_s > estimates.high_s)).any():
        faults.append("low_s <= time_s <= high_s does not hold everywhere")
    unknown = set(map(str, estimates.source)) - set(Source)
    if unknown:
        faults.append(f"its sources {sorted(unknown)} are not in Source")
    odd = set(map(str, estimates.bound)) - _BOUNDS
    if odd:
        faults.append(f"its bounds {sorted(odd)} are not among {sorted(_BOUNDS)}")
    return faults


def _check_consistency(backend: Backend, device: Device, table: KernelTable, estimates: Estimates) -> list[str]:
    faults: list[str] = []
    again = backend.estimate(table, device)
    if not np.array_equal(again.time_s, estimates.time_s):
        faults.append("the same table gives other times the second time")
    backwards = KernelTable.of(table.rows[::-1])
    if not np.allclose(backend.estimate(backwards, device).time_s[::-1], estimates.time_s, rtol=1e-9):
        faults.append("a row's time depends on the rows beside it")
    doubled = KernelTable.of([_doubled(row) for row in table.rows])
    slower = backend.covers(doubled, device)
    larger = backend.estimate(doubled.select(slower), device).time_s
    if (larger < estimates.time_s[slower] * 0.999).any():
        faults.append("a kernel of twice the batch is faster")
    fast = np.array([row.matmul_flops - row.padded_flops for row in table.rows])
    peaks = np.array([_peak(device, row.math) for row in table.rows])
    if (fast / peaks > estimates.time_s * 1.001).any():
        faults.append("a product is faster than the device's peak allows")
    return faults


def _doubled(row: KernelRow) -> KernelRow:
    return replace(
        row,
        batch=row.batch * 2,
        elems=row.elems * 2,
        matmul_flops=row.matmul_flops * 2,
        padded_flops=row.padded_flops * 2,
        vector_flops=row.vector_flops * 2,
        transcendentals=row.transcendentals * 2,
        bytes_read=row.bytes_read * 2,
        bytes_written=row.bytes_written * 2,
    )


def _peak(device: Device, math: str) -> float:
    try:
        return device.matmul_rate(math).value
    except InputError:
        return float("inf")
