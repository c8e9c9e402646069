"""Compute and memory time of each class of kernel, over whole columns."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from stablecast.backends.analytical import winograd
from stablecast.backends.analytical.constants import Constants
from stablecast.backends.analytical.rates import MatrixRates, p_norm, steady, sustained
from stablecast.backends.analytical.tiles import TILES, TileConstants, padded_time, tiled_time
from stablecast.backends.analytical.tpu_attention import attention_time as tpu_attention_time
from stablecast.backends.analytical.tpu_grouped import grouped_time
from stablecast.backends.device import Device
from stablecast.backends.estimates import BoolArray, FloatArray, TextArray
from stablecast.ir.kernels import COMPILED, KernelClass, KernelTable

_GROUP: Final = {
    KernelClass.MATMUL: "matmul",
    KernelClass.MOE: "matmul",
    KernelClass.CONVOLUTION: "convolution",
    KernelClass.ATTENTION: "attention",
    KernelClass.ELEMENTWISE: "stream",
    KernelClass.REDUCTION: "reduce",
    KernelClass.COPY: "copy",
    KernelClass.GATHER: "gather",
    KernelClass.SCATTER: "gather",
    KernelClass.SORT: "sort",
    KernelClass.FFT: "fft",
    KernelClass.CUSTOM: "custom",
}
GROUPS: Final = ("matmul", "convolution", "attention", "stream", "reduce", "copy", "gather", "sort", "fft", "custom")
"""Classes that share constants: `share.GROUP` of the memory rate, `low.GROUP` and `high.GROUP` of the time."""

_NARROW: Final = ("bf16", "f16")
_QUERY_BLOCK: Final = 128.0
_ATTENTION_COLUMNS: Final = ("batch", "sq", "skv", "hq", "hkv", "d")
_CHANNELS_MIN: Final = 8.0
_OPERAND_BYTES: Final = {"half": 2.0, "tf32": 4.0, "byte": 1.0, "fma": 4.0}


@dataclass(frozen=True, slots=True)
class Rows:
    """The columns that times depend on, as float arrays, padding and dilation zeros taken off where not executed.

    `group`: index into `GROUPS`. `peak`: FLOP/s of the row's math mode. `executed`: matrix FLOPs; `useful`: those that
    no algorithm can do without.
    """

    table: KernelTable
    group: FloatArray
    peak: FloatArray
    family: TextArray
    on_matrix_unit: BoolArray
    executed: FloatArray
    useful: FloatArray
    nbytes: FloatArray
    launches: FloatArray
    modelled: FloatArray

    @staticmethod
    def of(kernels: KernelTable, rates: MatrixRates, device: Device) -> "Rows":
        """The rows of `kernels` as `device` would run them.

        GPUs do not multiply the zeros that a strided data gradient is dilated with (DeepBench: at stride 2 it takes
        1.6 to 1.9 times its forward pass, not 4); elsewhere they are taken to be multiplied.
        """
        klass = kernels.klass
        group = np.full(len(kernels), float(GROUPS.index("custom")))
        for name, of in _GROUP.items():
            group[klass == str(name)] = GROUPS.index(of)
        flops, useful = kernels.matmul_flops, kernels.useful_flops
        executed = flops if device.kind == "gpu" else flops + kernels.dilation_flops
        peak = np.where(np.isnan(rates.flops), 1.0, rates.flops)
        nbytes = kernels.bytes_read + kernels.bytes_written
        launches, modelled = kernels.launches.astype(np.float64), kernels.modelled.astype(np.float64)
        on_unit = rates.on_matrix_unit
        fewer = (klass == str(KernelClass.CONVOLUTION)) & (rates.family == "fma") & ~on_unit & (flops > 0)
        if device.kind == "gpu" and fewer.any():
            useful = np.array(useful, dtype=np.float64)
            useful[fewer] *= winograd.multiplied_share(kernels, fewer, device)
        return Rows(kernels, group, peak, rates.family, on_unit, executed, useful, nbytes, launches, modelled)

    def is_group(self, name: str) -> BoolArray:
        """Which rows belong to group `name`."""
        return self.group == GROUPS.index(name)


def parts(rows: Rows, device: Device, constants: Constants) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Compute seconds, memory seconds, and seconds that overlap with neither (beyond the launch), per row."""
    memory = rows.nbytes / (_by_group(rows, constants, "share") * device.hbm_bytes_per_s.value)
    for name in ("sort", "fft"):
        memory = np.where(rows.is_group(name), memory * constants[f"{name}.passes"], memory)
    compute = np.zeros_like(memory)
    vector = _vector_time(rows, device, constants)
    products = rows.executed > 0
    attention = rows.is_group("attention") & products & (rows.table.d > 0)
    grouped = (rows.table.klass == KernelClass.MOE) & products & (device.kind == "tpu")
    shaped = products & ~attention & ~grouped & (rows.table.m > 0) & (rows.table.n > 0) & (rows.table.k > 0)
    loose = products & ~attention & ~grouped & ~shaped
    if shaped.any():
        compute[shaped] = _product_time(rows, shaped, device, constants)
    _replace_by_winograd(rows, shaped & (rows.family == "fma"), (compute, memory), device, constants)
    if attention.any():
        compute[attention] = _attention_time(rows, attention, device, constants)
    if grouped.any():
        compute[grouped] = grouped_time(rows.table, grouped, *_unit_rates(rows, grouped, device, constants), constants)
    compute[loose] = rows.executed[loose] / (constants["loose"] * rows.peak[loose])
    beside = np.where(attention, 0.0, vector)
    compute = p_norm(compute, beside, constants["overlap"]) if device.kind == "tpu" else np.maximum(compute, beside)
    if device.kind == "gpu":
        compute = np.maximum(compute, _waiting_time(rows, constants))
    extra = np.where(rows.is_group("attention"), constants["attention.extra"], 0.0)
    return compute, memory, extra


def kernel_time(
    rows: Rows, device: Device, constants: Constants, launch_s: float
) -> tuple[FloatArray, FloatArray, FloatArray, BoolArray]:
    """Time, floor and launch in seconds, and whether compute outweighs memory, per row.

    The floor is what no execution can beat: useful work over the dense peak, boundary bytes over the memory rate.
    """
    compute, memory, extra = parts(rows, device, constants)
    launch = launch_s * np.maximum(rows.launches, 0.0) + extra
    floor = np.maximum(rows.useful / rows.peak, rows.nbytes / device.hbm_bytes_per_s.value)
    time = np.maximum(launch + p_norm(compute, memory, constants["overlap"]), floor)
    return time, floor, launch, compute > memory


def ranges(rows: Rows, constants: Constants) -> tuple[FloatArray, FloatArray]:
    """Low and high as shares of the time; wider where nothing of the architecture was measured."""
    low, high = _by_group(rows, constants, "low"), _by_group(rows, constants, "high")
    if constants.measured:
        return low, high
    return low / constants["unmeasured"], high * constants["unmeasured"]


def _by_group(rows: Rows, constants: Constants, prefix: str) -> FloatArray:
    values = np.array([constants[f"{prefix}.{name}"] for name in GROUPS])
    return values[rows.group.astype(np.int64)]


def _vector_time(rows: Rows, device: Device, constants: Constants) -> FloatArray:
    table = rows.table
    rate = np.full(len(table), device.vector_rate("f32").value)
    double = (table.out_dtype == "f64") | (table.in_dtype == "f64")
    if double.any():
        rate[double] = device.vector_rate("f64").value
    operations = table.vector_flops + constants["transcendental"] * table.transcendentals
    if device.kind == "tpu":
        operations = operations + constants["casts"] * np.minimum(_narrow_elements(table), operations)
    return operations / (constants["vector"] * rate)


def _waiting_time(rows: Rows, constants: Constants) -> FloatArray:
    """What the slowest threads wait for, access after access; the trees of reductions among it."""
    table = rows.table
    time = table.waits * constants["latency.access"] + table.row_waits * constants["latency.row"]
    own = rows.is_group("reduce") & (table.library != COMPILED)  # measured on PyTorch's kernels alone
    trees = np.where(own, np.maximum(rows.launches, 0.0), 0.0)
    return time + trees * constants["latency.reduce"]


def _narrow_elements(table: KernelTable) -> FloatArray:
    """16-bit floats that a kernel reads and writes."""
    read = np.where(np.isin(table.in_dtype, _NARROW), table.bytes_read, 0.0)
    return (read + np.where(np.isin(table.out_dtype, _NARROW), table.bytes_written, 0.0)) / 2.0


def _product_time(rows: Rows, mask: BoolArray, device: Device, constants: Constants) -> FloatArray:
    table = rows.table
    batch, m, n, k = (np.asarray(getattr(table, name)[mask], dtype=np.float64) for name in ("batch", "m", "n", "k"))
    batch = np.maximum(batch, 1.0)
    conv = rows.is_group("convolution")[mask]
    executed, peak = rows.executed[mask], rows.peak[mask]
    # zeros that are not multiplied shorten the contraction
    k = np.where(conv, k * np.minimum(executed / np.maximum(2.0 * batch * m * n * k, 1.0), 1.0), k)
    k = np.maximum(k, 1.0)
    if device.kind == "gpu":
        k = np.where(conv & rows.on_matrix_unit[mask], k * _channel_padding(table.cc[mask]), k)
    time = np.zeros(len(m))
    family = rows.family[mask]
    for name in np.unique(family):
        chosen = family == name
        rate = sustained(str(name), device, constants) * peak[chosen]
        rate = np.where(conv[chosen], rate * constants[f"convolution.{name}"], rate)
        if name == "fma" and device.kind != "gpu":
            sizes = winograd.Windows.of(table, mask)
            square = conv & sizes.plain & (sizes.window == 3) & ~sizes.by_weights
            rate = np.where(square[chosen], rate * constants["winograd"], rate)
        shape = (batch[chosen], m[chosen], n[chosen], k[chosen])
        time[chosen] = _unit_time(str(name), shape, rate, device, constants)
        limit = steady(str(name), device, constants)
        if limit is not None:
            time[chosen] = np.maximum(time[chosen], 2.0 * np.prod(shape, axis=0) / (limit * peak[chosen]))
    grouped = conv & (np.minimum(n, m) < constants["narrow"])
    if grouped.any():
        lanes = executed / (constants["convolution.direct"] * device.vector_rate("f32").value)
        time = np.where(grouped, np.minimum(time, np.maximum(lanes, executed / peak)), time)
    return time


def _replace_by_winograd(
    rows: Rows, mask: BoolArray, times: tuple[FloatArray, FloatArray], device: Device, constants: Constants
) -> None:
    """Where one of Winograd's algorithms is faster, its whole time becomes compute time and memory time is none.

    `times`: compute and memory seconds, written over.
    """
    compute, memory = times
    mask = mask & rows.is_group("convolution")
    if device.kind != "gpu" or not mask.any():
        return
    found = np.minimum(*winograd.least_times(rows.table, mask, rows.nbytes[mask], device, constants))
    better = found < p_norm(compute[mask], memory[mask], constants["overlap"])
    compute[mask] = np.where(better, found, compute[mask])
    memory[mask] = np.where(better, 0.0, memory[mask])


def _channel_padding(channels: FloatArray) -> FloatArray:
    """Libraries pad fewer than 8 input channels to 8 for the matrix units."""
    return np.where((channels > 0) & (channels < _CHANNELS_MIN), _CHANNELS_MIN / np.maximum(channels, 1.0), 1.0)


def _unit_time(
    family: str,
    shape: tuple[FloatArray, FloatArray, FloatArray, FloatArray],
    rate: FloatArray,
    device: Device,
    constants: Constants,
) -> FloatArray:
    batch, m, n, k = shape
    if device.kind == "tpu" and family != "fma":
        edge = _array_edge(device)
        return padded_time(batch, m, n, k, rate, edge, constants["sublanes"], constants["fill.m"])
    if device.kind == "gpu":
        cores = device.cores.value if device.cores else constants["cores"]
        prefix = "fma" if family == "fma" else "tile"
        shares = {a * b: constants[f"{prefix}.{a * b}"] for a, b in TILES}
        fill_k = constants[f"fill.{prefix}"] / _OPERAND_BYTES[family]
        tile = TileConstants(shares, constants[f"waves.{prefix}"], fill_k, constants["split"])
        write_rate = constants["share.matmul"] * device.hbm_bytes_per_s.value
        return tiled_time(batch, m, n, k, rate / cores, cores, tile, write_rate)
    return 2.0 * batch * m * n * k / rate


def _array_edge(device: Device) -> float:
    label = device.labels.get("mxu_dims")
    return float(label.text.split("x")[0]) if label else 128.0


def _unit_rates(rows: Rows, mask: BoolArray, device: Device, constants: Constants) -> tuple[FloatArray, float, float]:
    """Of a TPU: FLOP/s that its arrays sustain for each row, operations/s of its lanes, and the arrays' edge."""
    found = np.array([sustained(str(name), device, constants) for name in rows.family[mask]])
    return found * rows.peak[mask], constants["vector"] * device.vector_rate("f32").value, _array_edge(device)


def _at_least_one(rows: Rows, name: str, mask: BoolArray) -> FloatArray:
    return np.maximum(np.asarray(getattr(rows.table, name)[mask], dtype=np.float64), 1.0)


def _attention_time(rows: Rows, mask: BoolArray, device: Device, constants: Constants) -> FloatArray:
    """Flash attention in blocks of queries, in waves over the cores; on a TPU as `tpu_attention` has it.

    A block holds 128 queries of one head (or all queries that share a key head, where they are fewer) and visits keys
    in steps of 128, under a causal mask up to its last query; beside its products it costs a fixed time.
    """
    if device.kind == "tpu":
        return tpu_attention_time(rows.table, mask, *_unit_rates(rows, mask, device, constants), constants)
    batch, queries, keys, hq, hkv, d = (_at_least_one(rows, name, mask) for name in _ATTENTION_COLUMNS)
    hkv = np.minimum(hkv, hq)
    packed = queries * hq / hkv <= _QUERY_BLOCK
    steps = np.where(packed, 1.0, np.ceil(queries / _QUERY_BLOCK))
    blocks = batch * np.where(packed, hkv, hq) * steps
    padded = np.ceil(keys / _QUERY_BLOCK) * _QUERY_BLOCK
    causal = rows.table.causal[mask] > 0
    causal_mean = np.maximum(keys - queries + _QUERY_BLOCK * (steps + 1.0) / 2.0, _QUERY_BLOCK)
    visited = np.where(causal, np.minimum(causal_mean, padded), padded)
    window = rows.table.window[mask]
    visited = np.where(window > 0, np.minimum(visited, window + _QUERY_BLOCK), visited)
    held = np.where(packed, np.ceil(queries * hq / hkv / 16.0) * 16.0, _QUERY_BLOCK)
    backward = rows.table.direction[mask] == "bwd"
    share = np.where(backward, constants["attention.backward"], constants["attention.forward"])
    cores = device.cores.value if device.cores and device.kind == "gpu" else 1.0
    rate = share * sustained("half", device, constants) * rows.peak[mask] / cores
    block_s = np.where(backward, 2.5, 1.0) * 2.0 * 2.0 * held * visited * d / rate
    waves = blocks / cores
    waves = np.maximum(1.0, waves + constants["waves.attention"] * (np.ceil(waves) - waves))
    # a packed block that cannot fill the cores is split over its keys
    split = np.where(packed, np.maximum(1.0, np.minimum(cores / blocks, visited / _QUERY_BLOCK)), 1.0)
    return waves * (block_s / split + constants["attention.block"])
