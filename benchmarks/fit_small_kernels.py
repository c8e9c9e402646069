"""Constants of kernels that are too small for any rate to matter (part of `fit_analytical.py`).

TPUs: what a kernel costs before its first element, and how much of their issue slots the lanes fill. GPUs: what chains
of dependent accesses cost, from eager layers of a few tokens. In the table that has them (LLMServingSim's H100, A6000
and RTX 3090, times of kernels without the host) three facts of PyTorch's sources tell their parts apart:

- an activation is two element-wise kernels, which gives the time of one;
- a look-up of up to 16 rows is one kernel that fetches one row after the other (`indexSelectSmallIndex`), each from
  another place of a table of a gigabyte: its time grows by one access with each row;
- a layer norm is one kernel; the RMS norm of Llama and Mixtral is eight, seven of them element-wise. What is left is
  what a small reduction takes beyond an element-wise kernel: its tree of shared memory, shuffles and barriers.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from stablecast.backends.analytical.constants import architecture_key
from stablecast.backends.analytical.fitting import Fit
from stablecast.backends.catalogue import Catalogue
from stablecast.backends.device import Device

_PLAIN_ACTIVATIONS: Final = ("relu", "leaky_relu", "parametric_relu", "linear")
_EXPONENTIAL_ACTIVATIONS: Final = ("elu", "selu")
SMALL_ELEMENTS: Final = 1024
SLOPE_ELEMENTS: Final = 65536

FEW_TOKENS: Final = 16
BOARDS: Final = {"H100": "h100-sxm", "A6000": "a6000", "RTX3090": "rtx-3090"}
ACTIVATION_KERNELS: Final = 2
NORM_KERNELS: Final = {"meta-llama/Llama-3.1-8B": 8, "meta-llama/Llama-3.1-70B": 8, "mistralai/Mixtral-8x7B-v0.1": 8}
"""Kernels of a norm by model: of an RMS norm; a layer norm (Phi) is one."""

NORMS: Final = ("input_layernorm", "post_layernorm", "final_layernorm")
TABLE: Final = "llmservingsim eager layers of up to 16 tokens"

Times = dict[tuple[str, str, str, int], float]
"""(device, model, layer, tokens) -> seconds, unsplit layers of few tokens."""


def few_token_times(records: Sequence[dict[str, str]]) -> Times:
    """The layers that are used, out of the whole table."""
    return {
        (r["device"], r["model"], r["layer"], int(r["tokens"])): float(r["latency_ns"]) * 1e-9
        for r in records
        if int(r["tokens"]) <= FEW_TOKENS and r["tp_size"] == "1"
    }


def row_latency(times: Times, device: str) -> tuple[float, int]:
    """Seconds by which a look-up grows with each row, the median over models, and how many rows of the table say so."""
    slopes: list[float] = []
    used = 0
    for model in sorted({key[1] for key in times if key[0] == device}):
        points = [(n, times[device, model, "embedding", n]) for n in range(1, FEW_TOKENS + 1)]
        used += len(points)
        slopes.append(float(np.polyfit(*np.array(points).T, 1)[0]))
    return float(np.median(slopes)), used


def reduction_latency(times: Times, device: str) -> tuple[float, int]:
    """Seconds that a small reduction takes beyond an element-wise kernel, the median over norms, and their number."""
    found: list[float] = []
    for (board, model, layer, tokens), seconds in times.items():
        one = times.get((board, model, "act_fn", tokens))
        if board == device and layer in NORMS and one is not None:
            found.append(seconds - NORM_KERNELS.get(model, 1) * one / ACTIVATION_KERNELS)
    return float(np.median(found)), len(found)


def set_latencies(fit: Fit, records: Sequence[dict[str, str]]) -> None:
    """`latency.row` and `latency.reduce` of each measured architecture, and of GPUs the median of these."""
    times = few_token_times(records)
    for name, measure in (("latency.row", row_latency), ("latency.reduce", reduction_latency)):
        of: dict[str, list[tuple[float, int]]] = {}
        for label, board in BOARDS.items():
            of.setdefault(architecture_key(Catalogue().device(board)), []).append(measure(times, label))
        for key, found in of.items():
            fit.values[key][name] = float(np.median([value for value, _ in found]))
            fit.sources[key, name] = f"fitted: {TABLE}; {sum(count for _, count in found)} rows"
        fit.values["gpu"][name] = float(np.median([fit.values[key][name] for key in of]))
        fit.sources["gpu", name] = f"median of {', '.join(sorted(of))}"


def set_lanes(fit: Fit, records: Sequence[dict[str, str]], device: Device) -> None:
    """What a TPU kernel costs before its first element, and how much of their issue slots the lanes fill.

    From one-operand activations on a TPU v4: the time of the smallest, and by how much the slope over the elements of
    those with an exponential exceeds that of those without (operands and results are the same, f16 conversions
    included, and other operations hide behind these). Softmax is made of exponentials; the logistic function and tanh,
    whose exact forms divide, take longer.
    """
    small = [float(r["mean_us"]) * 1e-6 for r in records if float(r["elements"]) <= SMALL_ELEMENTS]
    fit.values["tpu"]["launch"] = float(np.median(small))
    fit.sources["tpu", "launch"] = f"fitted: tpu_v4 element-wise f16 up to {SMALL_ELEMENTS} elements; {len(small)} rows"
    slopes: dict[str, float] = {}
    used = 0
    for name in (*_PLAIN_ACTIVATIONS, *_EXPONENTIAL_ACTIVATIONS):
        points = [
            (float(r["elements"]), float(r["mean_us"]) * 1e-6)
            for r in records
            if r["series"] == "data_act2" and r["op"] == name and float(r["elements"]) >= SLOPE_ELEMENTS
        ]
        used += len(points)
        slopes[name] = float(np.polyfit(*np.array(points).T, 1)[0])
    plain = float(np.mean([slopes[name] for name in _PLAIN_ACTIVATIONS]))
    extra = float(np.mean([slopes[name] for name in _EXPONENTIAL_ACTIVATIONS])) - plain
    operations = fit.values["tpu"]["transcendental"]
    fit.values["tpu"]["vector"] = min(1.0, operations / (extra * device.vector_rate("f32").value))
    fit.sources["tpu", "vector"] = f"fitted: tpu_v4 activations f16, exponentials over plain; {used} rows"
