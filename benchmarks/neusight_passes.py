"""NeuSight's training steps, forward and backward pass apart: how far each label's two passes are predicted off.

    python benchmarks/neusight_passes.py [--data FOLDER] [--backend learned|analytical]

The labels of a whole step hold device allocation in some forward passes (the data's README), and errors of the two
passes can cancel. Prints the mean error of each pass by device beside the peer's.
"""

import argparse
from pathlib import Path

from stablecast.backends.registry import parse_choice
from stablecast.validation.suites import Data
from stablecast.validation.suites import neusight_models as graphs
from stablecast.validation.suites.base import number
from stablecast.validation.suites.neusight import DEVICES

ROOT = Path(__file__).parent.parent


def main() -> None:
    """One line a device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--backend", default="learned")
    given = parser.parse_args()
    data = Data(given.data, parse_choice(given.backend))
    errors: dict[str, list[tuple[float, ...]]] = {}
    for label, device, passes in graphs.passes_of_training(data):
        measured = (number(label, "fw_ms") * 1e-3, number(label, "bw_ms") * 1e-3)
        peer = (number(label, "neusight_fw_ms") * 1e-3, number(label, "neusight_bw_ms") * 1e-3)
        found = [abs(time / own - 1.0) for times in (passes, peer) for time, own in zip(times, measured, strict=True)]
        errors.setdefault(device, []).append(tuple(found))
    for device in (name for name in DEVICES.values() if name in errors):
        rows = errors[device]
        ours, theirs = ([100 * sum(row[i] for row in rows) / len(rows) for i in pair] for pair in ((0, 1), (2, 3)))
        print(
            f"{device}: {len(rows)} steps, forward {ours[0]:.1f} %, backward {ours[1]:.1f} % "
            f"(peer {theirs[0]:.1f} %, {theirs[1]:.1f} %)"
        )


if __name__ == "__main__":
    main()
