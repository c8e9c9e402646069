"""Training of one model: grouped cross-validation, devices left out one chip at a time, intervals, card.

scikit-learn is imported here and nowhere else, and only when a model is trained.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stablecast.backends.device import Device
from stablecast.backends.estimates import FloatArray
from stablecast.backends.learned import frame
from stablecast.backends.learned.rates import Rates, chip_of
from stablecast.backends.learned.smooth import Quadratic, fit_quadratic
from stablecast.backends.learned.store import UNSEEN, Model, key_of
from stablecast.backends.learned.trees import pack
from stablecast.ir.kernels import KernelTable

SEED: Final = 0
FOLDS: Final = 3
FOLDS_OF_FEW: Final = 5
_FEW_ROWS: Final = 15000
_FEW_GROUPS: Final = 300
_ACROSS_ROWS: Final = 40000
TRUSTS: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
INTERVAL: Final = 0.8
_REGIMES: Final = 6
_REGIME_ROWS_MIN: Final = 60
_RANGE_FOLDS: Final = 4
_COVERED_LEAST: Final = 0.75
_LEAST_SHARE: Final = 0.2
_WEIGHT_MIN: Final = 0.02


@dataclass(frozen=True)
class Measured:
    """Measured kernels of one table on one device, all of one kind and family.

    `extra_s`: what the table's way of timing adds to a kernel, per row, and `timing`: by what it is known. `groups`:
    rows of one group are never split between training and test. `rates`: what the device sustains;
    `ruled`: the same by the rule, from other chips only.
    """

    table: str
    device: Device
    kernels: KernelTable
    measured_s: FloatArray
    extra_s: FloatArray
    groups: npt.NDArray[np.int64]
    rates: Rates
    ruled: Rates
    timing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Samples:
    """What the trees learn from: features, target log(time / base) with its weight, and where each row comes from."""

    columns: Mapping[str, FloatArray]
    target: FloatArray
    weight: FloatArray
    base_s: FloatArray
    extra_s: FloatArray
    measured_s: FloatArray
    device: npt.NDArray[np.str_]
    table: npt.NDArray[np.str_]
    groups: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.target)

    def ratio(self, correction: FloatArray) -> FloatArray:
        """Predicted over measured, the way of timing included."""
        return (self.base_s * np.exp(correction) + self.extra_s) / self.measured_s


def samples_of(kind: str, data: Sequence[Measured], ruled: bool = False) -> Samples:
    """The samples of all tables; `ruled`: with clocks from the rule, as for a device that nobody measured."""
    parts = [_samples(kind, one, one.ruled if ruled else one.rates) for one in data]
    names = list(parts[0].columns)
    return Samples(
        {name: np.concatenate([part.columns[name] for part in parts]) for name in names},
        *(np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS),
    )


_ARRAYS: Final = ("target", "weight", "base_s", "extra_s", "measured_s", "device", "table", "groups")


def _samples(kind: str, data: Measured, rates: Rates) -> Samples:
    base = frame.base_of(data.kernels, data.device, rates)
    every = np.ones(len(data.kernels), dtype=np.bool_)
    columns = frame.features(kind, data.kernels, base, every, data.device)
    base_s = base.launch_s + base.core_s
    own = np.maximum(data.measured_s - data.extra_s, _LEAST_SHARE * np.minimum(data.measured_s, base_s))
    # how much of the measured time is the kernel's own: that much the target moves it
    weight = np.clip(base_s / np.maximum(data.measured_s, base_s), _WEIGHT_MIN, 1.0)
    rows = len(data.kernels)
    return Samples(
        columns,
        np.log(own / base_s),
        weight,
        base_s,
        data.extra_s,
        data.measured_s,
        np.full(rows, data.device.name, dtype="<U32"),
        np.full(rows, data.table, dtype="<U48"),
        data.groups,
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """Size and speed of the trees; chosen on training tables by rows left out.

    `quadratic`: damping of a quadratic that the trees then correct; 0 for none. `features`: share of the features,
    drawn anew for each split, that a split chooses from.
    """

    trees: int = 300
    leaves: int = 31
    rate: float = 0.1
    least_rows: int = 10
    l2: float = 1.0
    quadratic: float = 0.0
    features: float = 1.0


def regressor(setting: Setting) -> Any:
    """A fresh scikit-learn regressor."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    make: Any = HistGradientBoostingRegressor
    return make(
        loss="squared_error",
        max_iter=setting.trees,
        max_leaf_nodes=setting.leaves,
        learning_rate=setting.rate,
        min_samples_leaf=setting.least_rows,
        l2_regularization=setting.l2,
        max_features=setting.features,
        early_stopping=False,
        random_state=SEED,
    )


@dataclass(frozen=True, slots=True)
class Fitted:
    """What was fitted: trees, and the quadratic under them where the setting asks for one."""

    trees: Any
    quadratic: Quadratic | None

    def predict(self, matrix: FloatArray) -> FloatArray:
        """The correction of every row of a matrix of features."""
        found = np.asarray(self.trees.predict(matrix), dtype=np.float64)
        return found if self.quadratic is None else found + self.quadratic.predict(list(matrix.T))


def fit(samples: Samples, chosen: npt.NDArray[np.bool_], setting: Setting) -> Fitted:
    """A model fitted on the chosen rows."""
    matrix, target, weight = matrix_of(samples)[chosen], samples.target[chosen], samples.weight[chosen]
    quadratic = None
    if setting.quadratic:
        quadratic = fit_quadratic(matrix, target, weight, setting.quadratic)
        target = target - quadratic.predict(list(matrix.T))
    return Fitted(regressor(setting).fit(matrix, target, sample_weight=weight), quadratic)


def matrix_of(samples: Samples) -> FloatArray:
    """Features as columns of a matrix."""
    return np.stack(list(samples.columns.values()), axis=1)


def left_out(samples: Samples, setting: Setting, folds: int = FOLDS) -> FloatArray:
    """The correction of every row by a model that has not seen its group."""
    fold = _fold_of(samples.groups, folds)
    matrix = matrix_of(samples)
    found = np.zeros(len(samples))
    for number in range(folds):
        test = fold == number
        if test.any() and not test.all():
            found[test] = fit(samples, ~test, setting).predict(matrix[test])
    return found


def _fold_of(groups: npt.NDArray[np.int64], folds: int) -> npt.NDArray[np.int64]:
    unique, inverse = np.unique(groups, return_inverse=True)
    order = np.random.default_rng(SEED).permutation(len(unique))
    return np.asarray(order[inverse] % folds, dtype=np.int64)


def chips_left_out(samples: Samples, ruled: Samples, setting: Setting) -> FloatArray:
    """The correction of every row by a model that has not seen its chip, with clocks from the rule; NaN where no other
    chip is left to train on. Of long tables a part is trained on: these models are only scored."""
    chips = np.array([chip_of(str(name)) for name in samples.device])
    found = np.full(len(samples), np.nan)
    matrix = matrix_of(ruled)
    kept = np.random.default_rng(SEED).permutation(len(samples)) < _ACROSS_ROWS
    names = np.unique(chips)
    for chip in names if len(names) > 1 else ():
        test = chips == chip
        found[test] = fit(samples, ~test & kept, setting).predict(matrix[test])
    return found


def train_model(kind: str, family: str, data: Sequence[Measured], setting: Setting) -> Model:
    """A model with its intervals and its card.

    Where there are many rows, fewer models are scored; those without a chip have half as many, faster trees.
    """
    samples, ruled = samples_of(kind, data), samples_of(kind, data, ruled=True)
    quick = replace(setting, trees=setting.trees // 2, rate=1.5 * setting.rate)
    few = len(samples) < _FEW_ROWS
    few_groups = len(np.unique(samples.groups)) < _FEW_GROUPS
    folds = FOLDS_OF_FEW if few or few_groups else FOLDS
    inside = left_out(samples, setting, folds)
    across = chips_left_out(samples, ruled, quick)
    trust, unseen = _trust(ruled, across)
    edges = _edges(samples.columns["size"])
    low, high = _intervals(samples, inside, ruled, unseen, edges)
    everything = np.ones(len(samples), dtype=np.bool_)
    fitted = fit(samples, everything, setting)
    trees = pack(fitted.trees, len(samples.columns))
    columns = list(samples.columns.values())
    devices = tuple(sorted(set(map(str, samples.device))))
    platform = data[0].device.kind
    card = {
        "kind": kind,
        "family": family,
        "platform": platform,
        "setting": {name: getattr(setting, name) for name in Setting.__slots__},
        "data": _data_of(samples),
        "splits": f"{folds} folds by group (see `group` of each table), and one chip left out at a time",
        "seen_devices": _errors(samples, samples.ratio(inside)),
        "unseen_devices": _errors(ruled, ruled.ratio(unseen)) if np.isfinite(across).all() else {},
        "by_table": _by_table(samples, samples.ratio(inside)),
        "coverage": _coverage(samples, inside, edges),
        "domain": {name: [float(values.min()), float(values.max())] for name, values in samples.columns.items()},
    }
    return Model(
        key_of(kind, family, platform),
        tuple(samples.columns),
        trees,
        devices,
        trust,
        edges,
        low,
        high,
        (np.array([values.min() for values in columns]), np.array([values.max() for values in columns])),
        card,
        fitted.quadratic,
    )


def _trust(ruled: Samples, across: FloatArray) -> tuple[float, FloatArray]:
    """The share of the correction that serves devices left out best, and the correction damped by it."""
    if not np.isfinite(across).all():
        return 0.5, np.zeros(len(across))
    losses = [np.mean(np.abs(np.log(ruled.ratio(across * share)))) for share in TRUSTS]
    best = TRUSTS[int(np.argmin(losses))]
    return best, across * best


def _edges(size: FloatArray) -> FloatArray:
    return np.unique(np.quantile(size, np.linspace(0, 1, _REGIMES + 1)[1:-1]))


def _intervals(
    samples: Samples, inside: FloatArray, ruled: Samples, unseen: FloatArray, edges: FloatArray
) -> tuple[dict[str, FloatArray], dict[str, FloatArray]]:
    """Split-conformal quantiles of log(measured / predicted) by device and regime, from rows left out of training."""
    regime = np.searchsorted(edges, samples.columns["size"])
    score = -np.log(samples.ratio(inside))
    low: dict[str, FloatArray] = {}
    high: dict[str, FloatArray] = {}
    for device in np.unique(samples.device):
        mine = samples.device == device
        found = _calibrated(score[mine], regime[mine], samples.groups[mine], len(edges) + 1)
        low[str(device)], high[str(device)] = found
    low[UNSEEN], high[UNSEEN] = _by_regime(-np.log(ruled.ratio(unseen)), regime, len(edges) + 1)
    return low, high


def _calibrated(
    score: FloatArray, regime: npt.NDArray[np.int64], groups: npt.NDArray[np.int64], count: int
) -> tuple[FloatArray, FloatArray]:
    """Quantiles by regime; wider where those of some groups hold too few rows of the others, by the quantile of how far
    these lie outside (Romano et al., "Conformalized quantile regression", NeurIPS 2019)."""
    low, high = _by_regime(score, regime, count)
    fold = _fold_of(groups, _RANGE_FOLDS)
    outside = np.zeros(0)
    for asked in (fold == number for number in range(_RANGE_FOLDS)):
        if asked.any() and not asked.all():
            lows, highs = (bound[regime[asked]] for bound in _by_regime(score[~asked], regime[~asked], count))
            outside = np.append(outside, np.maximum(lows - score[asked], score[asked] - highs))
    if not len(outside) or np.mean(outside <= 0.0) >= _COVERED_LEAST:
        return low, high
    wider = max(0.0, float(np.quantile(outside, min(1.0, INTERVAL * (1.0 + 1.0 / len(outside))))))
    return low - wider, high + wider


def _by_regime(score: FloatArray, regime: npt.NDArray[np.int64], count: int) -> tuple[FloatArray, FloatArray]:
    low, high = np.zeros(count), np.zeros(count)
    for number in range(count):
        own = score[regime == number]
        own = own if len(own) >= _REGIME_ROWS_MIN else score
        # (n + 1) / n: the conformal quantile of a finite sample
        tail = max(0.0, 0.5 * (1.0 - INTERVAL * (1.0 + 1.0 / max(len(own), 1))))
        low[number], high[number] = np.quantile(own, tail), np.quantile(own, 1.0 - tail)
    return np.minimum(low, 0.0), np.maximum(high, 0.0)


def _coverage(samples: Samples, inside: FloatArray, edges: FloatArray) -> dict[str, Any]:
    """Share of left-out rows in the interval that the other groups give, and its median half width."""
    regime = np.searchsorted(edges, samples.columns["size"])
    score = -np.log(samples.ratio(inside))
    fold = _fold_of(samples.groups, _RANGE_FOLDS)
    found: dict[str, Any] = {}
    for device in map(str, np.unique(samples.device)):
        held: list[npt.NDArray[np.bool_]] = []
        width: list[FloatArray] = []
        for number in range(_RANGE_FOLDS):
            mine = samples.device == device
            known, asked = mine & (fold != number), mine & (fold == number)
            if known.any() and asked.any():
                low, high = _calibrated(score[known], regime[known], samples.groups[known], len(edges) + 1)
                lows, highs = low[regime[asked]], high[regime[asked]]
                held.append((score[asked] >= lows) & (score[asked] <= highs))
                width.append(0.5 * (np.exp(highs) - np.exp(lows)))
        covered = _round(np.concatenate(held).mean()) if held else 0.0
        half_width = _round(np.median(np.concatenate(width))) if width else 0.0
        found[device] = {"rows": int((samples.device == device).sum()), "covered": covered, "half_width": half_width}
    return found


def _errors(samples: Samples, ratio: FloatArray) -> dict[str, Any]:
    """Errors of left-out rows by device, and by regime of size."""
    found: dict[str, Any] = {}
    regime = np.searchsorted([0.0, 3.0, 6.0], samples.columns["size"])
    names = ("launch", "small", "middle", "large")
    for device in map(str, np.unique(samples.device)):
        mine = samples.device == device
        by_regime = {
            name: error_summary(ratio[mine & (regime == number)])
            for number, name in enumerate(names)
            if (mine & (regime == number)).any()
        }
        found[device] = {**error_summary(ratio[mine]), "by_regime": by_regime}
    return found


def _by_table(samples: Samples, ratio: FloatArray) -> list[dict[str, Any]]:
    """Errors of left-out rows by table and device."""
    found: list[dict[str, Any]] = []
    for table in map(str, np.unique(samples.table)):
        for device in map(str, np.unique(samples.device[samples.table == table])):
            own = (samples.table == table) & (samples.device == device)
            found.append({"table": table, "device": device, **error_summary(ratio[own])})
    return found


def error_summary(ratio: FloatArray) -> dict[str, float]:
    """Rows, mean, median and 90th percentile of |predicted / measured - 1|, and its signed mean."""
    error = np.abs(ratio - 1.0)
    return {
        "rows": len(ratio),
        "mape": _round(error.mean()),
        "median": _round(np.median(error)),
        "p90": _round(np.quantile(error, 0.9)),
        "bias": _round((ratio - 1.0).mean()),
    }


def _round(value: Any) -> float:
    return round(float(value), 4)


def _data_of(samples: Samples) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for table in map(str, np.unique(samples.table)):
        own = samples.table == table
        devices = {str(name): int((own & (samples.device == name)).sum()) for name in np.unique(samples.device[own])}
        found.append({"table": table, "rows": devices, "groups": len(np.unique(samples.groups[own]))})
    return found


def group_number(text: str) -> int:
    """A number for a group's name, the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
