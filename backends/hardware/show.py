"""Plain rows, dictionaries and texts for `stablecast hardware list` and `hardware show`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, cast

from stablecast.backends import units
from stablecast.backends.device import Device, Fact, MemoryTier, NetworkDim, Quantity, System

if TYPE_CHECKING:
    from stablecast.backends.catalogue import Catalogue

_LEGEND: Final = "~ low confidence   ? recalled, not looked up   * assumption"
_LISTED: Final = ("name", "kind", "memory", "memory rate", "bf16", "fp16", "fp32 vector", "doubtful", "also called")
_DEVICE_FIELDS: Final = (
    "hbm_bytes",
    "hbm_usable_bytes",
    "hbm_bytes_per_s",
    "l2_bytes",
    "shared_bytes_per_core",
    "cores",
    "clock_hz",
    "clock_matrix_hz",
    "tdp_w",
    "host_bytes_per_s",
    "scaleup_bytes_per_s",
)
_TABLES: Final = ("matrix_flops", "matrix_flops_acc16", "sparse_flops", "vector_flops")
_TIER_FIELDS: Final = ("read_bytes_per_s", "write_bytes_per_s", "latency_s", "nbytes")
_DIM_FIELDS: Final = ("bytes_per_s", "pair_bytes_per_s", "efficiency", "latency_s", "base_latency_s")


def mark(fact: Fact) -> str:
    """ "?" recalled, "*" assumption, "~" low confidence, "" otherwise."""
    if fact.recalled:
        return "?"
    if fact.source.startswith("assumption"):
        return "*"
    return "~" if fact.confidence == "low" else ""


def list_rows(catalogue: "Catalogue") -> list[dict[str, object]]:
    """One plain row a device; rates in SI, None where not stated; `doubtful`: how many facts carry a mark."""
    return [_list_row(catalogue.device(name)) for name in catalogue.names()]


def _list_row(device: Device) -> dict[str, object]:
    every: list[Fact] = [*device.facts.values(), *device.labels.values()]
    return {
        "name": device.name,
        "vendor": device.vendor,
        "architecture": device.architecture,
        "kind": device.kind,
        "memory_bytes": device.memory_bytes.value,
        "hbm_bytes_per_s": device.hbm_bytes_per_s.value,
        "bf16_flops": _value(device.matrix_flops.get("bf16")),
        "fp16_flops": _value(device.matrix_flops.get("fp16")),
        "f32_vector_flops": _value(device.vector_flops.get("f32")),
        "system": device.system,
        "facts": len(every),
        "doubtful": sum(fact.doubtful for fact in every),
        "aliases": list(device.aliases),
    }


def _value(fact: Quantity | None) -> float | None:
    return None if fact is None else fact.value


def fact_dict(fact: Fact) -> dict[str, object]:
    """A fact as plain values: value (SI number, or text), unit, shown, source, confidence, note, marks."""
    value: float | str = fact.value if isinstance(fact, Quantity) else fact.text
    return {
        "value": value,
        "unit": fact.unit if isinstance(fact, Quantity) else "",
        "shown": str(fact) if isinstance(fact, Quantity) else fact.text,
        "source": fact.source,
        "source_2": fact.source_2,
        "confidence": fact.confidence,
        "recalled": fact.recalled,
        "mark": mark(fact),
        "note": fact.note,
        "inherited_from": fact.inherited_from,
    }


def device_dict(device: Device) -> dict[str, object]:
    """A device as plain values: what the predictor uses (one device's share), then every published fact."""
    found: dict[str, object] = {
        name: getattr(device, name)
        for name in ("name", "vendor", "architecture", "kind", "jax_devices_per_chip", "system", "source_file")
    }
    found["aliases"] = list(device.aliases)
    for name in _DEVICE_FIELDS:
        fact: Quantity | None = getattr(device, name)
        found[name] = fact_dict(fact) if fact else None
    for name in _TABLES:
        table: Mapping[str, Quantity] = getattr(device, name)
        found[name] = {key: fact_dict(fact) for key, fact in table.items()}
    facts: dict[str, Fact] = {**device.labels, **device.facts}
    found["facts"] = {key: fact_dict(fact) for key, fact in facts.items()}
    return found


def system_dict(system: System) -> dict[str, object]:
    """A system as plain values: name, device, count, notes, and the dimensions of its network."""
    return {
        "name": system.name,
        "device": system.device.name,
        "count": system.count,
        "notes": list(system.notes),
        "dims": [_dim_dict(dim) for dim in system.network.dims],
        "tiers": [_tier_dict(tier) for tier in system.tiers],
    }


def _tier_dict(tier: MemoryTier) -> dict[str, object]:
    found: dict[str, object] = {"name": tier.name, "shared_by": tier.shared_by}
    for name in _TIER_FIELDS:
        fact: Quantity | None = getattr(tier, name)
        found[name] = fact_dict(fact) if fact else None
    return found


def _dim_dict(dim: NetworkDim) -> dict[str, object]:
    found: dict[str, object] = {"name": dim.name, "kind": dim.kind, "size": dim.size, "wrapped": dim.wrapped}
    for name in _DIM_FIELDS:
        fact: Quantity | None = getattr(dim, name)
        found[name] = fact_dict(fact) if fact else None
    found["efficiency_by_kind"] = {kind: fact_dict(fact) for kind, fact in dim.efficiency_by_kind.items()}
    return found


def show_dict(catalogue: "Catalogue", name: str) -> dict[str, object]:
    """A device (with its systems of 4 and 8) or a system (`NAME:N`, a machine, a file) as plain values.

    Raises `InputError` for an unknown name.
    """
    system = catalogue.resolve(name)
    shown = [system]
    if system.count == 1 and system.device.system and ":" not in name:
        shown = [catalogue.resolve(f"{name}:{count}") for count in (4, 8)]
    keys = {fact.source for fact in (*system.device.facts.values(), *system.device.labels.values())}
    keys |= {fact.source_2 for fact in (*system.device.facts.values(), *system.device.labels.values())}
    return {
        "schema": 1,
        "device": device_dict(system.device),
        "systems": [system_dict(each) for each in shown],
        "sources": {key: meaning for key in sorted(keys - {""}) if (meaning := source_meaning(catalogue, key))},
    }


def source_meaning(catalogue: "Catalogue", key: str) -> str:
    """What a source key stands for, "" where it explains itself."""
    return catalogue.sources.get(key) or catalogue.sources.get(f"{key.partition(':')[0]}:NAME", "")


def format_list(rows: Sequence[Mapping[str, object]]) -> str:
    """`list_rows` as a table for a terminal."""
    table: list[tuple[str, ...]] = [_LISTED]
    for row in rows:
        aliases = cast("list[str]", row["aliases"])
        rates = (_cell(row[name], units.FLOP_PER_S) for name in ("bf16_flops", "fp16_flops", "f32_vector_flops"))
        memory = f"{cast('float', row['memory_bytes']) / 2**30:.1f} GiB"
        doubtful = f"{row['doubtful']}/{row['facts']}"
        rate = _cell(row["hbm_bytes_per_s"], units.BYTES_PER_S)
        table.append((str(row["name"]), str(row["kind"]), memory, rate, *rates, doubtful, ", ".join(aliases)))
    widths = [max(len(line[column]) for line in table) for column in range(len(_LISTED))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    return "\n".join(
        [*lines, "", "peaks are dense; doubtful: facts of low confidence, recalled or assumed, of all facts"]
    )


def _cell(value: object, dimension: str) -> str:
    return units.show(value, dimension) if isinstance(value, float) else "-"


def format_show(shown: Mapping[str, object]) -> str:
    """`show_dict` as text for a terminal: the share of one device, its systems, then every published fact."""
    device = cast("Mapping[str, object]", shown["device"])
    lines = [f"{device['name']}: {device['vendor']} {device['architecture']} ({device['kind']})"]
    if device["aliases"]:
        lines.append("also called " + ", ".join(cast("list[str]", device["aliases"])))
    if device["jax_devices_per_chip"] != 1:
        lines.append(f"one of {device['jax_devices_per_chip']} devices of a chip; published facts are the chip's")
    lines += ["", "what a prediction uses (one device, dense peaks)"]
    rows = [(name, device[name]) for name in _DEVICE_FIELDS]
    for table in _TABLES:
        rows += [(f"{table} {key}", fact) for key, fact in cast("Mapping[str, object]", device[table]).items()]
    lines += _fact_lines(rows)
    for system in cast("list[Mapping[str, object]]", shown["systems"]):
        lines += ["", f"{system['count']} of them: " + "; ".join(cast("list[str]", system["notes"]))]
        for dim in cast("list[Mapping[str, object]]", system["dims"]):
            lines += _fact_lines([(f"{dim['name']} {name}", dim[name]) for name in _DIM_FIELDS])
        for tier in cast("list[Mapping[str, object]]", system["tiers"]):
            lines += _fact_lines([(f"{tier['name']} {name}", tier[name]) for name in _TIER_FIELDS])
    lines += ["", "published facts"]
    lines += _fact_lines(list(cast("Mapping[str, object]", device["facts"]).items()))
    lines += ["", "sources"]
    lines += [f"  {key}: {meaning}" for key, meaning in cast("Mapping[str, str]", shown["sources"]).items()]
    return "\n".join([*lines, "", _LEGEND])


def _fact_lines(rows: Sequence[tuple[str, object]]) -> list[str]:
    stated = [(name, cast("Mapping[str, object]", fact)) for name, fact in rows if fact]
    width = max((len(name) for name, _ in stated), default=0)
    lines: list[str] = []
    for name, fact in stated:
        sources = " + ".join(str(fact[key]) for key in ("source", "source_2") if fact[key])
        origin = f"{fact['confidence']}, {sources}"
        origin += f", as {fact['inherited_from']}" if fact["inherited_from"] else ""
        note = f": {fact['note']}" if fact["note"] else ""
        lines.append(f"  {fact['mark'] or ' '} {name.ljust(width)}  {fact['shown']}  ({origin}{note})")
    return lines
