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
    from stablecast._chakra import chakra_from_traces, read_chakra, to_chakra
    from stablecast._compare import Comparison, compare
    from stablecast._predict import predict, work
    from stablecast._validate import validate
    from stablecast.backends.catalogue import Catalogue
    from stablecast.backends.prediction import Prediction
    from stablecast.frontends.annotations import region, workload
    from stablecast.frontends.traces import read_trace
    from stablecast.ir.accounting.registry import register_work
    from stablecast.ir.errors import StablecastError
    from stablecast.ir.trace_events import TraceEvents
    from stablecast.ir.workload import Workload
    from stablecast.validation.report import ValidationReport

_HOMES = {
    "capture": "stablecast._capture",
    "load": "stablecast._capture",
    "capture_torch": "stablecast._capture",
    "capture_hf": "stablecast._capture",
    "predict": "stablecast._predict",
    "work": "stablecast._predict",
    "to_chakra": "stablecast._chakra",
    "read_chakra": "stablecast._chakra",
    "chakra_from_traces": "stablecast._chakra",
    "validate": "stablecast._validate",
    "read_trace": "stablecast.frontends.traces",
    "ValidationReport": "stablecast.validation.report",
    "TraceEvents": "stablecast.ir.trace_events",
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
    "TraceEvents",
    "ValidationReport",
    "Workload",
    "__version__",
    "capture",
    "capture_hf",
    "capture_torch",
    "chakra_from_traces",
    "compare",
    "load",
    "predict",
    "read_chakra",
    "read_trace",
    "region",
    "register_work",
    "to_chakra",
    "validate",
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
