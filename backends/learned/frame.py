"""Rows of a kernel table as the learned models see them: a physical base and dimensionless features."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from stablecast.backends.analytical import classes
from stablecast.backends.analytical.constants import Constant, Constants, constants_for
from stablecast.backends.analytical.rates import matrix_rates, p_norm
from stablecast.backends.analytical.winograd import is_by_weights
from stablecast.backends.device import Device
from stablecast.backends.estimates import BoolArray, FloatArray, TextArray
from stablecast.backends.learned.rates import Rates, family_of_math
from stablecast.ir.kernels import KernelClass, KernelTable

PRODUCTS: Final = ("matmul", "bmm", "conv", "moe")
STREAMS: Final = ("elementwise", "softmax", "layernorm", "reduce", "gather")
ATTENTION: Final = ("attention_prefill", "attention_decode")
KINDS: Final = (*PRODUCTS, *STREAMS, *ATTENTION)
"""Kinds of kernels that can have a model of their own."""

_TILES: Final = ((256, 128), (128, 128), (64, 64))
_POWER: Final = ("power", "power.fma")
"""Constants for devices whose clock under load follows from another's; `Rates` knows that of each device."""

_EXPERT_TILES: Final = (16, 64, 128)
_TINY: Final = 1e-30
_FAMILY_OF_TYPE: Final[Mapping[str, str]] = {"f32": "fp32", "f16": "half", "bf16": "half"}
_SOURCES: Final[Mapping[str, float]] = {"trtllm": 0.0, "vllm": 1.0, "sglang": 2.0, "torch": 3.0, "xla": 4.0}
_GENERATIONS: Final = (
    "sm_52", "gfx900", "sm_60", "sm_61", "sm_70", "sm_75", "gfx908", "sm_80", "sm_86", "gfx90a", "sm_89", "sm_90",
    "gfx942", "sm_100", "sm_103", "gfx950", "sm_120", "tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x",
)  # fmt: skip


def kinds(table: KernelTable) -> TextArray:
    """Which kind of model each row asks for, empty where none does."""
    klass, found = table.klass, np.full(len(table), "", dtype="<U20")
    found[klass == KernelClass.MATMUL] = "matmul"
    found[(klass == KernelClass.MATMUL) & (table.batch > 1)] = "bmm"
    found[klass == KernelClass.CONVOLUTION] = "conv"
    found[klass == KernelClass.MOE] = "moe"
    found[klass == KernelClass.ELEMENTWISE] = "elementwise"
    found[klass == KernelClass.COPY] = "elementwise"  # a copy streams like an operation on one operand
    found[klass == KernelClass.GATHER] = "gather"
    rows = klass == KernelClass.REDUCTION
    whole = rows & (table.reduced > 1) & (table.bytes_written > 0.4 * table.bytes_read)
    found[rows] = "reduce"
    found[whole] = "layernorm"
    found[whole & (table.transcendentals >= 0.5 * table.elems)] = "softmax"
    attends = (klass == KernelClass.ATTENTION) & (table.d > 0)
    found[attends] = "attention_prefill"
    found[attends & (table.phase == "decode")] = "attention_decode"
    found[(table.matmul_flops > 0) & np.isin(found, STREAMS)] = ""
    return found


def families(table: KernelTable, kind: TextArray) -> TextArray:
    """The numeric family of each row: of what multiplies, else of its elements; empty where there is no such family."""
    found = np.full(len(table), "", dtype="<U8")
    streams = np.isin(kind, STREAMS)
    for math in np.unique(table.math[~streams]):
        found[~streams & (table.math == math)] = family_of_math(str(math))
    for element in np.unique(table.out_dtype[streams]):
        found[streams & (table.out_dtype == element)] = _FAMILY_OF_TYPE.get(str(element), "")
    return found


@dataclass(frozen=True, slots=True)
class Base:
    """Physical times of every row, seconds: compute and memory, what overlaps with neither, launch, and the floor.

    `core_s` is compute and memory together; the base prediction is `launch_s + core_s`.
    """

    rows: classes.Rows
    compute_s: FloatArray
    memory_s: FloatArray
    core_s: FloatArray
    launch_s: FloatArray
    floor_s: FloatArray

    @property
    def time_s(self) -> FloatArray:
        return np.maximum(self.launch_s + self.core_s, self.floor_s)


def sustained_constants(device: Device, rates: Rates) -> Constants:
    """The analytical constants of `device` (those that the models rest on, where they say so) with what it is known or
    ruled to sustain in their place, whatever its board's power."""
    constants = constants_for(device)
    named = dict(constants.by_name)
    if rates.base is not None:
        named |= constants_for(device, rates.base).by_name
    named = {name: value for name, value in named.items() if name not in _POWER}
    for name, value in rates.analytical().items():
        named[name] = Constant(value, "learned", device.name)
    return replace(constants, by_name=named)


def base_of(table: KernelTable, device: Device, rates: Rates) -> Base:
    """The base of every row of `table`: the analytical model with the device's sustained rates."""
    constants = sustained_constants(device, rates)
    rows = classes.Rows.of(table, matrix_rates(table.math, table.in_dtype, device), device)
    compute, memory, extra = classes.parts(rows, device, constants)
    memory = memory * _seen_share(table)
    core = p_norm(compute, memory, constants["overlap"]) + extra
    launch = constants["launch"] * np.maximum(rows.launches, 1.0)
    floor = np.maximum(rows.useful / rows.peak, rows.nbytes / device.hbm_bytes_per_s.value)
    return Base(rows, compute, memory, core, launch, floor)


def _seen_share(table: KernelTable) -> FloatArray:
    """Share of the cached keys that one new token reads: those in its window."""
    windowed = (table.window > 0) & (table.phase == "decode") & (table.skv > table.window)
    return np.where(windowed, table.window / np.maximum(table.skv, 1), 1.0)


def features(kind: str, table: KernelTable, base: Base, mask: BoolArray, device: Device) -> dict[str, FloatArray]:
    """Named features of the rows of `kind` that `mask` picks: logarithms to base 2 of ratios and of sizes."""
    found = _regime(base, mask, device)
    if kind in PRODUCTS:
        found |= _product(kind, table, base, mask, device)
    elif kind in STREAMS:
        found |= _stream(table, mask, device)
    else:
        found |= _attention(table, mask, device)
    return found


def _log(values: FloatArray) -> FloatArray:
    return np.log2(np.maximum(values, _TINY))


def _column(table: KernelTable, name: str, mask: BoolArray, least: float = 1.0) -> FloatArray:
    return np.maximum(np.asarray(getattr(table, name)[mask], dtype=np.float64), least)


def _alignment(values: FloatArray) -> FloatArray:
    """How often 2 divides, at most 8 times."""
    whole = np.maximum(values, 1.0).astype(np.int64)
    return np.log2(np.minimum(whole & -whole, 256).astype(np.float64))


def generation(device: Device) -> float:
    """Position of the device's architecture among those known, in order of appearance; a new one comes last."""
    key = constants_for(device).architecture
    return float(_GENERATIONS.index(key) if key in _GENERATIONS else len(_GENERATIONS))


def _regime(base: Base, mask: BoolArray, device: Device) -> dict[str, FloatArray]:
    compute, memory, launch = base.compute_s[mask], base.memory_s[mask], base.launch_s[mask]
    nbytes = base.rows.nbytes[mask]
    cache = device.l2_bytes.value if device.l2_bytes else 1e6
    ones = np.ones(len(compute))
    cores = device.cores.value if device.cores else 1.0
    return {
        "size": _log(base.core_s[mask] / launch),
        "balance": np.clip(_log((compute + 1e-9) / (memory + 1e-9)), -12.0, 12.0),
        "in_cache": _log(nbytes / cache),
        "ridge": ones * np.log2(device.vector_rate("f32").value / device.hbm_bytes_per_s.value),
        "cores": ones * np.log2(cores),
        "generation": ones * generation(device),
        "bf16": (base.rows.table.in_dtype[mask] == "bf16").astype(np.float64),
    }


def _product(kind: str, table: KernelTable, base: Base, mask: BoolArray, device: Device) -> dict[str, FloatArray]:
    batch, m, n, k = (_column(table, name, mask) for name in ("batch", "m", "n", "k"))
    cores = device.cores.value if device.cores else 1.0
    found = {
        **{name: _log(values) for name, values in (("b", batch), ("m", m), ("n", n), ("k", k))},
        **{f"even_{name}": _alignment(values) for name, values in (("m", m), ("n", n), ("k", k))},
        "aspect": _log(m / n),
        "wider": (n > m).astype(np.float64),
        "filled_k": k / (np.ceil(k / 128.0) * 128.0),
        "out_width": _log(base.rows.table.bytes_written[mask] / np.maximum(batch * m * n, 1.0)),
    }
    if device.kind == "tpu":
        found |= _registers(m, n, k)
    for high, wide in _TILES:
        waves = batch * np.ceil(m / high) * np.ceil(n / wide) / cores
        found[f"waves_{high}x{wide}"] = _log(waves)
        found[f"last_wave_{high}x{wide}"] = np.ceil(waves) / waves if kind != "moe" else np.ones(len(m))
        filled = (m / (np.ceil(m / high) * high)) * (n / (np.ceil(n / wide) * wide))
        found[f"filled_{high}x{wide}"] = filled
    else:
        found["source"] = _source(table.library[mask])
    if kind == "conv":
        found |= _convolution(table, mask)
    if kind == "moe":
        found |= _experts(table, mask, cores)
    return found


def _registers(m: FloatArray, n: FloatArray, k: FloatArray) -> dict[str, FloatArray]:
    """How a product fills registers of 8 x 128 and a matrix unit of 128 x 128.

    `turned`: a result wider than high whose rows are not whole registers; those that run at half speed on a TPU v4 are.
    """
    ragged_m, ragged_n, ragged_k = m % 128 > 0, n % 128 > 0, k % 128 > 0
    return {
        "padded": _log(np.ceil(m / 8.0) * np.ceil(n / 128.0) * np.ceil(k / 128.0)),
        "ragged": 4.0 * ragged_m + 2.0 * ragged_n + ragged_k,
        "ragged_n": ragged_n.astype(np.float64),
        "ragged_k": ragged_k.astype(np.float64),
        "turned": (ragged_n & (n > m)).astype(np.float64),
        "result": _log(m * n),
        "first": _log(m * k),
        "second": _log(k * n),
    }


def _source(library: TextArray) -> FloatArray:
    """Whose kernels these are, 0 where nobody said; each chooses among the same library's products in its own way."""
    found = np.zeros(len(library))
    for name in np.unique(library):
        found[library == name] = _SOURCES.get(str(name), 0.0)
    return found


def _convolution(table: KernelTable, mask: BoolArray) -> dict[str, FloatArray]:
    """The convolution whose pass this is, by the sizes of its forward pass whatever the direction.

    Gradients come as convolutions of their own: by the input with the output's gradient as image, by the weights with
    batch and channels changing places and the output's gradient as window. Captured programs do not say which pass a
    convolution is: one whose window is larger than its result is by the weights, one of a dilated image by the input. A
    gradient by the input at stride 1 has the sizes of a forward pass and counts as one.
    """
    cn, ch, cw, cc, co, cr, cs, m = (
        _column(table, name, mask) for name in ("cn", "ch", "cw", "cc", "co", "cr", "cs", "m")
    )
    stride, input_stride, weight_stride = (
        _column(table, name, mask) for name in ("stride", "lhs_dilation", "rhs_dilation")
    )
    direction = table.direction[mask]
    by_weights = is_by_weights(table, mask)
    by_input = ~by_weights & ((direction == "bwd") | ((direction == "") & (input_stride > 1)))
    images = np.where(by_weights, cc, cn)
    channels = np.where(by_weights, cn, np.where(by_input, co, cc))
    filters = np.where(by_input, cc, co)
    positions = np.where(by_weights, cr * cs, np.where(by_input, ch * cw, m / cn))
    window = np.where(by_weights, m / cn, cr * cs)
    return {
        "images": _log(images),
        "channels": _log(channels),
        "filters": _log(filters),
        "positions": _log(positions),
        "window": _log(window),
        "step": np.where(by_weights, weight_stride, np.where(by_input, input_stride, stride)),
        "direction": by_input + 2.0 * by_weights,
        "pixels": _log(images * positions),
        "reach": _log(channels * window),
        "narrowing": _log(channels / filters),
        "flatness": _log(images * positions / np.sqrt(channels * filters)),
        "even_channels": _alignment(channels),
        "even_filters": _alignment(filters),
        "pad": np.asarray(table.pad[mask], dtype=np.float64),
        "groups": _log(_column(table, "groups", mask)),
    }


def _experts(table: KernelTable, mask: BoolArray, cores: float) -> dict[str, FloatArray]:
    """How tokens spread over experts, and how the two products of an expert fill tiles: to its inner size, and back."""
    batch, m, n, k = (_column(table, name, mask) for name in ("batch", "m", "n", "k"))
    experts, width = _column(table, "experts", mask), n / 3.0
    found = {name: _log(_column(table, name, mask)) for name in ("experts", "topk")}
    found |= {
        "skew": _skew(table.epilogue[mask]),
        "tokens": _log(_column(table, "elems", mask) / k),
        "width": _log(width),
        "visits": _log(batch * m),
        "per_expert": _log(batch * m / experts),
        "reached": batch / experts,
        "weights": _log(width * k),
        "even_width": _alignment(width),
    }
    for high in _EXPERT_TILES:
        blocks = batch * np.ceil(m / high) / cores
        found[f"first_{high}"] = _log(blocks * np.ceil(2.0 * width / 128.0))
        found[f"second_{high}"] = _log(blocks * np.ceil(k / 128.0))
        found[f"filled_{high}"] = m / (np.ceil(m / high) * high)
    return found


def _skew(routing: TextArray) -> FloatArray:
    """Exponent of the power law by which tokens choose experts, 0 where they spread evenly, 1 where nobody said."""
    found = np.ones(len(routing))
    for text in np.unique(routing):
        name, _, exponent = str(text).rpartition("_")
        if str(text) == "balanced":
            found[routing == text] = 0.0
        elif name == "power_law":
            found[routing == text] = float(exponent)
    return found


def _stream(table: KernelTable, mask: BoolArray, device: Device) -> dict[str, FloatArray]:
    elems, reduced = _column(table, "elems", mask), _column(table, "reduced", mask)
    nbytes = _column(table, "bytes_read", mask) + _column(table, "bytes_written", mask)
    found = {} if device.kind != "tpu" else _layout(table, mask, elems)
    return found | {
        "elems": _log(elems),
        "reduced": _log(reduced),
        "rows": _log(np.maximum(elems / reduced, 1.0)),
        "even_reduced": _alignment(reduced),
        "inputs": np.asarray(table.inputs[mask], dtype=np.float64),
        "bytes_per_element": nbytes / elems,
        "operations": np.minimum(_column(table, "vector_flops", mask, 0.0) / elems, 64.0),
        "transcendentals": np.minimum(_column(table, "transcendentals", mask, 0.0) / elems, 16.0),
    }


def _layout(table: KernelTable, mask: BoolArray, elems: FloatArray) -> dict[str, FloatArray]:
    """How elements fill registers of 8 x 128 on a TPU; a row that says no shape is taken for a vector."""
    high, wide = _column(table, "m", mask, 0.0), _column(table, "n", mask, 0.0)
    flat = wide <= 1
    wide, high = np.where(flat, np.maximum(high, elems), wide), np.where(flat, 1.0, high)
    padded = np.ceil(wide / 128.0) * 128.0 * np.where(flat, 1.0, np.ceil(high / 8.0) * 8.0)
    return {
        "flat": flat.astype(np.float64),
        "wide": _log(wide),
        "high": _log(np.maximum(high, 1.0)),
        "padded": _log(padded),
        "filled": elems / padded,
        "tiles": np.minimum(padded / 1024.0, 4096.0),
    }


def _attention(table: KernelTable, mask: BoolArray, device: Device) -> dict[str, FloatArray]:
    names = ("batch", "hq", "hkv", "sq", "skv", "d")
    batch, hq, hkv, sq, skv, d = (_column(table, name, mask) for name in names)
    cores = device.cores.value if device.cores else 1.0
    blocks = batch * hq * np.ceil(sq / 128.0) / cores
    keys = batch * hkv / cores
    return {
        **dict(zip(("b", "hq", "hkv", "sq", "skv", "d"), map(_log, (batch, hq, hkv, sq, skv, d)), strict=True)),
        "group": _log(hq / hkv),
        "causal": np.asarray(table.causal[mask], dtype=np.float64),
        "window": _log(np.where(table.window[mask] > 0, _column(table, "window", mask), skv)),
        "windowed": (table.window[mask] > 0).astype(np.float64),
        "waves": _log(blocks),
        "last_wave": np.ceil(blocks) / blocks,
        "key_waves": _log(keys),
        "last_key_wave": np.ceil(keys) / keys,
        "tokens": _log(batch * sq),
    }
