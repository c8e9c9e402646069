"""Trees as plain arrays say what scikit-learn says."""

from typing import Any

import numpy as np
import pytest

from stablecast.backends.learned.trees import Trees, pack


@pytest.fixture(scope="module")
def fitted() -> tuple[Any, Any]:
    ensemble = pytest.importorskip("sklearn.ensemble", reason="training needs scikit-learn")
    generator = np.random.default_rng(0)
    matrix = generator.normal(size=(600, 4))
    matrix[:, 1] = np.round(matrix[:, 1])
    target = np.sin(matrix[:, 0]) + matrix[:, 1] * matrix[:, 2]
    model = ensemble.HistGradientBoostingRegressor(
        max_iter=20, max_leaf_nodes=31, min_samples_leaf=5, early_stopping=False, random_state=0
    )
    return model.fit(matrix, target), matrix


def test_same_as_scikit_learn(fitted: tuple[Any, Any]) -> None:
    model, matrix = fitted
    trees = pack(model, 4)
    wild = np.concatenate([matrix, matrix * 3.0])
    assert trees.count == 20
    assert trees.predict(list(wild.T)) == pytest.approx(model.predict(wild), abs=1e-6)


def test_arrays_round_trip(fitted: tuple[Any, Any]) -> None:
    model, matrix = fitted
    trees = pack(model, 4)
    again = Trees.of(trees.arrays())
    assert np.array_equal(again.predict(list(matrix.T)), trees.predict(list(matrix.T)))


def test_one_tree_by_hand() -> None:
    """x <= 1 gives 10; else y <= 0 gives 20, and the rest 30."""
    trees = Trees(
        0.5,
        (np.array([1.0]), np.array([0.0])),
        np.array([0, 0], dtype=np.uint16),
        np.array([0, 1], dtype=np.uint8),
        np.array([0, 0], dtype=np.uint8),
        np.array([0b001, 0b010], dtype=np.uint32),
        np.array([10, 20, 30], dtype=np.float32),
        np.array([0], dtype=np.int32),
    )
    x, y = np.array([1.0, 1.1, 1.1, -5.0]), np.array([9.0, 0.0, 0.1, -1.0])
    assert trees.predict([x, y]).tolist() == [10.5, 20.5, 30.5, 10.5]


def test_no_trees_give_the_base() -> None:
    nothing = Trees(
        2.0,
        (np.zeros(0),),
        *(np.zeros(0, dtype=kind) for kind in (np.uint16, np.uint8, np.uint8, np.uint32, np.float32, np.int32)),
    )
    assert nothing.predict([np.array([1.0, 2.0])]).tolist() == [2.0, 2.0]
