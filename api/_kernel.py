"""Times of single kernels given by their sizes."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stablecast.backends.catalogue import Catalogue
from stablecast.backends.device import Device
from stablecast.backends.kernel_specs import kernel_row, size_names
from stablecast.backends.pricing import price
from stablecast.backends.registry import parse_choice
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelRow, KernelTable
from stablecast.ir.text import seconds, time_range

_RESULTS = ("time_s", "low_s", "high_s", "basis")


@dataclass(frozen=True, slots=True)
class KernelAnswer:
    """Seconds of one kernel, where they come from, what limits it, and what its backend says beside (`detail`)."""

    time_s: float
    low_s: float
    high_s: float
    basis: str
    bound: str
    shape: str
    device: str
    detail: Mapping[str, float] = field(default_factory=dict[str, float])

    def to_dict(self) -> dict[str, Any]:
        extra = {"detail": dict(self.detail)} if self.detail else {}
        return {
            "schema": 1,
            "time_s": self.time_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "basis": self.basis,
            "bound": self.bound,
            "shape": self.shape,
            "device": self.device,
            **extra,
        }

    def __str__(self) -> str:
        spread = f"range {time_range(self.low_s, self.high_s)}"
        origin = f"{spread}; {self.basis}, bound by {self.bound}"
        return f"{self.shape} on {self.device}: {seconds(self.time_s)}  ({origin})"


def parse_sizes(arguments: Sequence[str]) -> dict[str, int | str]:
    """`--m 4096 --n=512 --causal` as sizes; a flag without a value is 1. Raises `InputError` for anything else."""
    sizes: dict[str, int | str] = {}
    position = 0
    while position < len(arguments):
        word = arguments[position]
        if not word.startswith("--"):
            raise InputError(f"'{word}' is not an option", "write sizes as --m 4096")
        name, equals, value = word[2:].partition("=")
        position += 1
        if not equals and position < len(arguments) and not arguments[position].startswith("--"):
            value = arguments[position]
            position += 1
        sizes[name.replace("-", "_")] = _size(name, value or "1")
    return sizes


def _size(name: str, text: str) -> int | str:
    cleaned = text.replace("_", "").replace(",", "")
    if cleaned.isdigit():
        return int(cleaned)
    if text.replace("-", "").isalpha() or text.isidentifier():
        return text
    raise InputError(f"size {name} is '{text}'", "sizes are whole numbers from 1 up")


def kernel_time(
    kind: str,
    sizes: Mapping[str, int | str],
    on: str,
    dtype: str,
    backend: str,
    catalogue: Catalogue | None = None,
) -> KernelAnswer:
    """The time of one kernel of `kind` on device `on` of `catalogue`, by default the installed one.

    Raises `InputError` for wrong names and sizes.
    """
    device = (catalogue or Catalogue()).resolve(on).device
    row = kernel_row(kind, device, dtype, **sizes)
    priced = price(KernelTable.of([row]), device, parse_choice(backend))
    estimates = priced.estimates
    return KernelAnswer(
        float(estimates.time_s[0]),
        float(estimates.low_s[0]),
        float(estimates.high_s[0]),
        str(estimates.source[0]),
        str(estimates.bound[0]),
        f"{kind} {row.shape}",
        device.name,
        priced.detail_of(0),
    )


def kernel_table(path: Path, kind: str, on: str, dtype: str, backend: str, catalogue: Catalogue | None = None) -> str:
    """The CSV at `path` with `time_s`, `low_s`, `high_s` and `basis` beside each row.

    Columns: `kind` or `op` (else `kind` for all), `dtype` (else `dtype`), and the sizes; empty cells are left out.
    Other columns are carried along if they are no size of the kernel. Raises `InputError` naming file and line.
    """
    device = (catalogue or Catalogue()).resolve(on).device
    records, columns = _records(path)
    rows: list[KernelRow] = []
    for line, record in enumerate(records, 2):
        rows.append(_row(record, device, kind, dtype, f"{path}, line {line}"))
    estimates = price(KernelTable.of(rows), device, parse_choice(backend)).estimates
    out = io.StringIO()
    writer = csv.DictWriter(out, [*columns, *(name for name in _RESULTS if name not in columns)], lineterminator="\n")
    writer.writeheader()
    results = zip(
        estimates.time_s.tolist(), estimates.low_s.tolist(), estimates.high_s.tolist(), estimates.source, strict=True
    )
    writer.writerows(
        {**record, **dict(zip(_RESULTS, result, strict=True))} for record, result in zip(records, results, strict=True)
    )
    return out.getvalue()


def _records(path: Path) -> tuple[list[dict[str, str]], list[str]]:
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            reader = csv.DictReader(lines)
            records = list(reader)
            columns = list(reader.fieldnames or ())
    except FileNotFoundError:
        raise InputError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    if not records:
        raise InputError(f"{path} has no rows", "the first line names the columns: kind,m,n,k,dtype")
    return records, columns


def _row(record: Mapping[str, str | None], device: Device, kind: str, dtype: str, where: str) -> KernelRow:
    chosen = record.get("kind") or record.get("op") or kind
    if not chosen:
        raise InputError(
            f"{where} says no kind of kernel", "add a column kind, or name it: stablecast kernel matmul --table"
        )
    try:
        _, known = size_names(chosen)
        sizes = {name: value for name, value in record.items() if name in known and value}
        return kernel_row(chosen, device, record.get("dtype") or dtype, **{k: _size(k, v) for k, v in sizes.items()})
    except InputError as error:
        raise InputError(f"{where}: {error.message}", error.hint) from None
