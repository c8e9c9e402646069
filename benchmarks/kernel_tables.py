"""The public tables of measured kernels that the analytical backend is fitted on, as rows with their times."""

import csv
import gzip
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from stablecast.backends import kernel_specs as specs
from stablecast.backends.analytical.fitting import SEED, Measured
from stablecast.backends.catalogue import Catalogue
from stablecast.backends.device import Device
from stablecast.ir.kernels import KernelRow, KernelTable
from stablecast.validation.training.sources import LLAMA_LAYERS

TABLES: Final = Path(__file__).parent / "tables"
REPORT_ROWS: Final = 12000
LANES: Final = 128
GROUPED_ROWS: Final = 1024
"""Fewest rows of a grouped product of training."""
STREAMED: Final = 0.85
"""Share of the memory rate at which a TPU turns tensors around, as the constants assume of its copies."""

_SXM: Final = {"a100": "a100-sxm-80gb", "h100": "h100-sxm", "h200": "h200-sxm", "b200": "b200-sxm"}
_NEUSIGHT: Final = {
    "P4": "p4",
    "P100-PCIe-16GB": "p100-pcie",
    "V100-PCIe-32GB": "v100-pcie",
    "T4": "t4",
    "A100-PCIe-40GB": "a100-pcie-40gb",
    "A100-PCIe-80GB": "a100-pcie-80gb",
    "MI100": "mi100",
    "MI210": "mi210",
}
_DEEPBENCH: Final = {
    "V100": "v100-sxm2",
    "P100": "p100-sxm2",
    "TitanXp": "titan-xp",
    "TitanX_Pascal": "titan-x-pascal",
    "1080Ti": "gtx-1080-ti",
    "TitanX": "titan-x-maxwell",
    "M40": "m40",
    "MI25": "mi25",
}
_XLA: Final = {"sm_90": "h100-sxm", "sm_100_B200": "b200-sxm", "gfx950": "mi355x"}
_XLA_TYPES: Final = {"bf16": ("bf16", "half"), "f32": ("f32", "tf32"), "f8e4m3fn": ("fp8", "byte")}
_SERVING: Final = (
    ("tpu_v6e_layers", {"TPU-v6e-1": "tpu-v6e"}, ("latency_ns", 1e-9), "tpu"),
    ("gpu_dense", {"RTX4090": "rtx-4090", "RTXPRO6000": "rtx-pro-6000-workstation"}, ("time_us", 1e-6), "half"),
    ("gpu_v0_layers", {"RTX3090": "rtx-3090"}, ("latency_ns", 1e-9), "half.eager"),
    ("gpu_v0_layers", {"A6000": "a6000"}, ("latency_ns", 1e-9), ""),
)
EAGER: Final = "half.eager"
"""A stage of one architecture, whose share stays out of the median of all."""
EAGER_TOKENS: Final = 512
"""Fewest tokens of a layer that was timed eagerly: the host's gaps are a small share from here."""
_SILU: Final = {"H100": "h100-sxm", "A6000": "a6000", "RTX3090": "rtx-3090"}
_HIDDEN: Final = {"meta-llama/Llama-3.1-8B": 14336, "meta-llama/Llama-3.1-70B": 28672}
_ROWWISE: Final = ("softmax", "ln")
_BINARY: Final = ("add", "mul", "div", "pow")
LARGE_ELEMENTS: Final = 3e7
LARGE_FLOPS: Final = 2e11
LONG_FLOPS: Final = 1e12
"""Products of over a millisecond: from here an H100 is at its power limit, and slower the longer they are."""
STEADY: Final = "steady"
_LIMITED: Final = ("h100", "b200")
"""Boards with slower long products in a table (`power_limit.py`), which an A100 has not."""
BEYOND_CACHE: Final = 2.5e7
"""Elements of 2 bytes that an H100 does not find in its cache (50 MB) again."""


class Record(dict[str, str]):
    """One line of a table: text by column."""

    def number(self, column: str, default: float = 0.0) -> float:
        """A column as a number; `default` where it is absent or empty."""
        text = self.get(column, "")
        return float(text) if text else default

    def sizes(self, *columns: str) -> list[int]:
        """Columns as whole numbers."""
        return [int(self.number(column)) for column in columns]


Make = Callable[[Device, Record], KernelRow]


class Tables:
    """Reads the measured tables under `folder`; one `Measured` a table and device, thinned to `REPORT_ROWS`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.catalogue = Catalogue()

    def all(self) -> list[Measured]:
        """Every table."""
        readers: Sequence[Callable[[], Iterable[Measured]]] = (
            *(self.aiconfigurator_gemm, self.xla_matmul, self.neusight_matmul, self.neusight_vector),
            *(self.neusight_conv, self.deepbench_gemm, self.deepbench_conv, self.vidur_layers),
            *(self.aiconfigurator_attention, self.tpu_v4_matmul, self.serving_layers, self.serving_activations),
            *(self.tpu_products, self.tpu_attention, self.tpu_grouped),
        )
        return [data for reader in readers for data in reader()]

    def read(self, path: str) -> list[Record]:
        full = self.folder / path
        data = full.read_bytes()
        text = (gzip.decompress(data) if full.suffix == ".gz" else data).decode()
        return [Record(line) for line in csv.DictReader(text.splitlines())]

    def _data(
        self,
        table: str,
        device: str,
        records: Sequence[Record],
        make: Make,
        time: tuple[str, float],
        stage: str,
        launch_s: float = 2e-6,
        grows: bool = False,
        casts: bool = False,
    ) -> Iterable[Measured]:
        """`time`: the column that holds the measured time, and its unit in seconds. `grows`: what the host added grew
        while the table was taken. `casts`: the time holds the scaling of an input."""
        if len(records) > REPORT_ROWS:
            chosen = np.random.default_rng(SEED).choice(len(records), REPORT_ROWS, replace=False)
            records = [records[int(index)] for index in sorted(chosen.tolist())]
        found = self.catalogue.device(device)
        if records:
            kernels = KernelTable.of([make(found, record) for record in records])
            seconds = np.array([record.number(time[0]) * time[1] for record in records])
            place = np.arange(len(records)) / len(records) if grows else None
            cast = np.array([record.number("m") * record.number("k") for record in records]) if casts else None
            yield Measured(table, found, kernels, seconds, stage, launch_s, place, cast)

    def aiconfigurator_gemm(self) -> Iterable[Measured]:
        for name, device in _SXM.items():
            records = self.read(f"aiconfigurator/gemm_{name}_sxm.csv.gz")
            plain = [r for r in records if r["dtype"] == "bfloat16"]
            half, byte = "" if name == "h200" else "half", "byte" if name == "h100" else ""
            time = ("latency_us", 1e-6)
            yield from self._data("aiconfigurator gemm bf16", device, plain, _product("bf16"), time, half)
            long = [r for r in plain if _flops(r) > LONG_FLOPS]
            yield from self._data(
                "aiconfigurator long gemm bf16",
                device,
                long,
                _product("bf16"),
                time,
                STEADY if name in _LIMITED else "",
            )
            # the frameworks scale by tensor, one statically, and run different kernels; small ones are mostly scaling
            narrow = [r for r in records if r["dtype"] == "fp8" and _flops(r) > LARGE_FLOPS]
            for one in sorted({r["framework"] for r in narrow}):
                kept, what = [r for r in narrow if r["framework"] == one], f"aiconfigurator gemm fp8 {one}"
                yield from self._data(what, device, kept, _product("fp8"), time, byte, casts=True)

    def xla_matmul(self) -> Iterable[Measured]:
        records = self.read("xla_perf_tables/matmul.csv.gz")
        for key, device in _XLA.items():
            for element, (dtype, stage) in _XLA_TYPES.items():
                if (key, element) in (("sm_90", "f8e4m3fn"), ("gfx950", "f32")):
                    continue  # above the data sheet's peak, as the table's README says
                found = self.catalogue.device(device)
                peak = found.peak(specs.math_mode(dtype, found)).value
                kept = [
                    r
                    for r in records
                    if r["device_key"] == key
                    and r["lhs"] == r["rhs"] == element
                    and r["out"] == ("bf16" if element.startswith("f8") else element)
                    and r.number("flops_per_s") < 0.99 * peak
                ]
                time = ("latency_us", 1e-6)
                yield from self._data(f"xla matmul {dtype}", device, kept, _product(dtype), time, stage, 4e-6)

    def neusight_matmul(self) -> Iterable[Measured]:
        records = self.read("neusight/train_matmul.csv.gz")
        for name, device in _NEUSIGHT.items():
            kept = [r for r in records if r["device"] == name]
            stage = "fma" if device != "p4" else ""
            yield from self._data(
                "neusight train matmul f32", device, kept, _eager_product, ("latency_ms", 1e-3), stage, 3e-5
            )

    def neusight_vector(self) -> Iterable[Measured]:
        records = self.read("neusight/train_vector.csv.gz") + self.read("neusight/amd_train_vector.csv.gz")
        records = [r for r in records if r.number("rows") * r.number("cols") > LARGE_ELEMENTS]
        for name, device in _NEUSIGHT.items():
            for stage in ("stream", "reduce"):
                kept = [r for r in records if r["device"] == name and (r["op"] in _ROWWISE) == (stage == "reduce")]
                time = ("latency_ms", 1e-3)
                yield from self._data(f"neusight train vector {stage}", device, kept, _vector, time, stage, 2.5e-5)

    def neusight_conv(self) -> Iterable[Measured]:
        records = self.read("neusight/train_conv2d.csv.gz")

        def make(device: Device, r: Record) -> KernelRow:
            n, size, c, co, window, stride, pad = r.sizes(
                "batch", "input_hw", "in_channels", "out_channels", "kernel_size", "stride", "padding"
            )
            return _plain(specs.conv2d(device, "f32", n, size, size, c, co, window, window, stride, pad))

        for name, device in _NEUSIGHT.items():
            kept = [r for r in records if r["device"] == name]
            stage = "conv.fma" if device != "p4" else ""
            yield from self._data(
                "neusight train conv2d f32", device, kept, make, ("latency_ms", 1e-3), stage, grows=True
            )

    def deepbench_gemm(self) -> Iterable[Measured]:
        records = self.read("deepbench/gemm.csv")
        for gpu, device in _DEEPBENCH.items():
            for precision, element, stage in (("fp16-mixed", "f16", "half"), ("fp32", "f32", "fma")):
                kept = [r for r in records if r["gpu"] == gpu and r["precision"] == precision]
                yield from self._data(
                    f"deepbench gemm {element}", device, kept, _product(element), ("time_ms", 1e-3), stage, 1e-5
                )

    def deepbench_conv(self) -> Iterable[Measured]:
        records = self.read("deepbench/conv.csv")
        square = [r for r in records if r["stride_w"] == r["stride_h"] and r["pad_w"] == r["pad_h"]]
        ways = (("fwd_ms", "fwd"), ("bwd_input_ms", "dgrad"), ("bwd_weight_ms", "wgrad"))
        for gpu, device in _DEEPBENCH.items():
            for precision, element in (("fp16-mixed", "f16"), ("fp32", "f32")):
                stage = "conv.half" if element == "f16" else "conv.fma"
                of_gpu = [r for r in square if r["gpu"] == gpu and r["precision"] == precision]
                for column, way in ways:
                    kept = [r for r in of_gpu if r.number(column) > 0]
                    yield from self._data(
                        f"deepbench conv {way} {element}",
                        device,
                        kept,
                        _convolution(element, way),
                        (column, 1e-3),
                        stage,
                        1e-5,
                    )

    def vidur_layers(self) -> Iterable[Measured]:
        records = [
            r
            for r in self.read("vidur/mlp.csv.gz")
            if r["gpu"] == "a100" and r["num_tensor_parallel_workers"] == "1" and r.number("num_tokens") >= 64
        ]
        makes: Sequence[tuple[str, str, Make]] = (
            ("add", "add_ms", lambda d, r: specs.elementwise(d, "f16", *r.sizes("num_tokens", "n_embd"))),
            ("norm", "input_layernorm_ms", lambda d, r: specs.layernorm(d, "f16", *r.sizes("num_tokens", "n_embd"))),
        )
        for table, column, make in makes:
            yield from self._data(f"vidur {table} f16", "a100-sxm-80gb", records, make, (column, 1e-3), "")

    def aiconfigurator_attention(self) -> Iterable[Measured]:
        for name, device in _SXM.items():
            for phase in ("context", "generation"):
                records = self.read(f"aiconfigurator/attention_{phase}_{name}_sxm.csv.gz")
                kept = [r for r in records if r.number("window_size") == 0]
                stage = "" if name == "h200" else f"attention.{phase}"
                make = _prefill if phase == "context" else _decode
                yield from self._data(
                    f"aiconfigurator attention {phase}", device, kept, make, ("latency_us", 1e-6), stage
                )

    def tpu_v4_matmul(self) -> Iterable[Measured]:
        # a check only: its f16 operands are converted, which bf16 ones are not
        records = self.read("tpu_v4_kernels/matmul_fp16.csv")
        yield from self._data("tpu_v4 matmul f16", "tpu-v4", records, _product("f16"), ("mean_us", 1e-6), "", 1e-6)

    def serving_layers(self) -> Iterable[Measured]:
        for table, names, time, stage in _SERVING:
            records = [
                r
                for r in self.read(f"llmservingsim/{table}.csv.gz")
                if r["layer"] in LLAMA_LAYERS
                and r["model"].endswith("Llama-3.1-8B")
                and r.get("tp", "1") == "1"
                and (not table.startswith("gpu_v0") or (r["tp_size"] == "1" and r.number("tokens") >= EAGER_TOKENS))
            ]
            for name, device in names.items():
                kept = [r for r in records if r["device"] == name]
                yield from self._data("llmservingsim products bf16", device, kept, _layer, time, stage)

    def serving_activations(self) -> Iterable[Measured]:
        records = [
            r
            for r in self.read("llmservingsim/gpu_v0_layers.csv.gz")
            if r["layer"] == "act_fn" and r["model"] in _HIDDEN and _gated(r)[0] * _gated(r)[1] > BEYOND_CACHE
        ]
        for name, device in _SILU.items():
            kept = [r for r in records if r["device"] == name]
            # five rows of an architecture that nothing else measures are a check
            stage = "stream" if name == "H100" else ""
            yield from self._data(
                "llmservingsim eager silu bf16", device, kept, _activation, ("latency_ns", 1e-9), stage
            )

    def tpu_products(self) -> Iterable[Measured]:
        records = self.read("tpu_step_times/gemm_tflops.csv")
        for prefix, device in (("v7x", "tpu-v7x"), ("v6e", "tpu-v6e")):
            kept = [r for r in records if r["tpu"].startswith(prefix) and "host timer" not in r["basis"]]
            yield from self._data(
                "tpu-recipes gemm bf16", device, kept, _product("bf16"), ("latency_us", 1e-6), "tpu", 1e-6
            )

    def tpu_attention(self) -> Iterable[Measured]:
        records = [r for r in self.read(str(TABLES / "tpu_attention.csv")) if r["sq"] == r["skv"]]
        for device in sorted({r["device"] for r in records}):
            found = self.catalogue.device(device)
            for way in ("fwd", "bwd"):
                kept = [
                    Record(r, kernel_us=str(r.number("time_us") - _turned_us(found, r)))
                    for r in records
                    if r["device"] == device and r["direction"] == way
                ]
                time = ("kernel_us", 1e-6)
                yield from self._data(f"tokamax attention {way} bf16", device, kept, _flash, time, "attention.tpu")

    def tpu_grouped(self) -> Iterable[Measured]:
        records = [r for r in self.read(str(TABLES / "tpu_grouped_products.csv")) if r.number("m") >= GROUPED_ROWS]
        for device in sorted({r["device"] for r in records}):
            for kernel in sorted({r["kernel"] for r in records}):
                kept = [r for r in records if r["device"] == device and r["kernel"] == kernel]
                # a second kernel, which is faster, and one core of the two that a v5p device has are checks
                stage = "grouped" if kernel == "ragged_dot" and device != "tpu-v5p" else ""
                table, time = f"tokamax {kernel.replace('_', ' ')} bf16", ("time_us", 1e-6)
                yield from self._data(table, device, kept, _grouped, time, stage)


def _turned_us(device: Device, r: Record) -> float:
    """What it takes to turn operands and results around beside `flash_attention`, whose callers have heads last.

    Rows are padded to the lanes; the backward pass has the gradient of each beside it.
    """
    if r["kernel"] != "flash_attention":
        return 0.0
    batch, heads, key_heads, length, d, dv = r.sizes("batch", "hq", "hkv", "sq", "d", "dv")
    width = sum(-(-size // LANES) * LANES for size in (d, dv))
    moved = 2 * 2.0 * batch * length * width * (heads + key_heads) * (2 if r["direction"] == "bwd" else 1)
    return 1e6 * moved / (STREAMED * device.hbm_bytes_per_s.value)


def _grouped(device: Device, r: Record) -> KernelRow:
    groups, m, n, k = r.sizes("groups", "m", "n", "k")
    if r["direction"] == "wgrad":
        return replace(specs.grouped(device, "bf16", groups, m, n, k), m=k, k=m, elems=groups * k * n)
    return specs.grouped(device, "bf16", groups, m, n, k)


def _flash(device: Device, r: Record) -> KernelRow:
    batch, heads, length, d, keys, causal = r.sizes("batch", "hq", "sq", "d", "hkv", "causal")
    return specs.attention(device, "bf16", batch, heads, length, length, d, keys, causal, direction=r["direction"])


def _plain(row: KernelRow) -> KernelRow:
    """The same product without TF32."""
    return replace(row, math="fp32")


def _flops(r: Record) -> float:
    return 2.0 * r.number("m") * r.number("n") * r.number("k")


def _product(element: str) -> Make:
    out = "bf16" if element == "fp8" else element

    def make(device: Device, r: Record) -> KernelRow:
        m, n, k = r.sizes("m", "n", "k")
        return specs.matmul(device, element, m, n, k, int(r.number("batch", 1)), out)

    return make


def _layer(device: Device, r: Record) -> KernelRow:
    n, k = LLAMA_LAYERS[r["layer"]]
    return specs.matmul(device, "bf16", int(r.number("tokens")), n, k)


def _gated(r: Record) -> tuple[int, int]:
    """Tokens and width of the gate that an activation works on."""
    return int(r.number("tokens")), _HIDDEN[r["model"]] // int(r.number("tp_size", 1))


def _activation(device: Device, r: Record) -> KernelRow:
    """silu(gate) * up as two eager kernels: two tensors written and three read."""
    row = specs.elementwise(device, "bf16", *_gated(r), 2)
    return replace(row, bytes_read=3 * row.bytes_written, bytes_written=2 * row.bytes_written, launches=2)


def _eager_product(device: Device, r: Record) -> KernelRow:
    batch, m, n, k = r.sizes("batch", "m", "n", "k")
    if r["op"] == "bmm":
        return _plain(specs.matmul(device, "f32", m, n, k, batch))
    return _plain(specs.matmul(device, "f32", batch * m, n, k))


def _convolution(element: str, way: str) -> Make:
    columns = ("n", "h", "w", "c", "k", "filter_h", "filter_w", "stride_h", "pad_h")
    return lambda device, r: specs.conv2d(device, element, *r.sizes(*columns), direction=way)


def _vector(device: Device, r: Record) -> KernelRow:
    rows, columns = r.sizes("rows", "cols")
    if r["op"] in _ROWWISE:
        return (specs.softmax if r["op"] == "softmax" else specs.layernorm)(device, "f32", rows, columns)
    return specs.elementwise(device, "f32", rows, columns, 2 if r["op"] in _BINARY else 1)


def _prefill(device: Device, r: Record) -> KernelRow:
    batch, heads, length, keys = r.sizes("batch_size", "num_heads", "isl", "num_key_value_heads")
    return specs.attention(device, "bf16", batch, heads, length, length, int(r.number("head_dim", 128)), keys, 1)


def _decode(device: Device, r: Record) -> KernelRow:
    batch, heads, cached, keys = r.sizes("batch_size", "num_heads", "step", "num_key_value_heads")
    return specs.attention(device, "bf16", batch, heads, 1, cached + 1, int(r.number("head_dim", 128)), keys)
