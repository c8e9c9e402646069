"""Kernel tables of several sources: DeepBench, Vidur, TPU v4, and large tables of matrix products."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from stablecast.backends import kernel_specs as specs
from stablecast.backends.device import Device
from stablecast.validation.suites.base import Case, Data, Make, Record, Row, half_digit, number, whole

_MILLI: Final = 1e-3
_MICRO: Final = 1e-6

DEEPBENCH: Final[Mapping[str, str]] = {
    "V100": "v100-sxm2",
    "P100": "p100-sxm2",
    "TitanXp": "titan-xp",
    "TitanX_Pascal": "titan-x-pascal",
    "1080Ti": "gtx-1080-ti",
    "TitanX": "titan-x-maxwell",
    "M40": "m40",
    "MI25": "mi25",
}
"""DeepBench's names; VegaFE is in no catalogue file."""

_PRECISIONS: Final[Mapping[str, str]] = {"fp32": "f32", "fp16-mixed": "f16"}
CONV_TIMES: Final = (("fwd_ms", "fwd"), ("bwd_input_ms", "dgrad"), ("bwd_weight_ms", "wgrad"))
_SXM: Final[Mapping[str, str]] = {"a100": "a100-sxm-80gb", "h100": "h100-sxm", "h200": "h200-sxm", "b200": "b200-sxm"}
_XLA: Final[Mapping[str, str]] = {"sm_90": "h100-sxm", "sm_100_B200": "b200-sxm", "gfx950": "mi355x"}
_XLA_TYPES: Final[Mapping[str, str]] = {"bf16": "bf16", "f32": "f32", "f16": "f16"}
_VIDUR: Final[Mapping[str, str]] = {"a100": "a100-sxm-80gb", "a40": "a40"}
_TPU_INPUTS: Final[Mapping[str, int]] = {"add": 2, "mul": 2, "sub": 2, "div": 2}
_TPU_OPERATIONS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("binary", "binary_step"), 2),
    **dict.fromkeys(("leaky", "leaky_relu", "sigmoid"), 3),
    **dict.fromkeys(("parametric", "parametric_relu", "elu"), 4),
    **dict.fromkeys(("selu", "div"), 5),
}
"""Arithmetic operations an element (comparison, selection, scaling, ...) beside one transcendental."""

_TPU_SMOOTH: Final = frozenset({"elu", "selu", "sigmoid", "tanh"})


def deepbench(data: Data) -> list[Row]:
    """Products and convolutions, forward and backward."""
    rows: list[Row] = []
    gemm, conv = data.read("deepbench/gemm.csv"), data.read("deepbench/conv.csv")
    for gpu, device in DEEPBENCH.items():
        for precision, element in _PRECISIONS.items():
            own = [record for record in gemm if record["gpu"] == gpu and record["precision"] == precision]
            rows += data.kernels("deepbench", device, own, deepbench_gemm(element), f"deepbench gemm {element}")
            images = [record for record in conv if record["gpu"] == gpu and record["precision"] == precision]
            for column, way in CONV_TIMES:
                make = deepbench_conv(element, column, way)
                rows += data.kernels("deepbench", device, images, make, f"deepbench conv {way} {element}")
    return rows


def deepbench_gemm(element: str) -> Make:
    """Makes a row of the table of products, in StableHLO element type `element`."""

    def make(device: Device, record: Record) -> Case:
        m, n, k = whole(record, "m", "n", "k")
        time = record["time_ms"]
        row = specs.matmul(device, element, m, n, k)
        return Case(
            f"gemm {m}x{n}x{k} {element}", row, float(time) * _MILLI, f"gemm {element}", {}, half_digit(time, _MILLI)
        )

    return make


def deepbench_conv(element: str, column: str, way: str) -> Make:
    """Makes a row of the table of convolutions: the time of `column`, direction `way`."""

    def make(device: Device, record: Record) -> Case | None:
        n, h, w, c, co, r, s, sh, sw, ph, pw = whole(
            record, "n", "h", "w", "c", "k", "filter_h", "filter_w", "stride_h", "stride_w", "pad_h", "pad_w"
        )
        if sh != sw or ph != pw or not record.get(column):
            return None
        row = specs.conv2d(device, element, n, h, w, c, co, r, s, sh, ph, direction=way)
        item = f"conv {way} {n}x{h}x{w}x{c}-{co} {r}x{s}/{sh} {element}"
        return Case(item, row, number(record, column) * _MILLI, f"conv {way}", {}, half_digit(record[column], _MILLI))

    return make


def vidur(data: Data) -> list[Row]:
    """Layers of LLMs, FP16, by number of tokens."""
    rows: list[Row] = []
    records = data.read("vidur/mlp.csv.gz")
    for gpu, device in _VIDUR.items():
        own = data.thinned(
            [record for record in records if record["gpu"] == gpu], f"vidur on {device}", len(VIDUR_LAYERS)
        )
        for column, make in VIDUR_LAYERS.items():
            rows += data.kernels("vidur", device, own, vidur_case(column, make), f"vidur {column}")
    return rows


def vidur_case(column: str, sizes: str) -> Make:
    """Makes a row of Vidur's table: the time of layer `column`, whose sizes are those of `sizes`."""

    def make(device: Device, record: Record) -> Case | None:
        if not record.get(f"{column}_ms"):
            return None
        tp, tokens, heads, keys, width, hidden = whole(
            record, "num_tensor_parallel_workers", "num_tokens", "n_head", "n_kv_head", "n_embd", "n_expanded_embd"
        )
        head = width // heads
        gated = 2 if record["use_gated_mlp"] == "True" else 1
        if sizes == "norm":
            row = specs.layernorm(device, "f16", tokens, width)
        elif sizes == "add":
            row = specs.elementwise(device, "f16", tokens, width)
        elif sizes == "act":
            row = specs.elementwise(device, "f16", tokens, hidden // tp, gated, 1)
        elif sizes == "emb":
            row = specs.embedding(device, "f16", tokens, width)
        else:
            products = {
                "qkv": ((heads + 2 * keys) * head // tp, width),
                "out": (width, heads * head // tp),
                "up": (gated * hidden // tp, width),
                "down": (width, hidden // tp),
            }
            n, k = products[sizes]
            row = specs.matmul(device, "f16", tokens, n, k)
        text = record[f"{column}_ms"]
        item = f"{record['model']} tp{tp} {column} {tokens} tokens"
        return Case(item, row, float(text) * _MILLI, column, {}, half_digit(text, _MILLI))

    return make


VIDUR_LAYERS: Final[Mapping[str, str]] = {
    "attn_pre_proj": "qkv",
    "attn_post_proj": "out",
    "mlp_up_proj": "up",
    "mlp_down_proj": "down",
    "input_layernorm": "norm",
    "add": "add",
}


def tpu_v4(data: Data) -> list[Row]:
    """Products and elementwise kernels of a TPU v4; the misaligned products have the peer's prediction."""
    aligned = data.read("tpu_v4_kernels/matmul_fp16.csv")
    misaligned = data.read("tpu_v4_kernels/matmul_fp16_misaligned.csv")
    others = [record for record in data.read("tpu_v4_kernels/nonmatmul_fp16.csv") if record["series"] in TPU_SERIES]
    return [
        *data.kernels("tpu-v4", "tpu-v4", aligned, tpu_product, "tpu_v4 products"),
        *data.kernels("tpu-v4", "tpu-v4", misaligned, _tpu_misaligned, "tpu_v4 products misaligned"),
        *data.kernels("tpu-v4", "tpu-v4", others, tpu_elementwise, "tpu_v4 elementwise"),
    ]


TPU_SERIES: Final = frozenset({"data_add_1d_1", "data_add_2d_1", "data_ele", "data_act1", "data_act2"})
TPU_SHAPELESS: Final = frozenset({"data_act1"})
"""Series whose rows say how many elements, not of which shape: equal ones take up to 1.4 times as long as others."""


def tpu_product(device: Device, record: Record) -> Case:
    """A row of the TPU v4's products."""
    m, n, k = whole(record, "m", "n", "k")
    row = specs.matmul(device, "f16", m, n, k)
    regime = record.get("regime", "misaligned")
    return Case(f"matmul {m}x{n}x{k} f16", row, number(record, "mean_us") * _MICRO, f"matmul to {regime}")


def _tpu_misaligned(device: Device, record: Record) -> Case:
    m, n, k = whole(record, "m", "n", "k")
    row = specs.matmul(device, "f16", m, n, k)
    peers = {"scale-sim linear": number(record, "peer_predicted_us") * _MICRO}
    return Case(f"matmul {m}x{n}x{k} f16", row, number(record, "measured_us") * _MICRO, "matmul misaligned", peers)


def tpu_elementwise(device: Device, record: Record) -> Case:
    """A row of the TPU v4's elementwise kernels; the extents go into the row, since they decide its layout."""
    elements = whole(record, "elements")[0]
    kind = record["op"]
    row = specs.elementwise(device, "f16", elements, 1, _TPU_INPUTS.get(kind, 1), int(kind in _TPU_SMOOTH))
    extents = [int(extent) for extent in record["shape"].split("x") if extent] or [elements]
    wide = extents[-1]
    row = replace(row, m=elements // wide, n=wide) if len(extents) > 1 else row
    row = replace(row, vector_flops=float(elements * _TPU_OPERATIONS.get(kind, 1)))
    return Case(f"{kind} {record['shape']} f16", row, number(record, "mean_us") * _MICRO, "elementwise")


def gemm(data: Data) -> list[Row]:
    """Products of two large tables, CUDA graphs or XLA; and a TPU ladder."""
    rows: list[Row] = []
    for name, device in _SXM.items():
        path = f"aiconfigurator/gemm_{name}_sxm.csv.gz"
        own = [record for record in data.read(path) if record["dtype"] == "bfloat16"]
        rows += data.kernels("gemm", device, data.thinned(own, path), _served, "aiconfigurator gemm bf16")
    records = data.read("xla_perf_tables/matmul.csv.gz")
    for key, device in _XLA.items():
        own = [record for record in records if record["device_key"] == key and usable(record)]
        for element in sorted({record["lhs"] for record in own}):
            some = [record for record in own if record["lhs"] == element]
            rows += data.kernels(
                "gemm", device, data.thinned(some, f"xla {element} on {device}"), xla_dot, f"xla matmul {element}"
            )
    ladder = data.read("tpu_step_times/gemm_tflops.csv")
    for prefix, device in (("v7x", "tpu-v7x"), ("v6e", "tpu-v6e")):
        own = [record for record in ladder if record["tpu"].startswith(prefix) and "host timer" not in record["basis"]]
        rows += data.kernels("gemm", device, own, _ladder, "tpu-recipes gemm")
    return rows


def usable(record: Record) -> bool:
    """Plain types only, without the rows above the data sheet's peak that the data's README names."""
    plain = record["lhs"] == record["rhs"] == record["out"] and record["lhs"] in _XLA_TYPES
    return (
        plain and number(record, "latency_us") > 0 and not (record["device_key"] == "gfx950" and record["lhs"] == "f32")
    )


def _served(device: Device, record: Record) -> Case:
    m, n, k = whole(record, "m", "n", "k")
    row = specs.matmul(device, "bf16", m, n, k)
    item = f"gemm {m}x{n}x{k} bf16 {record['framework']}"
    return Case(item, row, number(record, "latency_us") * _MICRO, "aiconfigurator bf16", key=f"{m}x{n}x{k} bf16")


def xla_dot(device: Device, record: Record) -> Case:
    """A row of XLA's table of products."""
    batch, m, n, k = whole(record, "batch", "m", "n", "k")
    element = _XLA_TYPES[record["lhs"]]
    row = specs.matmul(device, element, m, n, k, batch)
    return Case(f"dot {batch}x{m}x{n}x{k} {element}", row, number(record, "latency_us") * _MICRO, f"xla {element}")


def _ladder(device: Device, record: Record) -> Case:
    m, n, k = whole(record, "m", "n", "k")
    row = specs.matmul(device, "bf16", m, n, k)
    return Case(f"gemm {m}x{n}x{k} bf16", row, number(record, "latency_us") * _MICRO, "tpu ladder bf16")
