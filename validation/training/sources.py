"""Which training tables there are, and how each of their rows becomes a kernel.

Numbers of rows are caps for training in minutes; a fixed seed picks them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from stablecast.backends import kernel_specs as specs
from stablecast.backends.device import Device
from stablecast.ir.kernels import KernelRow
from stablecast.validation.suites import kernels as cases
from stablecast.validation.suites import neusight
from stablecast.validation.suites.base import Make, number, whole
from stablecast.validation.training.reader import Record
from stablecast.validation.training.tables import Source

_MILLI: Final = 1e-3
_MICRO: Final = 1e-6
_NANO: Final = 1e-9
Kernel = Callable[[Device, Record], KernelRow | None]

_NEUSIGHT: Final = {
    name: device
    for name, device in neusight.DEVICES.items()
    if device in ("p4", "p100-pcie", "v100-pcie", "t4", "a100-pcie-40gb")
}
_NEUSIGHT_CONV: Final = {**_NEUSIGHT, "A100-PCIe-80GB": "a100-pcie-80gb"}
_AMD: Final = {"MI100": "mi100", "MI210": "mi210"}
THROTTLED: Final[Mapping[str, float]] = {"p4": 3e-3, "p100-pcie": 3e-3, "t4": 3e-3}
"""Boards that ran hot while NeuSight's training tables were taken (its README, first caveat; their shares of the peak
fall as kernels grow longer): rows longer than this do not count."""

_SXM: Final = {
    "a100_sxm": ("A100-SXM-80GB", "a100-sxm-80gb"),
    "h100_sxm": ("H100-SXM-80GB", "h100-sxm"),
    "h200_sxm": ("H200-SXM-141GB", "h200-sxm"),
    "b200_sxm": ("B200-SXM", "b200-sxm"),
}
_XLA: Final = {"sm_90": "h100-sxm", "sm_100_B200": "b200-sxm", "gfx950": "mi355x"}
_SERVED: Final = (
    ("trtllm", "bfloat16", "half"),
    ("sglang", "bfloat16", "half"),
    ("vllm", "bfloat16", "half"),
    ("trtllm", "fp8", "fp8"),
)
"""Framework, its name of the type, family; vllm's fp8 kernels scale their operands in another way."""

_TPU_TOKENS_HELD_TOGETHER: Final = 64


def sources() -> Iterator[Source]:
    """Every training table, in a fixed order."""
    yield from _neusight()
    yield from _aiconfigurator()
    yield from _xla()
    yield from _vidur()
    yield from _deepbench()
    yield from _serving()
    yield from _tpu_v4()
    yield from _tpu_v6e()


def _case(make: Make) -> Kernel:
    def kernel(device: Device, record: Record) -> KernelRow | None:
        case = make(device, record)
        return case.kernel if case is not None else None

    return kernel


def _column(name: str, unit_s: float) -> Callable[[Record], float]:
    return lambda record: number(record, name) * unit_s


def _joined(*names: str) -> Callable[[Record], str]:
    return lambda record: "|".join(record.get(name, "") for name in names)


def _only(kernel: Kernel, column: str, *values: str) -> Kernel:
    return lambda device, record: kernel(device, record) if record[column] in values else None


def _eager(record: Record) -> str:
    return f"neusight {record['op']}"


def _neusight() -> Iterator[Source]:
    time, op = _column("latency_ms", _MILLI), _eager
    for name, kind in (("linear", "matmul"), ("bmm", "bmm")):
        yield Source(
            f"neusight train {name}",
            "neusight/train_matmul.csv.gz",
            _NEUSIGHT,
            kind,
            "fp32",
            _only(_case(neusight.product), "op", name),
            time,
            _joined("batch", "m", "n", "k"),
            timing=op,
            rows=8000,
            longest_s=THROTTLED,
        )
    streams = {"ln": "layernorm", "softmax": "softmax"}
    for file, devices in (("neusight/train_vector.csv.gz", _NEUSIGHT), ("neusight/amd_train_vector.csv.gz", _AMD)):
        for kind in ("elementwise", "softmax", "layernorm"):

            def kernel(device: Device, record: Record, kind: str = kind) -> KernelRow | None:
                if streams.get(record["op"], "elementwise") != kind:
                    return None
                return neusight.vector(device, record).kernel

            yield Source(
                "neusight train vector",
                file,
                devices,
                kind,
                "fp32",
                kernel,
                time,
                _joined("rows", "cols"),
                timing=op,
                rows=4000,
            )
    yield Source(
        "neusight train conv2d",
        "neusight/train_conv2d.csv.gz",
        _NEUSIGHT_CONV,
        "conv",
        "fp32",
        _neusight_conv,
        time,
        _joined("batch", "in_channels", "out_channels", "kernel_size", "input_hw", "stride", "padding"),
        timing=op,
        longest_s=THROTTLED,
        drifts=True,
    )


def _neusight_conv(device: Device, record: Record) -> KernelRow:
    n, size, c, co, window, stride, pad = whole(
        record, "batch", "input_hw", "in_channels", "out_channels", "kernel_size", "stride", "padding"
    )
    return neusight.plain(specs.conv2d(device, "f32", n, size, size, c, co, window, window, stride, pad))


def _aiconfigurator() -> Iterator[Source]:
    for part, (label, device) in _SXM.items():
        where = {label: device}
        time = _column("latency_us", _MICRO)
        for framework, dtype, family in _SERVED:
            yield Source(
                f"aiconfigurator gemm {family} {framework}",
                f"aiconfigurator/gemm_{part}.csv.gz",
                where,
                "matmul",
                family,
                _only(_gemm(dtype, "bf16" if family == "half" else "fp8"), "framework", framework),
                time,
                _joined("n", "k"),
                rows=9000 if family == "half" else 14000,
                library=framework,
            )
        shape = _joined("num_heads", "num_key_value_heads", "head_dim", "window_size", "batch_size")
        for phase, kernel in (("context", _prefill), ("generation", _decode)):
            yield Source(
                f"aiconfigurator attention {phase}",
                f"aiconfigurator/attention_{phase}_{part}.csv.gz",
                where,
                "attention_prefill" if phase == "context" else "attention_decode",
                "half",
                kernel,
                time,
                shape,
                rows=8000,
            )
        yield Source(
            "aiconfigurator moe",
            f"aiconfigurator/moe_{part}.csv.gz",
            where,
            "moe",
            "half",
            _moe,
            _column("latency_ms", _MILLI),
            _joined("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"),
            rows=8000,
        )


def _gemm(dtype: str, element: str) -> Kernel:
    def kernel(device: Device, record: Record) -> KernelRow | None:
        if record["dtype"] != dtype:
            return None
        m, n, k = whole(record, "m", "n", "k")
        return specs.matmul(device, element, m, n, k, out="bf16")

    return kernel


def _prefill(device: Device, record: Record) -> KernelRow:
    batch, length, hq, hkv, window = whole(
        record, "batch_size", "isl", "num_heads", "num_key_value_heads", "window_size"
    )
    d = whole(record, "head_dim")[0] or 128
    return specs.attention(device, "bf16", batch, hq, length, length, d, hkv, causal=1, window=window)


def _decode(device: Device, record: Record) -> KernelRow:
    batch, step, hq, hkv, window = whole(
        record, "batch_size", "step", "num_heads", "num_key_value_heads", "window_size"
    )
    d = whole(record, "head_dim")[0] or 128
    return specs.attention(device, "bf16", batch, hq, 1, step + 1, d, hkv, window=window)


def _moe(device: Device, record: Record) -> KernelRow:
    tokens, hidden, inter, experts, topk, tp, ep = whole(
        record, "num_tokens", "hidden_size", "inter_size", "num_experts", "topk", "moe_tp_size", "moe_ep_size"
    )
    return specs.moe(device, "bf16", tokens, hidden, inter, experts, topk, tp, ep, record["distribution"])


def _xla() -> Iterator[Source]:
    types = {"half": ("bf16", "f16"), "tf32": ("f32",)}
    for family, elements in types.items():
        for kind in ("matmul", "bmm"):

            def kernel(
                device: Device, record: Record, elements: tuple[str, ...] = elements, kind: str = kind
            ) -> KernelRow | None:
                batched = record["batch"] != "1"
                if record["lhs"] not in elements or not cases.usable(record) or batched != (kind == "bmm"):
                    return None
                return cases.xla_dot(device, record).kernel

            yield Source(
                "xla matmul",
                "xla_perf_tables/matmul.csv.gz",
                _XLA if family == "half" else {key: name for key, name in _XLA.items() if name != "mi355x"},
                kind,
                family,
                kernel,
                _column("latency_us", _MICRO),
                _joined("m", "n", "k"),
                device="device_key",
                timing=lambda record: "xla",
                library="xla",
            )

    yield Source(
        "xla matmul f32",
        "xla_perf_tables/matmul.csv.gz",
        {"gfx950": "mi355x"},
        "matmul",
        "fp32",
        _plain_dot,
        _column("latency_us", _MICRO),
        _joined("m", "n", "k"),
        device="device_key",
        timing=lambda record: "xla",
        clocks=True,
    )


def _plain_dot(device: Device, record: Record) -> KernelRow | None:
    """An f32 product that is no faster than the data sheet allows (the data's README: some rows are)."""
    if record["lhs"] != "f32" or number(record, "flops_per_s") > device.matmul_rate("fp32").value:
        return None
    return cases.xla_dot(device, record).kernel


def _vidur() -> Iterator[Source]:
    devices = {"a100": "a100-sxm-80gb", "a40": "a40"}
    kind_of = {"add": "elementwise", "act": "elementwise", "emb": "gather"}
    layers = {**cases.VIDUR_LAYERS, "mlp_act": "act", "emb": "emb"}
    # its norms are a kernel of its own that moves 0.7 TB/s on an A100 where layer norm of the one model that has it
    # (phi-2) moves 1.0 and additions 1.2: no other program runs it
    for column, sizes in ((column, sizes) for column, sizes in layers.items() if sizes != "norm"):
        yield Source(
            f"vidur {column}",
            "vidur/mlp.csv.gz",
            devices,
            kind_of.get(sizes, "matmul"),
            "half",
            _case(cases.vidur_case(column, sizes)),
            _column(f"{column}_ms", _MILLI),
            _joined("model"),
            device="gpu",
            rows=2500,
            library="torch",
        )


def _deepbench() -> Iterator[Source]:
    fp32, time = _by_precision("fp32"), _column("time_ms", _MILLI)
    shape = _joined("m", "n", "k", "ta", "tb")
    gemm = _case(cases.deepbench_gemm("f32"))
    half = {"V100": "v100-sxm2"}
    narrow = {name: cases.DEEPBENCH[name] for name in ("1080Ti", "TitanX_Pascal", "TitanXp")}
    for name, devices, family, make in (
        ("deepbench gemm f32", cases.DEEPBENCH, "fp32", fp32(_without_tf32(gemm))),
        ("deepbench gemm f16", half, "half", _by_precision("fp16-mixed")(_case(cases.deepbench_gemm("f16")))),
        ("deepbench gemm i8", narrow, "int8", _by_precision("int8 (inference)")(_narrow_gemm)),
    ):
        clocks = family == "fp32"
        file = "deepbench/gemm.csv"
        yield Source(name, file, devices, "matmul", family, make, time, shape, device="gpu", clocks=clocks)
    for precision, element, family, boards in (
        ("fp32", "f32", "fp32", cases.DEEPBENCH),
        ("fp16-mixed", "f16", "half", half),
    ):
        for column, way in cases.CONV_TIMES:
            conv = _case(cases.deepbench_conv(element, column, way))
            yield Source(
                f"deepbench conv {way} {element}",
                "deepbench/conv.csv",
                boards,
                "conv",
                family,
                _by_precision(precision)(_without_tf32(conv) if family == "fp32" else conv),
                _column(column, _MILLI),
                _joined("w", "h", "c", "n", "k", "filter_w", "filter_h", "stride_w"),
                device="gpu",
            )


def _by_precision(precision: str) -> Callable[[Kernel], Kernel]:
    return lambda kernel: _only(kernel, "precision", precision)


def _without_tf32(kernel: Kernel) -> Kernel:
    def plain(device: Device, record: Record) -> KernelRow | None:
        row = kernel(device, record)
        return neusight.plain(row) if row is not None else None

    return plain


def _narrow_gemm(device: Device, record: Record) -> KernelRow:
    m, n, k = whole(record, "m", "n", "k")
    return specs.matmul(device, "i8", m, n, k, out="i32")


LLAMA_LAYERS: Final[Mapping[str, tuple[int, int]]] = {
    "q_proj": (4096, 4096),
    "qkv_proj": (6144, 4096),
    "o_proj": (4096, 4096),
    "gate_proj": (14336, 4096),
    "up_proj": (14336, 4096),
    "gate_up_proj": (28672, 4096),
    "down_proj": (4096, 14336),
    "lm_head": (128256, 4096),
}
"""Result and inner size of Llama-3.1-8B's layers."""

_CUT_INNER: Final = ("o_proj", "down_proj")


def _llama_layer(device: Device, record: Record) -> KernelRow | None:
    sizes = LLAMA_LAYERS.get(record["layer"])
    if sizes is None or not record["model"].endswith("Llama-3.1-8B"):
        return None
    tp = int(float(record.get("tp") or record.get("tp_size") or 1))
    n, k = (sizes[0], sizes[1] // tp) if record["layer"] in _CUT_INNER else (sizes[0] // tp, sizes[1])
    return specs.matmul(device, "bf16", whole(record, "tokens")[0], n, k)


def _serving() -> Iterator[Source]:
    yield Source(
        "llmservingsim dense",
        "llmservingsim/gpu_dense.csv.gz",
        {"RTX4090": "rtx-4090", "RTXPRO6000": "rtx-pro-6000-workstation"},
        "matmul",
        "half",
        _llama_layer,
        _column("time_us", _MICRO),
        _joined("layer", "tp"),
    )


def _tpu_v4() -> Iterator[Source]:
    everywhere = {"": "tpu-v4"}
    shape = _joined("m", "n", "k")
    product = _case(cases.tpu_product)
    aligned = "tpu_v4_kernels/matmul_fp16.csv"
    for regime in ("128", "1024", "4096"):
        make = _only(product, "regime", regime)
        time = _column("mean_us", _MICRO)
        yield Source(
            f"tpu_v4 products to {regime}", aligned, everywhere, "matmul", "half", make, time, shape, device=""
        )
    yield Source(
        "tpu_v4 products misaligned",
        "tpu_v4_kernels/matmul_fp16_misaligned.csv",
        everywhere,
        "matmul",
        "half",
        product,
        _column("measured_us", _MICRO),
        shape,
        device="",
    )
    for name, series in (
        ("tpu_v4 elementwise", cases.TPU_SERIES - cases.TPU_SHAPELESS),
        ("tpu_v4 elementwise without shapes", cases.TPU_SHAPELESS),
    ):
        yield Source(
            name,
            "tpu_v4_kernels/nonmatmul_fp16.csv",
            everywhere,
            "elementwise",
            "half",
            _only(_case(cases.tpu_elementwise), "series", *sorted(series)),
            _column("mean_us", _MICRO),
            _joined("shape", "elements", "op"),
            device="",
        )


def _tpu_v6e() -> Iterator[Source]:
    layers = Source(
        "tpu v6e layers",
        "llmservingsim/tpu_v6e_layers.csv.gz",
        {"TPU-v6e-1": "tpu-v6e"},
        "matmul",
        "half",
        _llama_layer,
        _column("latency_ns", _NANO),
        _token_block,
    )
    yield layers
    yield replace(layers, name="tpu v6e embedding", kind="gather", make=_only(_v6e_embedding, "layer", "embedding"))
    for kind, kernel in (("attention_prefill", _v6e_prefill), ("attention_decode", _v6e_decode)):
        yield Source(
            "tpu v6e attention",
            "llmservingsim/tpu_v6e_attention.csv.gz",
            {"TPU-v6e-1": "tpu-v6e"},
            kind,
            "half",
            kernel,
            _column("mean_ns", _NANO),
            _joined("prefill_chunk_size", "batch_size"),
        )


def _token_block(record: Record) -> str:
    return str(whole(record, "tokens")[0] // _TPU_TOKENS_HELD_TOGETHER)


def _v6e_embedding(device: Device, record: Record) -> KernelRow:
    return specs.embedding(device, "bf16", whole(record, "tokens")[0], 4096)


def _v6e_prefill(device: Device, record: Record) -> KernelRow | None:
    chunk, cached = whole(record, "prefill_chunk_size", "kv_cache_size")
    if chunk == 0:
        return None
    return specs.attention(device, "bf16", 1, 32, chunk, cached + chunk, 128, 8, causal=1)


def _v6e_decode(device: Device, record: Record) -> KernelRow | None:
    chunk, cached, batch = whole(record, "prefill_chunk_size", "kv_cache_size", "batch_size")
    return specs.attention(device, "bf16", batch, 32, 1, cached + 1, 128, 8) if chunk == 0 else None
