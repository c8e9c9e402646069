import json
import subprocess
import sys
from pathlib import Path

import pytest


def test_benchmark_runs(tmp_path: Path) -> None:
    script = next(
        (
            folder / "benchmarks" / "chakra_codec_speed.py"
            for folder in Path(__file__).parents
            if (folder / "benchmarks").is_dir()
        ),
        Path("absent"),
    )
    if not script.is_file():
        pytest.skip("benchmarks are not beside the tests")
    command = [sys.executable, str(script), "--ranks", "64", "--layers", "4", "--folder", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)
    assert figures["ranks"] == 64
    assert figures["check_ok"] is True
    assert figures["nodes"] > 64 * 40
