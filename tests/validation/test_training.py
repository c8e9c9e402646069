"""Training: what it may read, and that the same tables give the same models."""

import ast
import csv
import gzip
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import stablecast.validation.training
from stablecast.backends import kernel_specs as specs
from stablecast.backends.analytical.fitting import growing_cost
from stablecast.backends.catalogue import Catalogue
from stablecast.backends.learned import frame
from stablecast.backends.learned.rates import Rates
from stablecast.ir.errors import InputError
from stablecast.ir.kernels import KernelTable
from stablecast.validation.suites import neusight
from stablecast.validation.training import run
from stablecast.validation.training.reader import TRAINING_FILES, TrainingTables
from stablecast.validation.training.sources import sources

_TEST_FILES = (
    "neusight/test_matmul.csv.gz",
    "neusight/test_vector.csv.gz",
    "neusight/amd_test_matmul.csv.gz",
    "neusight/e2e_labels.csv",
    "neusight/per_op_labels.csv.gz",
    "neusight/h100_fp16_bmm.csv",
    "llmcompass/ops.csv",
    "llmcompass/gpt3_layer_tp4.csv",
)


@pytest.mark.parametrize("name", [*_TEST_FILES, "neusight/../neusight/test_matmul.csv.gz"])
def test_test_files_are_refused(tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("device,latency_ms\n")
    with pytest.raises(InputError, match="training does not read"):
        TrainingTables(tmp_path).read(name)


def test_no_training_file_is_a_test_file() -> None:
    assert not TRAINING_FILES & set(_TEST_FILES)
    assert not [name for name in TRAINING_FILES if "label" in name or "/test" in name or "_test" in name]


def test_a_link_does_not_help(tmp_path: Path) -> None:
    (tmp_path / "vidur").mkdir()
    (tmp_path / "secret.csv.gz").write_bytes(gzip.compress(b"gpu\n"))
    (tmp_path / "vidur" / "mlp.csv.gz").symlink_to(tmp_path / "secret.csv.gz")
    with pytest.raises(InputError, match="it is a link"):
        TrainingTables(tmp_path).read("vidur/mlp.csv.gz")


def test_only_the_reader_opens_files() -> None:
    """No other module of the package calls anything that reads a file."""
    for folder in stablecast.validation.training.__path__:
        for path in Path(folder).glob("*.py"):
            if path.name == "reader.py":
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                called = node.func if isinstance(node, ast.Call) else None
                name = getattr(called, "attr", getattr(called, "id", ""))
                assert name not in {"open", "read_bytes", "read_text", "read_csv", "genfromtxt", "loadtxt"}, path


def _tables(folder: Path) -> Path:
    """A made-up table of 150 products on an A100."""
    (folder / "aiconfigurator").mkdir(parents=True)
    generator = np.random.default_rng(1)
    with gzip.open(folder / "aiconfigurator" / "gemm_a100_sxm.csv.gz", "wt", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["device", "framework", "version", "dtype", "m", "n", "k", "latency_us"])
        for _ in range(150):
            m, n, k = (int(2 ** generator.uniform(5, 12)) for _ in range(3))
            latency = 3.0 + 2.0 * m * n * k / 230e6 * generator.uniform(0.95, 1.05)
            writer.writerow(["A100-SXM-80GB", "trtllm", "1", "bfloat16", m, n, k, f"{latency:.4f}"])
    return folder


def test_the_same_tables_give_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn", reason="training needs scikit-learn")
    from stablecast.validation.training.run import SETTINGS, train

    few = replace(SETTINGS["matmul-half-gpu"], trees=30)
    monkeypatch.setattr("stablecast.validation.training.run.SETTINGS", {"matmul-half-gpu": few})
    data = _tables(tmp_path / "data")
    results = [train(data, (), tmp_path / name, date="2026-01-01") for name in ("first", "second")]
    names = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert names == ["base.yaml", "devices.json", "matmul-half-gpu.json", "matmul-half-gpu.npz"]
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    card = results[0].models[0].card
    assert card["seen_devices"]["a100-sxm-80gb"]["mape"] < 0.15
    assert 0.6 < card["coverage"]["a100-sxm-80gb"]["covered"] <= 1.0
    assert "matmul-half-gpu" in results[0].summary()
    assert results[0].missing


def test_a_folder_is_trained_again_on_the_constants_that_it_rests_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the analytical backend's own constants are by then: other launches than today's give other models."""
    pytest.importorskip("sklearn", reason="training needs scikit-learn")
    from stablecast.backends.analytical.constants import CONSTANTS_FILE
    from stablecast.validation.training.run import SETTINGS, train

    few = replace(SETTINGS["matmul-half-gpu"], trees=30)
    monkeypatch.setattr("stablecast.validation.training.run.SETTINGS", {"matmul-half-gpu": few})
    data, older = _tables(tmp_path / "data"), tmp_path / "older.yaml"
    text = CONSTANTS_FILE.read_text()
    older.write_text(re.sub(r"(?m)^(  launch: \{value: )[\d.e-]+", r"\g<1>9e-06", text))
    assert older.read_text() != text
    train(data, (), tmp_path / "today", date="2026-01-01")
    train(data, (), tmp_path / "first", date="2026-01-01", base=older)
    train(data, (), tmp_path / "again", date="2026-01-01", base=tmp_path / "first" / "base.yaml")
    written = sorted(path.name for path in (tmp_path / "first").iterdir())
    same = [(tmp_path / "first" / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in written]
    assert written
    assert all(same)
    today, first = ((tmp_path / name / "matmul-half-gpu.npz").read_bytes() for name in ("today", "first"))
    assert today != first


def test_one_family_is_not_trained_on_other_constants(tmp_path: Path) -> None:
    from stablecast.validation.training.run import train

    data = _tables(tmp_path / "data")
    (tmp_path / "devices.json").write_text("{}")
    (tmp_path / "base.yaml").write_text("gpu: {}\n")
    with pytest.raises(InputError, match="rest on other analytical constants"):
        train(data, ("matmul",), tmp_path)


def test_unknown_names_and_empty_folders(tmp_path: Path) -> None:
    from stablecast.validation.training.run import train

    with pytest.raises(InputError, match="no model is called 'matmull'"):
        train(tmp_path, ("matmull",), tmp_path / "out")
    with pytest.raises(InputError, match="holds no training table"):
        train(tmp_path, (), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_family_reads_what_every_sustained_share_comes_from() -> None:
    """Else a model trained alone would differ from the one that a whole run gives."""
    names = {source.name for source in run._chosen(list(sources()), ("matmul-half",))}
    assert {"vidur add", "neusight train vector", "neusight train linear", "vidur mlp_up_proj"} <= names
    assert not {"vidur emb", "aiconfigurator moe", "neusight train bmm"} & names


def test_timing_that_grew_along_a_table_is_taken_off_row_by_row() -> None:
    """Convolutions whose host time grows from 50 to 250 us while the table is taken: found within 10 us."""
    device = Catalogue().device("v100-pcie")
    generator = np.random.default_rng(0)
    channels = np.exp2(generator.uniform(3, 9, (640, 2))).astype(int).tolist()
    rows = [neusight.plain(specs.conv2d(device, "f32", 8, 14, 14, c, co, 3, 3, 1, 1)) for c, co in channels]
    table, place = KernelTable.of(rows), np.arange(640) / 640
    base = frame.base_of(table, device, Rates({}))
    added = 50e-6 + 200e-6 * place
    found = growing_cost(added, base.core_s, place)
    assert np.abs(found - added).max() < 10e-6
