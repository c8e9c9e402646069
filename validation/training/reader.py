"""The only way for training code to a table: a list of training files, and nothing beside it can be opened."""

import csv
import gzip
import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from stablecast.ir.errors import InputError

Record = Mapping[str, str]

_SXM: Final = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm")
TRAINING_FILES: Final = frozenset(
    {
        *(f"neusight/{name}.csv.gz" for name in ("train_matmul", "train_vector", "train_conv2d", "amd_train_vector")),
        *(f"aiconfigurator/{part}_{device}.csv.gz" for part in ("gemm", "moe") for device in _SXM),
        *(f"aiconfigurator/attention_{part}_{device}.csv.gz" for part in ("context", "generation") for device in _SXM),
        *("vidur/mlp.csv.gz", "deepbench/gemm.csv", "deepbench/conv.csv", "xla_perf_tables/matmul.csv.gz"),
        *(f"tpu_v4_kernels/{part}_fp16.csv" for part in ("matmul", "nonmatmul")),
        "tpu_v4_kernels/matmul_fp16_misaligned.csv",
        *(f"llmservingsim/{part}.csv.gz" for part in ("tpu_v6e_layers", "tpu_v6e_attention", "gpu_dense")),
    }
)
"""Every file that a model may learn from. Test tables, labels of whole models and of their operators, and what peers
predicted are not among them, and must never be."""


class TrainingTables:
    """Reads training files under `folder`; `hashes` keeps what was read, `missing` what the folder does not hold."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise InputError(f"there is no folder {folder}", "say where the training tables lie with --data")
        self.folder = folder
        self.hashes: dict[str, str] = {}
        self.missing: list[str] = []

    def read(self, name: str) -> list[Record]:
        """The rows of a training file, none where the folder lacks it.

        Raises `InputError` for any other file, and for a training file's name that leads to another file.
        """
        if name not in TRAINING_FILES:
            raise InputError(f"training does not read {name}", "it is no training file: see TRAINING_FILES")
        path = self.folder / name
        if not path.is_file():
            self.missing.append(name)
            return []
        if path.resolve().name != path.name:
            raise InputError(f"training does not read {path}: it is a link to {path.resolve().name}")
        content = path.read_bytes()
        self.hashes[name] = hashlib.sha256(content).hexdigest()[:12]
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
        return list(csv.DictReader(io.StringIO(text)))
