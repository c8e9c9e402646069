"""Writes the golden file of the accuracy gate from a run of the suites, or checks them against it.

    python benchmarks/accuracy_golden.py [--data FOLDER] [--suite all] [--check]

Run it after a change that is meant to move accuracy, read what moved, and commit the file with the change. Groups of
suites that did not run (another `--suite`, no data, no timm) stay as they are. `--check` writes nothing and leaves with
1 where a group got worse. Every run appends its looks at test sets to `docs/accuracy_log.csv`.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import stablecast
from stablecast.validation import gate
from stablecast.validation.accuracy import append_log, run_accuracy

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "validation" / "golden" / "accuracy.json"


def main() -> int:
    """Score the suites, log the looks at test sets, say what moved, and write the file."""
    parser = argparse.ArgumentParser(description="golden file of the accuracy gate")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--suite", default="all")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    before = json.loads(GOLDEN.read_text(encoding="utf-8"))
    began = time.process_time()
    report = run_accuracy(options.suite, options.data, before["backend"], progress=lambda what: print(what, flush=True))
    append_log(report, ROOT / "docs" / "accuracy_log.csv")
    print(report)
    ran = sorted({row.suite for row in report.rows})
    found = gate.verdicts(before, report, ran)
    print(gate.differences(found))
    print(f"{time.process_time() - began:.0f} CPU seconds")
    if options.check:
        return int(any(verdict.worse for verdict in found))
    GOLDEN.write_text(gate.write(gate.golden_of(report, stablecast.__version__, before)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
