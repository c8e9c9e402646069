"""Replica groups in HLO text that XLA's own converter misreads."""

import re

import numpy as np
import numpy.typing as npt

from stablecast.ir import groups

_MESH_WITH_IDS = re.compile(
    r"mesh\[(?P<axes>[^\]]*)\], "
    r"device_ids=\((?:\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?|(?P<ids>[\d,]+))\) \{(?P<along>[^}]*)\}"
)


def expand_device_ids(text: str) -> str:
    """`text` with every group over a mesh that reorders its devices written as plain lists.

    The converter to StableHLO keeps such a mesh's axes but drops its `device_ids`.
    """
    known: dict[str, str] = {}

    def plain(match: re.Match[str]) -> str:
        found = known.get(match[0])
        if found is None:
            found = known[match[0]] = _lists(match)
        return found

    return _MESH_WITH_IDS.sub(plain, text) if "device_ids=(" in text else text


def _lists(match: re.Match[str]) -> str:
    axes = [(name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", match["axes"])]
    parts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", match["along"])
    along = [(name, (int(pre), int(size)) if size else None) for name, pre, size in parts]
    wanted = groups.over_parts("mesh", axes, along)
    places = np.arange(wanted.num_devices).reshape(wanted.dims).transpose(wanted.permutation)
    table = _device_ids(match)[places].reshape(wanted.count, wanted.size)
    return "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in table.tolist()) + "}"


def _device_ids(match: re.Match[str]) -> npt.NDArray[np.int64]:
    if match["ids"]:
        return np.array([int(number) for number in match["ids"].split(",")])
    dims = [int(number) for number in match["dims"].split(",")]
    order = [int(number) for number in match["order"].split(",")] if match["order"] else list(range(len(dims)))
    return np.arange(int(np.prod(dims))).reshape(dims).transpose(order).reshape(-1)
