"""Custom calls and composites: known ones by rule, registered ones by their own, the rest opaque."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from stablecast.ir.accounting import Conventions, OpWork, load_rules, register_work
from stablecast.ir.accounting.registry import TARGETS
from stablecast.ir.accounting.rules_custom import causal_share
from stablecast.ir.errors import InputError

F32 = jnp.float32


def array(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def call(target, operands, result, config=""):
    """Signature and body of a program that is one custom call."""
    names = [f"%a{i}" for i in range(len(operands))]
    signature = f"({', '.join(f'{n}: {t}' for n, t in zip(names, operands, strict=True))}) -> {result}"
    text = json.dumps(config if isinstance(config, str) else json.dumps(config))
    body = f"""%0 = "stablehlo.custom_call"({", ".join(names)})
        <{{call_target_name = "{target}", backend_config = {text}}}> : ({", ".join(operands)}) -> {result}
      return %0 : {result}"""
    return signature, body


GEMM = {
    "gemm_backend_config": {
        "epilogue": "BIAS",
        "dot_dimension_numbers": {"lhs_contracting_dimensions": ["1"], "rhs_contracting_dimensions": ["0"]},
    }
}


@pytest.mark.parametrize("config", [GEMM, ""])
def test_cublas_matmul(account_text, config):
    operands = ["tensor<8x16xf16>", "tensor<16x4xf16>"]
    found = account_text(*call("__cublas$lt$matmul", operands, "tensor<8x4xf16>", config))
    assert found.work.matmul_flops == 2 * 8 * 16 * 4
    assert found.work.vector_flops == (32 if config else 0)
    assert found.work.nbytes == 2 * (128 + 64 + 32)
    assert found.complete


def test_batched_matmul_by_sizes_alone(account_text):
    operands = ["tensor<3x16x8xf32>", "tensor<3x4x16xf32>"]
    found = account_text(*call("__onednn$matmul", operands, "tensor<3x8x4xf32>"))
    assert found.work.matmul_flops == pytest.approx(3 * 2 * 8 * 16 * 4)


@pytest.mark.parametrize(
    ("target", "operands", "result"),
    [
        ("__cudnn$convForward", ["tensor<2x10x10x3xf32>", "tensor<8x3x3x3xf32>"], "tensor<2x8x8x8xf32>"),
        ("__cudnn$convBackwardInput", ["tensor<2x6x6x8xf32>", "tensor<8x3x3x3xf32>"], "tensor<2x8x8x3xf32>"),
        ("__cudnn$convBackwardFilter", ["tensor<2x8x8x3xf32>", "tensor<2x6x6x8xf32>"], "tensor<8x3x3x3xf32>"),
    ],
)
def test_cudnn_convolutions(account_text, target, operands, result):
    found = account_text(*call(target, operands, result))
    outputs = 8 * 8 if target.endswith("Forward") else 6 * 6
    assert found.work.matmul_flops == 2 * 2 * outputs * 8 * 27
    assert found.complete


def test_a_convolution_of_unknown_layout_is_marked(account_text):
    operands = ["tensor<2x8x8x8xf32>", "tensor<8x3x3x4xf32>"]
    found = account_text(*call("__cudnn$convForward", operands, "tensor<2x4x8x8xf32>"))
    assert not found.complete


ATTENTION = {
    "cudnn_fmha_backend_config": {
        "mask_type": "CAUSAL",
        "sliding_window_length": 0,
        "intermediate_tensor_shape": {"dimensions": ["2", "12", "64", "64"]},
    }
}


@pytest.mark.parametrize(("causal", "share"), [("full", 1), ("exact", 65 / 128)])
def test_cudnn_attention(account_text, causal, share):
    operands, result = ["tensor<2x64x12x32xbf16>"] * 3, "tensor<2x12x64x32xbf16>"
    conventions = Conventions(causal=causal)
    forward = account_text(*call("__cudnn$fmhaSoftmax", operands, result, ATTENTION), conventions)
    pairs = 2 * 12 * 64 * 64 * share
    assert forward.work.matmul_flops == 4 * pairs * 32
    assert forward.work.transcendentals == pairs
    assert forward.work.nbytes == 4 * 2 * 2 * 64 * 12 * 32
    backward = account_text(*call("__cudnn$fmhaSoftmaxBackward", operands, result, ATTENTION), conventions)
    assert backward.work.matmul_flops == 10 * pairs * 32


def test_attention_without_a_shape_is_opaque(account_text):
    operands, result = ["tensor<2x64x12x32xbf16>"] * 3, "tensor<2x12x64x32xbf16>"
    assert not account_text(*call("__cudnn$fmhaSoftmax", operands, result)).complete


@pytest.mark.parametrize(("keys", "window", "pairs"), [(4, 0, 10), (2, 0, 7), (6, 0, 10), (4, 2, 7)])
def test_causal_share(keys, window, pairs):
    assert causal_share(4, keys, window) == pairs / (4 * keys)


def test_pallas_kernel_with_and_without_an_estimate(account_text):
    estimate = {"custom_call_config": {"cost_estimate": {"flops": 1000, "transcendentals": 10, "bytes_accessed": 4096}}}
    square = "tensor<16x16xf32>"
    known = account_text(*call("tpu_custom_call", [square], square, estimate))
    assert known.work.parts == (1000, 0, 10, 2048, 2048)
    assert known.complete
    unknown = account_text(*call("tpu_custom_call", [square], square, {"custom_call_config": {}}))
    assert unknown.work.parts == (0, 0, 0, 1024, 1024)
    (item,) = unknown.unmodelled
    assert item.reason == "a kernel without a cost estimate"


def test_annotations_cost_nothing(account_text):
    square = "tensor<16x16xf32>"
    assert account_text(*call("Sharding", [square], square)).work.parts == (0, 0, 0, 0, 0)


QR = 2 * 48**2 * (64 - 16)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
@pytest.mark.parametrize(
    ("function", "args", "flops"),
    [
        (jnp.linalg.qr, (array(64, 48),), 2 * QR),
        (lambda x: lax.linalg.lu(x)[0], (array(64, 64),), 2 * 64**3 / 3),
        (lambda x: lax.linalg.cholesky(x), (array(3, 64, 64),), 3 * 64**3 / 3),
        (lambda x: lax.linalg.eigh(x)[0], (array(64, 64),), 9 * 64**3),
        (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), (array(64, 64), array(64, 8)), 64 * 64 * 8),
    ],
    ids=["qr", "lu", "cholesky", "eigh", "triangular_solve"],
)
def test_linear_algebra_on_every_platform(account_of, platform, function, args, flops):
    found = account_of(function, *args, platform=platform)
    assert found.work.matmul_flops == pytest.approx(flops)
    assert found.complete


def test_approximate_top_k(account_of):
    found = account_of(lambda x: lax.approx_max_k(x, 5), array(8, 1000), platform="tpu")
    assert found.work.vector_flops >= 8000
    assert found.complete


@pytest.fixture
def registered():
    """Names that a test may register; they are forgotten afterwards."""
    names = ["my_kernel", "my.block", "other_kernel"]
    yield names
    for name in names:
        TARGETS.remove(name)


def test_a_registered_rule(account_text, registered):
    @register_work("my_kernel")
    def work(op, context):
        return OpWork(matmul_flops=7 * op.result_type.elements)

    square = "tensor<16x16xf32>"
    found = account_text(*call("my_kernel", [square], square))
    assert found.work.parts == (7 * 256, 0, 0, 1024, 1024)
    assert found.complete
    with pytest.raises(InputError, match="already has a work rule"):
        register_work("my_kernel")(work)


def test_a_rule_for_a_composite_replaces_its_decomposition(account_text, registered):
    @register_work("my.block")
    def work(op, context):
        return OpWork(vector_flops=1, reads=(8,), writes=(8,))

    m = "tensor<8x16xf32>"
    rest = f"func.func private @impl(%x: {m}) -> {m} {{ %0 = stablehlo.sine %x : {m}\n return %0 : {m} }}"
    body = f'%0 = stablehlo.composite "my.block" %x {{decomposition = @impl}} : ({m}) -> {m}\nreturn %0 : {m}'
    assert account_text(f"(%x: {m}) -> {m}", body, rest=rest).work.parts == (0, 1, 0, 8, 8)


RULES = """
my_kernel:
  class: matmul
  matmul_flops: 2 * operands[0].shape[0] * operands[0].shape[1] * operands[1].shape[-1]
  transcendentals: max(results[0].elements, 3) // 2
  bytes_read: operands[0].bytes + config.extra
  note: as its paper says
"""


def test_rules_from_yaml(account_text, registered, tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    assert load_rules(path) == ("my_kernel",)
    operands = ["tensor<8x16xf32>", "tensor<16x4xf32>"]
    found = account_text(*call("my_kernel", operands, "tensor<8x4xf32>", {"extra": 100}))
    assert found.work.parts == (1024, 0, 16, 612, 128)
    assert found.complete


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not a table"),
        ("a: [", "not YAML"),
        ("my_kernel: 3", "no amounts"),
        ("my_kernel: {flops: 3}", "unknown key 'flops'"),
        ("my_kernel: {class: gemm}", "unknown class"),
        ('my_kernel: {matmul_flops: \'__import__("os").system("true")\'}', None),
        ("my_kernel: {matmul_flops: '(lambda: 1)()'}", "more than arithmetic"),
        ("my_kernel: {matmul_flops: '1 +'}", "not an expression"),
        ("my_kernel: {matmul_flops: true}", "not an expression"),
    ],
)
def test_bad_rule_files(account_text, registered, tmp_path, text, message):
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    if message is not None:
        with pytest.raises(InputError, match=message):
            load_rules(path)
        assert "my_kernel" not in TARGETS
        return
    load_rules(path)
    with pytest.raises(InputError, match="cannot work out"):
        account_text(*call("my_kernel", ["tensor<4xf32>"], "tensor<4xf32>"))


@pytest.mark.parametrize(
    "expression", ["operands[5].bytes", "1 / 0", "-1", "operands", "config.size", "results[0].name"]
)
def test_expressions_that_have_no_amount(account_text, registered, tmp_path, expression):
    path = tmp_path / "rules.yaml"
    path.write_text(f"my_kernel: {{matmul_flops: '{expression}'}}")
    load_rules(path)
    with pytest.raises(InputError, match="my_kernel: matmul_flops"):
        account_text(*call("my_kernel", ["tensor<4xf32>"], "tensor<4xf32>"))


def test_a_missing_rule_file(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        load_rules(Path(tmp_path) / "nowhere.yaml")
