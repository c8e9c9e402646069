"""A quadratic in the features, for models whose tables are too coarse for trees to interpolate."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stablecast.backends.estimates import FloatArray


@dataclass(frozen=True)
class Quadratic:
    """constant + sum of linear and pairwise terms of standardised features, each held within what was seen.

    `mean`, `scale`, `low`, `high`: a value a feature; `weights`: of the terms, in the order of `terms`.
    """

    mean: FloatArray
    scale: FloatArray
    low: FloatArray
    high: FloatArray
    constant: float
    weights: FloatArray

    def predict(self, columns: Sequence[FloatArray]) -> FloatArray:
        """The value for every row; `columns`: one array a feature."""
        matrix = np.clip(np.stack(list(columns), axis=1), self.low, self.high)
        return np.asarray(self.constant + terms((matrix - self.mean) / self.scale) @ self.weights)

    def arrays(self) -> dict[str, Any]:
        """Everything as arrays, for a file."""
        names = ("mean", "scale", "low", "high", "weights")
        return {"constant": np.array(self.constant), **{name: getattr(self, name) for name in names}}

    @staticmethod
    def of(arrays: dict[str, Any]) -> "Quadratic":
        """From what `arrays` gave."""
        mean, scale, low, high = (arrays[name] for name in ("mean", "scale", "low", "high"))
        return Quadratic(mean, scale, low, high, float(arrays["constant"]), arrays["weights"])


def terms(matrix: FloatArray) -> FloatArray:
    """Linear terms, then products of each feature with itself and those after it; a column each."""
    width = matrix.shape[1]
    pairs = [matrix[:, number : number + 1] * matrix[:, number:] for number in range(width)]
    return np.concatenate([matrix, *pairs], axis=1)


def fit_quadratic(matrix: FloatArray, target: FloatArray, weight: FloatArray, damping: float) -> Quadratic:
    """Ridge regression on the terms; features that never change count as constant."""
    from sklearn.linear_model import Ridge

    mean, scale = matrix.mean(axis=0), matrix.std(axis=0)
    scale = np.where(scale > 1e-9, scale, 1.0)
    model: Any = Ridge(damping).fit(terms((matrix - mean) / scale), target, sample_weight=weight)
    return Quadratic(
        mean, scale, matrix.min(axis=0), matrix.max(axis=0), float(model.intercept_), np.asarray(model.coef_)
    )
