"""Write the device files of the hardware catalogue from a table of sourced facts, and fit its network constants.

    python benchmarks/make_hardware.py devices --data ../shared/data/device_specs
    python benchmarks/make_hardware.py fit --data ../shared/data

`devices` writes `backends/hardware/devices/*.yaml` and `sources.yaml`, byte for byte the same on every run: each row
of devices.csv with its unit, source and confidence; a variant states only what differs from its parent. `fit` prints
the base latency, step latency and efficiencies that `backends/hardware/systems/*.yaml` hold, with the fit's errors.
"""

import argparse
import csv
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

HARDWARE: Final = Path(__file__).parent.parent / "backends" / "hardware"
# name of the catalogue: name in the table
NAMES: Final = {
    "m40": "nvidia_m40",
    "titan-x-maxwell": "nvidia_titan_x_maxwell",
    "titan-x-pascal": "nvidia_titan_x_pascal",
    "titan-xp": "nvidia_titan_xp",
    "gtx-1080-ti": "nvidia_gtx_1080_ti",
    "p4": "nvidia_p4",
    "p100-sxm2": "nvidia_p100_sxm2",
    "p100-pcie": "nvidia_p100_pcie",
    "v100-sxm2": "nvidia_v100_sxm2",
    "v100-pcie": "nvidia_v100_pcie",
    "t4": "nvidia_t4",
    "rtx-2080-ti": "nvidia_rtx_2080_ti",
    "a100-sxm-40gb": "nvidia_a100_sxm_40gb",
    "a100-sxm-80gb": "nvidia_a100_sxm_80gb",
    "a100-pcie-40gb": "nvidia_a100_pcie_40gb",
    "a100-pcie-80gb": "nvidia_a100_pcie_80gb",
    "a6000": "nvidia_rtx_a6000",
    "a40": "nvidia_a40",
    "rtx-3090": "nvidia_rtx_3090",
    "rtx-4090": "nvidia_rtx_4090",
    "l4": "nvidia_l4",
    "l40s": "nvidia_l40s",
    "h100-sxm": "nvidia_h100_sxm",
    "h100-sxm-hbm2e-96gb": "nvidia_h100_sxm_hbm2e_96gb",
    "h100-pcie": "nvidia_h100_pcie",
    "h100-nvl": "nvidia_h100_nvl",
    "h200-sxm": "nvidia_h200_sxm",
    "b200-sxm": "nvidia_b200_sxm",
    "gb200": "nvidia_gb200",
    "b300-sxm": "nvidia_b300_sxm",
    "gb300": "nvidia_gb300",
    "rtx-5090": "nvidia_rtx_5090",
    "rtx-pro-6000-workstation": "nvidia_rtx_pro_6000_workstation",
    "rtx-pro-6000-server": "nvidia_rtx_pro_6000_server",
    "rtx-pro-6000-maxq": "nvidia_rtx_pro_6000_maxq",
    "mi25": "amd_mi25",
    "mi100": "amd_mi100",
    "mi210": "amd_mi210",
    "mi250": "amd_mi250",
    "mi250x": "amd_mi250x",
    "mi300x": "amd_mi300x",
    "mi355x": "amd_mi355x",
    "tpu-v3": "google_tpu_v3",
    "tpu-v4": "google_tpu_v4",
    "tpu-v5e": "google_tpu_v5e",
    "tpu-v5p": "google_tpu_v5p",
    "tpu-v6e": "google_tpu_v6e",
    "tpu-v7x": "google_tpu_v7x",
}
PARENTS: Final = {
    "titan-xp": "titan-x-pascal",
    "p100-pcie": "p100-sxm2",
    "v100-pcie": "v100-sxm2",
    "a100-sxm-80gb": "a100-sxm-40gb",
    "a100-pcie-40gb": "a100-sxm-40gb",
    "a100-pcie-80gb": "a100-sxm-80gb",
    "h100-sxm-hbm2e-96gb": "h100-sxm",
    "h100-pcie": "h100-sxm",
    "h100-nvl": "h100-sxm",
    "h200-sxm": "h100-sxm",
    "gb200": "b200-sxm",
    "b300-sxm": "b200-sxm",
    "gb300": "b300-sxm",
    "rtx-pro-6000-server": "rtx-pro-6000-workstation",
    "rtx-pro-6000-maxq": "rtx-pro-6000-workstation",
    "mi250x": "mi250",
}
SYSTEMS: Final = {
    "p100-sxm2": "nvlink1-mesh",
    "v100-sxm2": "nvlink2-mesh",
    "a100-sxm-40gb": "nvlink3-switch",
    "a100-sxm-80gb": "nvlink3-switch",
    "h100-sxm": "nvlink4-switch",
    "h100-sxm-hbm2e-96gb": "nvlink4-switch",
    "h200-sxm": "nvlink4-switch",
    "h100-nvl": "nvlink-bridge-pcie5",
    "b200-sxm": "nvlink5-switch",
    "b300-sxm": "nvlink5-switch",
    "gb200": "nvlink5-rack",
    "gb300": "nvlink5-rack",
    **dict.fromkeys(("m40", "titan-x-maxwell", "titan-x-pascal", "titan-xp", "gtx-1080-ti", "p4"), "pcie3"),
    **dict.fromkeys(("p100-pcie", "v100-pcie", "t4", "rtx-2080-ti", "mi25"), "pcie3"),
    **dict.fromkeys(("a100-pcie-40gb", "a100-pcie-80gb", "a6000", "a40", "rtx-3090", "rtx-4090"), "pcie4"),
    **dict.fromkeys(("l4", "l40s"), "pcie4"),
    **dict.fromkeys(("h100-pcie", "rtx-5090"), "pcie5"),
    **dict.fromkeys(("rtx-pro-6000-workstation", "rtx-pro-6000-server", "rtx-pro-6000-maxq"), "pcie5"),
    "mi100": "xgmi-hive",
    "mi210": "xgmi-hive",
    "mi250": "xgmi-modules",
    "mi250x": "xgmi-modules",
    "mi300x": "xgmi-board",
    "mi355x": "xgmi-board",
    "tpu-v3": "ici-v3",
    "tpu-v4": "ici-v4",
    "tpu-v5e": "ici-2d",
    "tpu-v6e": "ici-2d",
    "tpu-v5p": "ici-3d",
    "tpu-v7x": "ici-v7x",
}
_SECTIONS: Final = (
    ("what it is", ("vendor", "arch", "form_factor", "jax_devices_per_chip", "dies", "dies_per_device")),
    ("dense peaks; a multiply-add counts two", ("peak.",)),
    ("peaks with structured 2:4 sparsity", ("peak_sparse.",)),
    ("memory", ("mem_", "l2", "l3", "cmem")),
    ("cores, clocks, power", ("",)),
    (
        "links, per direction",
        ("pcie_", "host_", "nvlink_", "scale", "die_link_", "ici_", "pod_", "chips_per_host", "dcn_"),
    ),
)
# notes that the table lacks: (device, field) -> note
NOTES: Final = {
    ("gb300", "peak_sparse.fp4.matrix"): "not twice the dense rate: Blackwell Ultra raises dense fp4 only",
}
# facts that do not close against others (sparse = 2 x dense); their notes say why
EXCEPTIONS: Final = {"b300-sxm": ("sparse_peaks.fp4.matrix",), "gb300": ("sparse_peaks.fp4.matrix",)}
TWO_DIES: Final = ("b200-sxm", "gb200", "b300-sxm", "gb300")
_DIES_NOTE: Final = "both dies show as one device; flags and data of a collective cross between them"
_ALU_NOTE: Final = "ALUs of a vector lane, one operation a cycle each; sets the f32 vector rate, which nobody prints"


@dataclass(frozen=True, slots=True)
class Row:
    """One fact of the table, its fields as printed there."""

    field: str
    value: str
    unit: str
    source: str
    source_2: str
    confidence: str
    note: str


def read_rows(path: Path) -> dict[str, dict[str, Row]]:
    """The facts of devices.csv by device name of the table and field."""
    found: dict[str, dict[str, Row]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            device = line.pop("device")
            found.setdefault(device, {})[line["field"]] = Row(**line)
    return found


def added_rows(name: str, rows: dict[str, Row]) -> list[Row]:
    """Facts that the table lacks and the predictor needs, each with a source of its own."""
    found: list[Row] = []
    if "dies" in rows:
        dies, arch = rows["dies"], rows["arch"]
        note = "each die shows as one device, says the note of arch"
        found.append(
            Row("jax_devices_per_chip", dies.value, "device", dies.source, dies.source_2, dies.confidence, note)
        )
        if "TWO devices" not in arch.note:
            raise SystemExit(f"{name}: arch no longer says that each die is a device")
    if name in TWO_DIES:
        arch = rows["arch"]
        found.append(Row("dies_per_device", "2", "die", arch.source, arch.source_2, arch.confidence, _DIES_NOTE))
    if "vpu_lanes" in rows:
        alus = "2" if name == "tpu-v3" else "4"
        found.append(Row("vpu_alus_per_lane", alus, "ALU", "recall", "", "low", _ALU_NOTE))
    return found


def plain_note(note: str) -> str:
    """A note without its `carried over from X`, which `inherits` says already."""
    first, _, rest = note.partition("; ")
    return rest if first.startswith("carried over from ") else note


def same(row: Row, parent: Row | None) -> bool:
    """Whether a variant's row states only what its parent's does."""
    if parent is None:
        return False
    keys = ("value", "unit", "source", "source_2", "confidence")
    return all(getattr(row, key) == getattr(parent, key) for key in keys) and plain_note(row.note) in (
        "",
        plain_note(parent.note),
    )


def quote(text: str) -> str:
    """`text` as a YAML scalar in flow style: bare where that is safe."""
    safe = text.replace("_", "").replace("-", "").replace("/", "").replace(".", "").replace(":", "")
    bare = safe.isascii() and safe.isalnum() and not text[0].isdigit() and not text.endswith(":")
    return (
        text if bare and text.lower() not in ("yes", "no", "on", "off", "null", "true", "false") else json.dumps(text)
    )


def is_number(text: str) -> bool:
    """Whether a value of the table is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


TEXT_FIELDS: Final = frozenset({"nvlink_gen", "pcie_gen"})


def value_text(row: Row) -> str:
    """A row as a YAML flow mapping, with a mark after it where it needs care."""
    number = is_number(row.value) and row.field not in TEXT_FIELDS
    parts = [f"value: {row.value if number else quote(row.value)}"]
    parts += [f"unit: {quote(row.unit)}"] if row.unit else []
    parts += [f"source: {quote(row.source)}"]
    parts += [f"source_2: {quote(row.source_2)}"] if row.source_2 else []
    parts += [f"confidence: {row.confidence}"]
    text = ", ".join(parts)
    note = plain_note(row.note)
    if note:
        text += f",\n    note: {json.dumps(note, ensure_ascii=False)}"
    marks = ["RECALLED, not looked up"] if row.source == "recall" else []
    marks += ["LOW confidence"] if row.confidence == "low" else []
    return f"{{{text}}}" + (f"  # {', '.join(marks)}" if marks else "")


def section_of(field: str) -> int:
    """Index of the section a field stands in."""
    for index, (_, prefixes) in enumerate(_SECTIONS):
        if any(prefix and field.startswith(prefix) for prefix in prefixes):
            return index
    return next(index for index, (_, prefixes) in enumerate(_SECTIONS) if prefixes == ("",))


def device_text(name: str, rows: dict[str, Row], parent: dict[str, Row] | None) -> str:
    """The YAML file of one device; `parent`: the rows of the device it inherits from."""
    base = parent or {}
    kind = "tpu" if "tensorcores" in rows else "gpu"
    lines = [
        "# Written by benchmarks/make_hardware.py; change the table or that script, not this file.",
        f"name: {name}",
    ]
    lines += [f"inherits: {PARENTS[name]}"] if parent else [f"kind: {kind}"]
    omitted = sorted(yaml_path(field) for field in base if field not in rows)
    lines += [f"omit: [{', '.join(omitted)}]"] if omitted else []
    inherited_system = SYSTEMS.get(PARENTS.get(name, ""))
    lines += [] if inherited_system == SYSTEMS[name] else [f"system: {SYSTEMS[name]}"]
    if "mem_capacity_usable" in rows and "per die" in rows["mem_capacity_usable"].note:
        lines += ["per_device: [mem_capacity_usable]"]
    lines += [f"exceptions: [{', '.join(EXCEPTIONS[name])}]"] if name in EXCEPTIONS else []
    own = [row for field, row in rows.items() if not same(row, base.get(field))]
    for index, (title, _) in enumerate(_SECTIONS):
        here = [row for row in own if section_of(row.field) == index]
        if here:
            lines += ["", f"# {title}", *section_lines(here)]
    return "\n".join(lines) + "\n"


def yaml_path(field: str) -> str:
    """Where a field of the table stands in a device file: `peak.bf16.matrix` in `peaks.bf16.matrix`."""
    return field.replace("peak.", "peaks.", 1).replace("peak_sparse.", "sparse_peaks.", 1)


def section_lines(rows: Sequence[Row]) -> Iterable[str]:
    """The lines of one section, peaks under their own key."""
    table = yaml_path(rows[0].field).partition(".")[0]
    if table in ("peaks", "sparse_peaks"):
        return [f"{table}:", *(f"  {row.field.partition('.')[2]}: {value_text(row)}" for row in rows)]
    return [f"{row.field}: {value_text(row)}" for row in rows]


def sources_text(used: set[str], path: Path) -> str:
    """`sources.yaml`: the keys that are used, and what they stand for."""
    with path.open(encoding="utf-8", newline="") as file:
        where = {line["key"]: line["where"] for line in csv.DictReader(file)}
    kept = {key for key in where if key in used or any(u.startswith(key.removesuffix("NAME")) for u in used)}
    kept = {key for key in kept if key in used or key.endswith(":NAME")}
    lines = ["# What the source keys stand for; NAME in a key is the rest of the key. Written by make_hardware.py."]
    lines += [f"{quote(key)}: {json.dumps(where[key])}" for key in sorted(kept)]
    return "\n".join([*lines, 'assumption: "stablecast\'s own assumption, not a published figure"']) + "\n"


def write_devices(data: Path, out: Path) -> int:
    """Write all device files and `sources.yaml`; returns how many files were written."""
    table = read_rows(data / "devices.csv")
    unknown = sorted(set(table) - set(NAMES.values()))
    if unknown:
        raise SystemExit(f"devices without a name in NAMES: {', '.join(unknown)}")
    full: dict[str, dict[str, Row]] = {}
    for name, key in NAMES.items():
        full[name] = table[key] | {row.field: row for row in added_rows(name, table[key])}
    for (name, field), note in NOTES.items():
        full[name][field] = replace(full[name][field], note=note)
    (out / "devices").mkdir(parents=True, exist_ok=True)
    for name, rows in full.items():
        parent = full[PARENTS[name]] if name in PARENTS else None
        (out / "devices" / f"{name}.yaml").write_text(device_text(name, rows, parent), encoding="utf-8")
    used = {
        source for rows in full.values() for row in rows.values() for source in (row.source, row.source_2) if source
    }
    (out / "sources.yaml").write_text(sources_text(used, data / "sources.csv"), encoding="utf-8")
    return len(full) + 1


KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_KIND_NAMES: Final = {"alltoall": "all_to_all", "all-to-all": "all_to_all", "all-reduce": "all_reduce"} | {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured collective: kind, group size, bytes of the whole vector, seconds."""

    kind: str
    size: int
    bytes: float
    time_s: float

    @property
    def steps(self) -> float:
        """Steps of a ring."""
        return (self.size - 1) * (2 if self.kind == "all_reduce" else 1)

    @property
    def wire_bytes(self) -> float:
        """Bytes a ring sends from each device."""
        return self.bytes * self.steps / self.size


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants of t = base + steps x alpha + wire bytes / (efficiency x rate), and the errors of that formula."""

    base_us: float
    alpha_us: float
    efficiency: dict[str, dict[int, float]]
    median_error: float
    p90_error: float
    rows: int


def read_nccl(path: Path, dtype: str = "half") -> list[Sample]:
    """Rows of an aiconfigurator NCCL table."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if line["dtype"] == dtype]
    return [
        Sample(
            _KIND_NAMES.get(line["collective"], line["collective"]),
            int(line["num_gpus"]),
            float(line["bytes"]),
            float(line["latency_us"]) * 1e-6,
        )
        for line in lines
    ]


def read_xla(path: Path, key: str) -> list[Sample]:
    """Rows of XLA's collective table for one device key."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if line["device_key"] == key and line["latency_us"]]
    return [
        Sample(
            _KIND_NAMES[line["opcode"]],
            int(float(line["devices_per_group"])),
            float(line["tensor_bytes"]),
            float(line["latency_us"]) * 1e-6,
        )
        for line in lines
        if line["opcode"] in _KIND_NAMES
    ]


def fit(samples: Sequence[Sample], rate: Mapping[int, float]) -> Fit:
    """Latencies by weighted least squares (relative error) with one efficiency for each kind and size.

    `rate`: bytes/s of a device, one way, by group size.
    """
    groups = sorted({(sample.kind, sample.size) for sample in samples})
    column = {group: 2 + index for index, group in enumerate(groups)}
    matrix = np.zeros((len(samples), 2 + len(groups)))
    times = np.array([sample.time_s for sample in samples])
    for index, sample in enumerate(samples):
        matrix[index, :2] = 1e-6, sample.steps * 1e-6
        matrix[index, column[sample.kind, sample.size]] = sample.wire_bytes / rate[sample.size]
    weighted = matrix / times[:, None]
    small = np.array([sample.bytes <= 64 * 1024 for sample in samples])
    large = np.array([sample.bytes >= 2**26 for sample in samples])
    latencies, *_ = np.linalg.lstsq(weighted[small, :2], np.ones(int(small.sum())), rcond=None)
    latencies = np.maximum(latencies, 0.0)
    rest = 1 - weighted[large, :2] @ latencies
    slopes, *_ = np.linalg.lstsq(weighted[large, 2:], rest, rcond=None)
    solution = np.concatenate([latencies, slopes])
    errors = np.abs(weighted @ solution - 1)
    table: dict[str, dict[int, float]] = {}
    for (kind, size), slope in zip(groups, slopes, strict=True):
        table.setdefault(kind, {})[size] = round(1 / float(slope), 3)
    base, alpha = round(float(latencies[0]), 2), round(float(latencies[1]), 3)
    return Fit(base, alpha, table, float(np.median(errors)), float(np.quantile(errors, 0.9)), len(samples))


def fits(data: Path) -> dict[str, Fit]:
    """Every fit that the system files use, by system family."""
    nccl = data / "aiconfigurator"
    xla = data / "xla_perf_tables" / "collectives.csv.gz"
    rack = [sample for sample in read_xla(xla, "sm_100_GB200") if sample.size in (8, 16, 32, 64, 72)]
    board = read_xla(xla, "gfx950")
    return {
        "nvlink3-switch": fit(read_nccl(nccl / "nccl_a100_sxm.csv.gz"), dict.fromkeys((2, 4, 8), 300e9)),
        "nvlink4-switch": fit(read_nccl(nccl / "nccl_h100_sxm.csv.gz"), dict.fromkeys((2, 4, 8), 450e9)),
        "nvlink5-switch": fit(read_nccl(nccl / "nccl_b200_sxm.csv.gz"), dict.fromkeys((2, 4, 8), 900e9)),
        "nvlink5-rack": fit(read_nccl(nccl / "nccl_gb200.csv.gz"), dict.fromkeys((2, 4), 900e9)),
        "nvlink5-rack (XLA)": fit(rack, dict.fromkeys((8, 16, 32, 64, 72), 900e9)),
        "xgmi-board": fit(board, {size: 76.8e9 * (size - 1) for size in (2, 4, 8)}),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("devices", "fit"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=HARDWARE)
    options = parser.parse_args()
    if options.what == "devices":
        print(f"{write_devices(options.data, options.out)} files under {options.out}")
        return
    for name, found in fits(options.data).items():
        print(
            f"{name}: base {found.base_us} us, step {found.alpha_us} us; {found.rows} rows, error median "
            f"{found.median_error:.1%}, 90th percentile {found.p90_error:.1%}"
        )
        for kind in KINDS:
            print(f"  {kind}: {json.dumps(found.efficiency.get(kind, {})).replace(chr(34), '')}")


if __name__ == "__main__":
    main()
