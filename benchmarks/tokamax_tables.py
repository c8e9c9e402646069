"""Kernel times on TPUs that the Tokamax package carries, as two tables that `fit_analytical.py` reads.

    pip download --no-deps --python-version 3.12 --only-binary=:all: tokamax==0.0.17
    unzip tokamax-0.0.17-py3-none-any.whl -d FOLDER
    python benchmarks/tokamax_tables.py FOLDER

Tokamax (Google, Apache-2.0) is a library of Pallas kernels; `tokamax/data/autotuning/DEVICE/KERNEL.json` has, by the
arguments of a call, the configuration that was found to be the fastest and five times of it. Kept is their median, of
bf16 operands, without dropout, soft caps, biases and pages. A device is what JAX calls one: half of a v7x chip.
"""

import csv
import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

TABLES: Final = Path(__file__).parent / "tables"
_DEVICES: Final = {"tpu7x": "tpu-v7x", "tpu_v6_lite": "tpu-v6e", "tpu_v5": "tpu-v5p"}
_ATTENTION: Final = ("pallas_mosaic_tpu_flash_attention", "pallas_mosaic_tpu_splash_attention")
_GROUPED: Final = ("pallas_mosaic_tpu_ragged_dot", "pallas_mosaic_tpu_v2_ragged_dot")
_WAYS: Final = {"[[1], [1]]": "fwd", "[[1], [2]]": "dgrad", "[[0], [0]]": "wgrad"}
Line = dict[str, Any]


def times(folder: Path, device: str, kernel: str) -> Iterator[tuple[Line, float]]:
    """The arguments of every call of `kernel` that was timed, and the least median over configurations in us."""
    path = folder / "tokamax" / "data" / "autotuning" / device / f"{kernel}.json"
    if not path.is_file():
        return
    for call, found in json.loads(path.read_text(encoding="utf-8")).items():
        medians = [
            statistics.median(one["evaluation_times_ms"]) for one in found.values() if one["evaluation_times_ms"]
        ]
        if medians:
            yield json.loads(call), 1e3 * min(medians)


def sizes(operand: Any) -> list[int]:
    """Extents of a bf16 operand; none of anything else."""
    found = re.fullmatch(r"bf16\[([\d,]+)\]", operand) if isinstance(operand, str) else None
    return [int(size) for size in found[1].split(",")] if found else []


def attention(folder: Path) -> Iterator[Line]:
    """Attention, forward and backward; `residuals`: whether the forward pass writes what the backward one needs."""
    for name, device in _DEVICES.items():
        for kernel in _ATTENTION:
            for suffix, direction in (("", "fwd"), ("_vjp", "bwd")):
                for call, time_us in times(folder, name, kernel + suffix):
                    query, key, value = (sizes(call[one]) for one in "qkv")
                    plain = not call["dropout_rate"] and not call.get("logits_soft_cap") and not call.get("bias")
                    if not (query and key and value and plain and not call.get("paging_info")):
                        continue
                    if len(query) == 3:  # one sequence, heads first
                        query, key, value = ([1, one[1], one[0], one[2]] for one in (query, key, value))
                    mask = call["mask"] or {}
                    causal = bool(mask.get("is_causal") or mask.get("causal_mask"))
                    yield {
                        "device": device,
                        "kernel": kernel.removeprefix("pallas_mosaic_tpu_"),
                        "direction": direction,
                        **dict(zip(("batch", "sq", "hq", "d"), query, strict=True)),
                        "skv": key[1],
                        "hkv": key[2],
                        "dv": value[3],
                        "causal": int(causal),
                        "residuals": int(bool(call.get("return_residuals"))),
                        "time_us": round(time_us, 3),
                    }


def grouped(folder: Path) -> Iterator[Line]:
    """Products of groups of rows, all `m` of them, each group with a k x n matrix of its own; and their gradients."""
    for name, device in _DEVICES.items():
        for kernel in _GROUPED:
            for call, time_us in times(folder, name, kernel):
                left, right = sizes(call["lhs"]), sizes(call["rhs"])
                numbers = call["ragged_dot_dimension_numbers"]
                way = _WAYS.get(str(numbers["dot_dimension_numbers"][0]))
                if not left or not right or not way or call.get("activation") or call.get("return_residuals"):
                    continue
                n = right[1] if way != "fwd" else right[2]
                spread = call["group_sizes"]
                groups = len(spread) if isinstance(spread, list) else spread["num_groups"]
                yield {
                    "device": device,
                    "kernel": kernel.removeprefix("pallas_mosaic_tpu_"),
                    "direction": way,
                    "groups": groups,
                    "m": left[0],
                    "n": n,
                    "k": left[1],
                    "time_us": round(time_us, 3),
                }


def write(path: Path, lines: list[Line]) -> None:
    """A table of the lines, each once."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({tuple(line.values()): line for line in lines}.values())


def main() -> int:
    folder = Path(sys.argv[1])
    write(TABLES / "tpu_attention.csv", list(attention(folder)))
    write(TABLES / "tpu_grouped_products.csv", list(grouped(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
