"""`stablecast train`: tables, clocks, models, cards, in one deterministic run."""

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np

from stablecast.backends.catalogue import Catalogue
from stablecast.backends.learned import clocks
from stablecast.backends.learned.fitting import Measured, Setting, train_model
from stablecast.backends.learned.rates import DEVICES_FILE, MEMORY, MODELS, Rule, Share, chip_of, resolved
from stablecast.backends.learned.store import Model, has_base, key_of, write_base, write_json, write_model
from stablecast.ir.errors import InputError, near_names
from stablecast.ir.text import percent, table
from stablecast.validation.training.reader import TrainingTables
from stablecast.validation.training.sources import sources
from stablecast.validation.training.tables import Source, measured

SETTINGS: Final[Mapping[str, Setting]] = {
    "attention_prefill-half-tpu": Setting(quadratic=3.0),
    "conv-half-gpu": Setting(leaves=8, rate=0.05, least_rows=5),
    "elementwise-half-tpu": Setting(trees=600, rate=0.05, quadratic=3.0),
    "matmul-fp8-gpu": Setting(trees=450, rate=0.12, features=0.5),
    "matmul-half-gpu": Setting(trees=450, rate=0.12, features=0.4),
    "matmul-half-tpu": Setting(trees=600, rate=0.08, least_rows=3, features=0.3),
    "matmul-int8-gpu": Setting(quadratic=3.0),
    "moe-half-gpu": Setting(trees=600, rate=0.06, features=0.3),
}
"""Settings of models that rows left out of training chose differently from the common one, by key."""

_CLOCK_KINDS: Final = ("matmul",)
_STREAMS: Final = ("neusight train vector", "vidur add")


@dataclass
class Trained:
    """What a run wrote: models with their cards, the clocks, and what was left out and why."""

    folder: Path
    models: list[Model] = field(default_factory=list[Model])
    clocks: dict[str, Any] = field(default_factory=dict[str, Any])
    notes: list[str] = field(default_factory=list[str])
    missing: list[str] = field(default_factory=list[str])

    def summary(self) -> str:
        """A table: errors of rows left out, by model and device."""
        head = ["model", "device", "rows", "mean", "median", "p90", "bias", "in range", "half width", "chip left out"]
        body = [
            [
                model.key,
                device,
                *_shown(errors),
                *(percent(model.card["coverage"][device][name]) for name in ("covered", "half_width")),
                _unseen(model, device),
            ]
            for model in self.models
            for device, errors in model.card["seen_devices"].items()
        ]
        lines = [*table([head, *body], right=range(2, len(head)), indent="")]
        return "\n".join(
            [*lines, *(f"note: {note}" for note in self.notes), *(f"missing: {name}" for name in self.missing)]
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "folder": str(self.folder),
            "models": [{"key": model.key, **model.card} for model in self.models],
            "clocks": self.clocks,
            "missing": self.missing,
            "notes": self.notes,
        }


def _shown(errors: Mapping[str, Any]) -> list[str]:
    values = [percent(errors[name]) for name in ("mape", "median", "p90")]
    return [str(errors["rows"]), *values, f"{errors['bias'] * 100:+.1f} %"]


def _unseen(model: Model, device: str) -> str:
    errors = model.card["unseen_devices"].get(device)
    return percent(errors["mape"]) if errors else ""


def train(
    data: Path,
    only: Sequence[str] = (),
    folder: Path = MODELS,
    date: str = "",
    say: Callable[[str], None] = lambda text: None,
    known: Iterable[Source] | None = None,
    base: Path | None = None,
) -> Trained:
    """Train every model that the tables under `data` allow, or those of the kinds, families or keys in `only`.

    Writes `folder/KEY.npz` and `KEY.json` for each, and `devices.json` with clocks and rule and `base.yaml` with the
    analytical constants under all (both kept as they are where `only` is given and they exist). `date`: what the cards
    say, by default today. `known`: the tables to choose from, all of `sources()` unless given. `base`: a file of
    analytical constants to train on instead of today's.

    Raises `InputError` for unknown names, where `data` holds no training table, and where `only` some are asked for and
    the others rest on other analytical constants.
    """
    tables, catalogue = TrainingTables(data), Catalogue()
    result = Trained(folder)
    chosen = _chosen(list(sources() if known is None else known), only)
    read = list(measured(chosen, tables, catalogue, result.notes, base))
    result.missing = sorted(set(tables.missing))
    if not read:
        raise InputError(f"{data} holds no training table", f"missing: {', '.join(result.missing[:3])}")
    observations = observe_all(read)
    rule, errors = clocks.rule_and_errors(observations)
    result.clocks = {**_clocks(observations, rule, errors), "timing": _timing(read)}
    folder.mkdir(parents=True, exist_ok=True)
    if not only or not (folder / DEVICES_FILE).is_file():
        write_json(result.clocks, folder / DEVICES_FILE)
        write_base(folder, base)
    elif not has_base(folder, base):
        raise InputError(f"the models in {folder} rest on other analytical constants", "train all of them")
    stamp = {"date": date or datetime.now(UTC).strftime("%Y-%m-%d"), "versions": versions(), "files": tables.hashes}
    asked = [(source, data) for source, data in read if _is_asked(source, only)]
    for (kind, family, kind_of_device), parts in _by_model(asked, observations, rule).items():
        key = key_of(kind, family, kind_of_device)
        say(f"{key}: {sum(len(part.kernels) for part in parts)} rows")
        model = train_model(kind, family, parts, SETTINGS.get(key, Setting()))
        model = replace(model, card={**model.card, **stamp})
        write_model(model, folder)
        result.models.append(model)
    return result


def observe_all(read: Iterable[tuple[Source, Measured]]) -> list[clocks.Observation]:
    """Sustained shares of every device, one a family: from products, and of the memory rate from streams."""
    found: list[clocks.Observation] = []
    for source, data in read:
        family = _sustained_of(source)
        one = clocks.observe(data, family) if family else None
        found += [one] if one is not None else []
    return list(clocks.pooled(found).values())


def _sustained_of(source: Source) -> str:
    """The family whose sustained share a table tells, empty for most."""
    if source.kind in _CLOCK_KINDS:
        return source.family
    return MEMORY if source.name in _STREAMS and source.kind == "elementwise" else ""


def _chosen(known: list[Source], only: Sequence[str]) -> list[Source]:
    """What models of `only` learn from, and all that sustained shares come from: they enter every model."""
    names = {name for source in known for name in _names(source)}
    for name in only:
        if name not in names:
            raise InputError(f"no model is called '{name}'", near_names(name, names) or "see the cards of the models")
    return [
        source for source in known
        if _is_asked(source, only) or source.clocks or _sustained_of(source)
    ]  # fmt: skip


def _names(source: Source) -> set[str]:
    return {source.kind, source.family, f"{source.kind}-{source.family}"}


def _is_asked(source: Source, only: Sequence[str]) -> bool:
    return not only or not _names(source).isdisjoint(only)


def _by_model(
    read: Sequence[tuple[Source, Measured]], observations: Sequence[clocks.Observation], rule: Rule
) -> dict[tuple[str, str, str], list[Measured]]:
    """Tables by model, each with what its device sustains: as measured, and by the rule without its chip."""
    by_device: dict[str, dict[str, Share]] = {}
    for one in observations:
        by_device.setdefault(one.device.name, {})[one.family] = Share(one.share, one.table, True)
    rules: dict[str, Rule] = {}
    found: dict[tuple[str, str, str], list[Measured]] = {}
    for source, data in read:
        if source.clocks:
            continue
        device = data.device
        chip = chip_of(device.name)
        if chip not in rules:
            rules[chip] = clocks.make_rule(
                [one for one in observations if one.chip != chip], rule.exponent, rule.by_lanes
            )
        base = data.rates.base
        seen = resolved(device, by_device.get(device.name, {}), rule, base)
        part = replace(data, rates=seen, ruled=resolved(replace(device, sustained={}), {}, rules[chip], base))
        found.setdefault((source.kind, source.family, device.kind), []).append(part)
    return found


def _clocks(observations: Sequence[clocks.Observation], rule: Rule, errors: Mapping[str, float]) -> dict[str, Any]:
    devices: dict[str, dict[str, Any]] = {}
    for one in sorted(observations, key=lambda one: (one.device.name, one.family)):
        entry = {"value": round(one.share, 4), "source": f"{one.table}, median of {one.rows} large rows"}
        devices.setdefault(one.device.name, {})[one.family] = entry
    return {
        "devices": devices,
        "rule": {
            "exponent": rule.exponent,
            "by_lanes": rule.by_lanes,
            "chosen": "least mean |log error| over chips left out, on training tables only; frozen before any scoring",
            "errors": {form: round(error, 4) for form, error in errors.items()},
            "anchors": [asdict(anchor) for anchor in rule.anchors],
        },
    }


def _timing(read: Sequence[tuple[Source, Measured]]) -> dict[str, dict[str, float]]:
    """What each way of timing adds to a kernel, seconds, by its name and device; of a table where that grew, what it
    added to the first row."""
    found: dict[str, dict[str, float]] = {}
    for _, data in read:
        for label, extra in dict(zip(data.timing[::-1], data.extra_s.tolist()[::-1], strict=True)).items():
            if label:
                found.setdefault(label, {})[data.device.name] = round(extra, 9)
    return {label: dict(sorted(devices.items())) for label, devices in sorted(found.items())}


def versions() -> dict[str, str]:
    """What the models were made with."""
    import sklearn

    return {
        "stablecast": version("stablecast"),
        "scikit-learn": sklearn.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
