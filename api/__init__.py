"""stablecast: one compiler IR in, every accelerator out.

    import stablecast

    @stablecast.workload(args=make_args)
    def train_step(state, batch): ...

    prediction = stablecast.predict(train_step, state, batch, on="h100-sxm")

Everything here is loaded when first used, so `import stablecast` is cheap.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from stablecast._capture import capture, capture_hf, capture_torch, load
    from stablecast._chakra import read_chakra, to_chakra
    from stablecast._compare import Comparison, compare
    from stablecast._predict import predict, work
    from stablecast.backends.catalogue import Catalogue
    from stablecast.backends.prediction import Prediction
    from stablecast.frontends.annotations import region, workload
    from stablecast.ir.accounting.registry import register_work
    from stablecast.ir.errors import StablecastError
    from stablecast.ir.workload import Workload

_HOMES = {
    "capture": "stablecast._capture",
    "load": "stablecast._capture",
    "capture_torch": "stablecast._capture",
    "capture_hf": "stablecast._capture",
    "predict": "stablecast._predict",
    "work": "stablecast._predict",
    "to_chakra": "stablecast._chakra",
    "read_chakra": "stablecast._chakra",
    "compare": "stablecast._compare",
    "Comparison": "stablecast._compare",
    "Prediction": "stablecast.backends.prediction",
    "Catalogue": "stablecast.backends.catalogue",
    "region": "stablecast.frontends.annotations",
    "workload": "stablecast.frontends.annotations",
    "register_work": "stablecast.ir.accounting.registry",
    "StablecastError": "stablecast.ir.errors",
    "Workload": "stablecast.ir.workload",
}

__all__ = [
    "Catalogue",
    "Comparison",
    "Prediction",
    "StablecastError",
    "Workload",
    "__version__",
    "capture",
    "capture_hf",
    "capture_torch",
    "compare",
    "load",
    "predict",
    "read_chakra",
    "region",
    "register_work",
    "to_chakra",
    "work",
    "workload",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'stablecast' has no attribute '{name}'")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
