"""Trained models on disk: plain arrays (`KEY.npz`) and a card (`KEY.json`) each. No pickle anywhere."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from stablecast.backends.analytical.constants import CONSTANTS_FILE
from stablecast.backends.estimates import BoolArray, FloatArray
from stablecast.backends.learned.rates import BASE_FILE, MODELS, base_file
from stablecast.backends.learned.smooth import Quadratic
from stablecast.backends.learned.trees import Trees
from stablecast.ir.errors import InputError

FORMAT: Final = 1
UNSEEN: Final = "unseen"
_OUTSIDE_SLACK: Final = 0.05
_WIDER_PER_DOUBLING: Final = 0.25


def key_of(kind: str, family: str, platform: str) -> str:
    """The name of a model and its files: `matmul-half-gpu`."""
    return f"{kind}-{family}-{platform}"


@dataclass(frozen=True)
class Model:
    """One trained model: log(measured / base) from `features`, what it has seen, and how far off it was.

    `quadratic`: added to the trees, where the model has one.
    `trust`: share of the correction that a device takes which the model has not seen. `low`, `high`: by device (and
    `unseen`) and regime, the interval of log(measured / predicted) that held 80 % of the rows left out of training;
    regimes are cut at `edges` of the feature `size`. `domain`: least and largest value of each feature.
    """

    key: str
    features: tuple[str, ...]
    trees: Trees
    devices: tuple[str, ...]
    trust: float
    edges: FloatArray
    low: Mapping[str, FloatArray]
    high: Mapping[str, FloatArray]
    domain: tuple[FloatArray, FloatArray]
    card: Mapping[str, Any]
    quadratic: Quadratic | None = None

    def correction(self, columns: Mapping[str, FloatArray], device: str) -> FloatArray:
        """Log of time over base, per row; damped where the device was never seen."""
        own = [columns[name] for name in self.features]
        raw = self.trees.predict(own)
        if self.quadratic is not None:
            raw = raw + self.quadratic.predict(own)
        return raw if device in self.devices else raw * self.trust

    def outside(self, columns: Mapping[str, FloatArray]) -> FloatArray:
        """How far each row lies outside of what was seen: largest excess of any feature, in doublings; 0 within."""
        rows = len(next(iter(columns.values())))
        found = np.zeros(rows)
        for name, low, high in zip(self.features, *self.domain, strict=True):
            if name in _DEVICE_FEATURES:
                continue
            slack = _OUTSIDE_SLACK * (high - low) + 1e-6
            found = np.maximum(found, np.maximum(low - slack - columns[name], columns[name] - high - slack))
        return np.maximum(found, 0.0)

    def interval(self, columns: Mapping[str, FloatArray], device: str) -> tuple[FloatArray, FloatArray, BoolArray]:
        """Low and high of log(measured / predicted), and which rows lie outside of what was seen."""
        seen = device if device in self.low else UNSEEN
        regime = np.searchsorted(self.edges, columns["size"])
        low, high = self.low[seen][regime], self.high[seen][regime]
        far = self.outside(columns)
        wider = _WIDER_PER_DOUBLING * np.minimum(far, 8.0)
        if seen != UNSEEN:
            low = np.where(far > 0, np.minimum(low, self.low[UNSEEN][regime]), low)
            high = np.where(far > 0, np.maximum(high, self.high[UNSEEN][regime]), high)
        return low - wider, high + wider, far > 0


_DEVICE_FEATURES: Final = frozenset({"ridge", "cores", "generation"})


def write_model(model: Model, folder: Path) -> None:
    """Write both files; each appears only when complete. The same model gives the same bytes."""
    arrays = {
        **{f"trees.{name}": values for name, values in model.trees.arrays().items()},
        **({f"quadratic.{name}": v for name, v in model.quadratic.arrays().items()} if model.quadratic else {}),
        "edges": model.edges,
        "domain.low": model.domain[0],
        "domain.high": model.domain[1],
        **{f"low.{name}": values for name, values in model.low.items()},
        **{f"high.{name}": values for name, values in model.high.items()},
    }
    path = folder / f"{model.key}.npz"
    temporary = folder / f".{model.key}.npz"
    with temporary.open("wb") as out:
        np.savez_compressed(out, **arrays)  # pyright: ignore[reportArgumentType]
    temporary.replace(path)
    card = {
        "format": FORMAT,
        "key": model.key,
        "features": list(model.features),
        "devices": list(model.devices),
        "trust": model.trust,
        **model.card,
    }
    write_json(card, folder / f"{model.key}.json")


def write_json(value: Any, path: Path) -> None:
    """Write JSON, which appears only when complete."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def write_base(folder: Path, constants: Path | None = None) -> None:
    """Keep the analytical `constants` (None: today's) beside the models that correct them."""
    (folder / BASE_FILE).write_text((constants or CONSTANTS_FILE).read_text(encoding="utf-8"), encoding="utf-8")


def has_base(folder: Path, constants: Path | None = None) -> bool:
    """Whether the models of a folder rest on the analytical `constants` (None: today's)."""
    path, wanted = base_file(folder), constants or CONSTANTS_FILE
    return path is not None and path.read_text(encoding="utf-8") == wanted.read_text(encoding="utf-8")


def read_model(key: str, folder: Path = MODELS) -> Model | None:
    """The model called `key`, None where there is none. Raises `InputError` for a damaged or newer one."""
    path, card_path = folder / f"{key}.npz", folder / f"{key}.json"
    if not path.is_file() or not card_path.is_file():
        return None
    return _read(path, card_path, path.stat().st_mtime_ns)


@cache
def _read(path: Path, card_path: Path, _changed: int) -> Model:
    try:
        card: dict[str, Any] = json.loads(card_path.read_text(encoding="utf-8"))
        if card["format"] != FORMAT:
            raise InputError(f"{card_path} has format {card['format']}; this stablecast reads {FORMAT}", "train again")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        devices: Sequence[str] = card["devices"]
        return Model(
            str(card["key"]),
            tuple(card["features"]),
            Trees.of({name[6:]: values for name, values in arrays.items() if name.startswith("trees.")}),
            tuple(devices),
            float(card["trust"]),
            arrays["edges"],
            {name[4:]: values for name, values in arrays.items() if name.startswith("low.")},
            {name[5:]: values for name, values in arrays.items() if name.startswith("high.")},
            (arrays["domain.low"], arrays["domain.high"]),
            card,
            _quadratic(arrays),
        )
    except (OSError, KeyError, ValueError) as error:
        raise InputError(f"the model file {path} cannot be read: {error}", "train again, or reinstall") from None


def _quadratic(arrays: Mapping[str, Any]) -> Quadratic | None:
    own = {name[10:]: values for name, values in arrays.items() if name.startswith("quadratic.")}
    return Quadratic.of(own) if own else None


def model_keys(folder: Path = MODELS) -> tuple[str, ...]:
    """The models that a folder holds."""
    return tuple(sorted(path.stem for path in folder.glob("*.npz")))
