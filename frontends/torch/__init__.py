"""The PyTorch frontend: a whole training step, captured in one CPU process.

torch is an optional extra: importing this package does not import it, calling one of its functions does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stablecast.frontends.torch.capture import capture_module, capture_torch
    from stablecast.frontends.torch.exported import capture_exported
    from stablecast.frontends.torch.hf import capture_hf

_HOMES = {
    "capture_torch": "capture",
    "capture_module": "capture",
    "capture_hf": "hf",
    "capture_exported": "exported",
}

__all__ = ["capture_exported", "capture_hf", "capture_module", "capture_torch"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
