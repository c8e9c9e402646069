"""Writes the golden file of the accuracy gate from a run of every suite.

    python benchmarks/accuracy_golden.py [DATA]

Run it after a change that is meant to move accuracy, and commit the file with it. `noise` is what a group may get
worse before the gate fails: half the width of the bootstrap interval of its mean error, at least two points.
"""

import json
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

import stablecast
from stablecast.validation.accuracy import Summary, append_log, run_accuracy

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "validation" / "golden" / "accuracy.json"
LEAST_NOISE = 0.02


def _group(summary: Summary) -> dict[str, object]:
    stats = summary.stats
    width = (stats.interval.high - stats.interval.low) / 2 if stats.interval else 0.0
    return {
        "suite": summary.suite,
        "group": summary.name,
        "path": summary.path,
        "rows": stats.count,
        "mape": round(stats.mape, 4),
        "median": round(stats.median, 4),
        "noise": round(max(width, LEAST_NOISE), 4),
    }


def main() -> None:
    """Score every suite, log the looks at test sets, and write the file."""
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT.parent / "shared" / "data"
    report = run_accuracy("all", data, "analytical")
    append_log(report, ROOT / "docs" / "accuracy_log.csv")
    golden = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "stablecast": stablecast.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "backend": report.backend,
        "models": report.models,
        "data": dict(sorted(report.hashes.items())),
        "groups": [_group(summary) for summary in report.summaries],
    }
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
    print(report)


if __name__ == "__main__":
    main()
