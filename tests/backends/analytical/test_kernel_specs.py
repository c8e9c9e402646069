"""Kernel rows from sizes."""

import pytest

from stablecast.backends.catalogue import Catalogue
from stablecast.backends.kernel_specs import BUILDERS, kernel_row, math_mode, size_names
from stablecast.ir.errors import InputError

CATALOGUE = Catalogue()
A100, V100, V5P, CPU = (CATALOGUE.device(name) for name in ("a100-sxm-40gb", "v100-sxm2", "tpu-v5p", "cpu"))


@pytest.mark.parametrize(
    ("element", "device", "precision", "expected"),
    [
        ("f32", A100, "default", "tf32"),
        ("f32", A100, "highest", "fp32"),
        ("f32", V100, "default", "fp32"),
        ("bf16", V100, "default", "fp32"),
        ("f16", V100, "default", "fp16"),
        ("f32", V5P, "default", "bf16"),
        ("f32", V5P, "high", "bf16x3"),
        ("f32", V5P, "highest", "bf16x6"),
        ("f16", V5P, "default", "bf16"),
        ("f32", CPU, "default", "fp32"),
        ("fp8", A100, "default", "fp8_e4m3"),
        ("f8e5m2", A100, "default", "fp8_e5m2"),
        ("int8", A100, "default", "int8"),
        ("f64", A100, "default", "fp64"),
        ("i32", A100, "default", "int32"),
        ("f4e2m1fn", A100, "default", "fp4"),
    ],
)
def test_math_modes(element: str, device: object, precision: str, expected: str) -> None:
    assert math_mode(element, device, precision) == expected  # type: ignore[arg-type]


def test_matmul() -> None:
    row = kernel_row("matmul", A100, "bf16", m=4, n=8, k=16, batch=2)
    assert row.matmul_flops == 2 * 2 * 4 * 8 * 16
    assert (row.bytes_read, row.bytes_written) == (2 * 2 * (64 + 128), 2 * 2 * 32)


def test_conv2d_forward_and_gradients() -> None:
    sizes = {"n": 2, "h": 8, "w": 8, "c": 4, "co": 6, "r": 3, "s": 3, "stride": 2, "pad": 1}
    forward, data, weights = (
        kernel_row("conv2d", A100, "f16", direction=way, **sizes) for way in ("fwd", "dgrad", "wgrad")
    )
    flops = 2 * 2 * 4 * 4 * 6 * 4 * 9
    assert (forward.m, forward.n, forward.k) == (32, 6, 36)
    assert (data.m, data.n, data.k) == (128, 4, 54)
    assert (weights.m, weights.n, weights.k) == (36, 6, 32)
    assert [row.matmul_flops for row in (forward, data, weights)] == [flops] * 3
    assert data.dilation_flops == 2 * 128 * 4 * 54 - flops
    assert forward.bytes_read == 2 * (2 * 64 * 4 + 9 * 24)
    assert weights.bytes_written == 2 * 9 * 24


def test_depthwise() -> None:
    row = kernel_row("conv2d", A100, "f16", n=1, h=4, w=4, c=8, co=8, r=3, s=3, pad=1, groups=8)
    assert (row.batch, row.n, row.k) == (8, 1, 9)
    assert row.matmul_flops == 2 * 16 * 8 * 9


def test_rows_and_elements() -> None:
    add = kernel_row("elementwise", A100, "f32", m=10, n=10)
    assert (add.bytes_read, add.bytes_written, add.vector_flops) == (800, 400, 100)
    total = kernel_row("reduce", A100, "f32", m=10, n=10)
    assert (total.elems, total.reduced, total.bytes_written) == (10, 10, 40)
    assert kernel_row("softmax", A100, "f32", m=10, n=10).transcendentals == 100
    assert kernel_row("layernorm", A100, "f32", m=10, n=10).bytes_written == 400


@pytest.mark.parametrize(
    ("sq", "skv", "causal", "window", "pairs"),
    [(4, 4, 0, 0, 16), (4, 4, 1, 0, 10), (2, 4, 1, 0, 7), (4, 4, 1, 2, 7), (4, 2, 1, 0, 0), (4, 8, 0, 2, 8)],
)
def test_pairs_that_attention_sees(sq: int, skv: int, causal: int, window: int, pairs: int) -> None:
    if skv < sq:
        return
    row = kernel_row("attention", A100, "bf16", batch=1, hq=1, sq=sq, skv=skv, d=8, causal=causal, window=window)
    assert row.useful_flops == pytest.approx(4 * pairs * 8)


def test_attention_backward_and_decode() -> None:
    forward = kernel_row("attention", A100, "bf16", batch=2, hq=4, hkv=2, sq=16, skv=16, d=8)
    backward = kernel_row("attention", A100, "bf16", batch=2, hq=4, hkv=2, sq=16, skv=16, d=8, direction="bwd")
    assert backward.matmul_flops == 2.5 * forward.matmul_flops
    assert forward.bytes_read == 2 * (2 * 4 * 16 * 8 + 2 * 2 * 2 * 16 * 8)
    assert kernel_row("attention", A100, "bf16", batch=2, hq=4, sq=1, skv=16, d=8).phase == "decode"


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("matmull", {"m": 1}, "unknown kernel 'matmull'; did you mean matmul"),
        ("matmul", {"m": 1, "n": 1}, "kernel matmul needs k"),
        ("matmul", {"m": 1, "n": 1, "k": 1, "q": 1}, "kernel matmul has no size q"),
        ("matmul", {"m": 0, "n": 1, "k": 1}, "size m of kernel matmul is 0"),
        ("conv2d", {"n": 1, "h": 2, "w": 2, "c": 1, "co": 1, "r": 3, "s": 3}, "a 3x3 window does not fit"),
        (
            "conv2d",
            {"n": 1, "h": 4, "w": 4, "c": 1, "co": 1, "r": 3, "s": 3, "direction": "up"},
            "unknown direction 'up'",
        ),
    ],
)
def test_bad_sizes(kind: str, sizes: dict[str, int | str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        kernel_row(kind, A100, "bf16", **sizes)
    assert str(caught.value).startswith(message)


def test_bad_precision() -> None:
    with pytest.raises(InputError, match="unknown precision 'medium'"):
        math_mode("f32", A100, "medium")


def test_every_builder_says_its_sizes() -> None:
    for kind in BUILDERS:
        needed, known = size_names(kind)
        assert set(needed) <= set(known)
        assert "device" not in known
