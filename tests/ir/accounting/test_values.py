"""Figures that are known beforehand, each derived by hand from the sizes."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from stablecast.ir.accounting import Context, Conventions, work_of
from stablecast.ir.errors import InputError

F32 = jnp.float32
BF16 = jnp.bfloat16
PLATFORMS = ("cpu", "cuda", "tpu")


def array(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def square(x):
    return x @ x


def test_gradient_of_a_checkpointed_scan(account_of):
    def loss(x, weights):
        def layer(carry, weight):
            return jnp.tanh(carry @ weight), None

        return lax.scan(jax.checkpoint(layer), x, weights)[0].sum()

    work = account_of(jax.grad(loss, argnums=(0, 1)), array(128, 128), array(24, 128, 128)).work
    assert work.matmul_flops == 24 * 4 * 2 * 128**3 == 402_653_184
    assert 0 < work.vector_flops + work.transcendentals <= 0.02 * work.matmul_flops


def test_scan_of_length_10(account_of):
    def run(x, w):
        return lax.scan(lambda carry, _: (carry @ w, None), x, None, length=10)[0]

    assert account_of(run, array(128, 128), array(128, 128)).work.flops == 41_943_040


def test_nested_fori_loops(account_of):
    def run(x, w):
        return lax.fori_loop(0, 3, lambda i, outer: lax.fori_loop(0, 5, lambda j, inner: inner @ w, outer), x)

    assert account_of(run, array(128, 128), array(128, 128)).work.flops == 62_914_560


def test_loop_to_a_traced_bound(account_of):
    def run(n, x):
        return lax.fori_loop(0, n, lambda i, carry: carry @ x, x)

    args = (array(dtype=jnp.int32), array(128, 128))
    unknown = account_of(run, *args)
    (symbol,) = unknown.symbols
    assert symbol.name == "n"
    assert unknown.total.terms[(symbol,)].matmul_flops == 4_194_304
    assert not unknown.complete
    assert unknown.to_dict()["lower_bound"]
    known = account_of(run, *args, conventions=Conventions(loops={"n": 7}))
    assert known.work.flops == 29_360_128
    assert known.complete
    assert account_of(run, *args, conventions=Conventions(loops={"n": 0})).work.flops == 0


def test_an_unknown_loop_name_is_refused(account_of):
    def run(n, x):
        return lax.fori_loop(0, n, lambda i, carry: carry @ x, x)

    with pytest.raises(InputError, match="no loop count 'm'"):
        account_of(run, array(dtype=jnp.int32), array(8, 8), conventions=Conventions(loops={"m": 7}))


@pytest.mark.parametrize(
    ("start", "keep", "step", "flops"),
    [
        (0, lambda i: i < 1, lambda i: i + 2, 524_288),
        (10, lambda i: i > 0, lambda i: i - 3, 2_097_152),
        (0, lambda i: i < 0, lambda i: i + 1, 0),
        (3, lambda i: i <= 9, lambda i: i + 3, 3 * 524_288),
        (8, lambda i: i >= 0, lambda i: i - 4, 3 * 524_288),
        (0, lambda i: i != 4, lambda i: i + 1, 4 * 524_288),
    ],
)
def test_while_loops(account_of, start, keep, step, flops):
    def run(x):
        return lax.while_loop(lambda t: keep(t[0]), lambda t: (step(t[0]), square(t[1])), (start, x))

    work = account_of(run, array(64, 64)).work
    assert work.flops == flops
    assert work.nbytes == flops / 524_288 * 3 * 16_384


@pytest.mark.parametrize(("branch", "flops"), [("max", 4_194_304), ("min", 16_384), (0.5, 2_105_344)])
def test_cond(account_of, branch, flops):
    def run(p, x):
        return lax.cond(p, square, lambda x: x + x, x)

    found = account_of(run, array(dtype=jnp.bool_), array(128, 128), conventions=Conventions(branch=branch))
    assert found.work.flops == flops
    assert (found.low.flops, found.high.flops) == (16_384, 4_194_304)


def test_a_probability_is_that_of_the_true_branch(account_of):
    def run(p, x):
        return lax.cond(p, lambda x: x + x, square, x)

    found = account_of(run, array(dtype=jnp.bool_), array(128, 128), conventions=Conventions(branch=0.75))
    assert found.work.flops == 0.75 * 16_384 + 0.25 * 4_194_304


def test_private_function_called_three_times(account_of):
    inner = jax.jit(square)
    assert account_of(lambda x: inner(inner(inner(x))), array(64, 64)).work.flops == 1_572_864


@pytest.mark.parametrize("platform", PLATFORMS)
def test_matmul_and_bias(account_of, platform):
    found = account_of(lambda a, b, c: a @ b + c, array(9, 73), array(73, 256), array(256), platform=platform)
    assert found.work.flops == 338_688


def test_einsum_over_two_indices(account_of):
    found = account_of(lambda a, b: jnp.einsum("iab,jab->ij", a, b), array(8, 4, 5), array(9, 4, 5))
    assert found.work.flops == 2_880


@pytest.mark.parametrize("spec", ["mk,kn->mn", "km,kn->mn", "mk,nk->mn", "km,nk->mn"])
@pytest.mark.parametrize("batch", [0, 3])
def test_layouts_of_a_product(account_of, spec, batch):
    sizes = {"m": 8, "k": 16, "n": 4, "b": 3}
    left, _, rest = spec.partition(",")
    right, _, out = rest.partition("->")
    if batch:
        left, right, out = f"b{left}", f"b{right}", f"b{out}"
    operands = [array(*(sizes[label] for label in labels)) for labels in (left, right)]
    found = account_of(lambda a, b: jnp.einsum(f"{left},{right}->{out}", a, b), *operands)
    assert found.work.matmul_flops == (3_072 if batch else 1_024)


def convolve(numbers, groups=1, strides=None):
    strides = strides or (1,) * (len(numbers[0]) - 2)
    return lambda x, w: lax.conv_general_dilated(
        x, w, strides, "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


@pytest.mark.parametrize(
    ("numbers", "x", "w", "groups", "padded", "useful"),
    [
        (("NHWC", "HWIO", "NHWC"), (1, 32, 32, 16), (3, 3, 16, 32), 1, 9_437_184, 9_048_064),
        (("NCHW", "OIHW", "NCHW"), (1, 16, 32, 32), (32, 16, 3, 3), 1, 9_437_184, 9_048_064),
        (("NWC", "WIO", "NWC"), (1, 32, 16), (3, 16, 32), 1, 98_304, 96_256),
        (("NHWC", "HWIO", "NHWC"), (1, 32, 32, 16), (3, 3, 1, 16), 16, 294_912, 282_752),
    ],
)
def test_convolutions(account_of, numbers, x, w, groups, padded, useful):
    for padding, flops in (("in", padded), ("out", useful)):
        found = account_of(convolve(numbers, groups), array(*x), array(*w), conventions=Conventions(padding=padding))
        assert found.work.flops == flops
        assert found.padded_flops == padded - useful
        assert found.dilation_flops == 0


def transposed(x, w):
    return lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=("NCHW", "IOHW", "NCHW"))


@pytest.mark.parametrize("padding", ["in", "out"])
def test_transposed_convolution(account_of, padding):
    args = (array(6, 192, 30, 96), array(192, 384, 2, 2))
    conventions = Conventions(padding=padding)
    forward = account_of(transposed, *args, conventions=conventions)
    assert forward.work.matmul_flops == 10_192_158_720
    assert forward.dilation_flops == 3 * 10_192_158_720

    def step(x, w):
        return jax.value_and_grad(lambda x, w: transposed(x, w).sum(), argnums=(0, 1))(x, w)

    assert account_of(step, *args, conventions=conventions).work.matmul_flops == 30_576_476_160


@pytest.mark.parametrize(("strides", "window", "features"), [((2, 2), 3, (16, 32)), ((1, 1), 1, (64, 256))])
def test_gradients_of_a_convolution(account_of, strides, window, features):
    forward = convolve(("NHWC", "HWIO", "NHWC"), strides=strides)
    x, w = array(2, 32, 32, features[0]), array(window, window, *features)
    useful = account_of(forward, x, w, conventions=Conventions(padding="out")).work.matmul_flops
    for argument in (0, 1):
        gradient = jax.grad(lambda x, w: (forward(x, w) ** 2).sum() / 2, argnums=argument)
        both = account_of(gradient, x, w, conventions=Conventions(padding="out"))
        assert both.work.matmul_flops == 2 * useful
        if strides == (2, 2) and argument == 0:
            assert both.dilation_flops > useful


def test_complex_product(account_of):
    assert account_of(square, array(64, 64, dtype=jnp.complex64)).work.flops == 2_097_152


@pytest.mark.parametrize("platform", PLATFORMS)
def test_cumsum_is_no_square(account_of, platform):
    assert 999 <= account_of(jnp.cumsum, array(1000), platform=platform).work.flops <= 20_000


def test_fft(account_of):
    work = account_of(jnp.fft.fft, array(1024, dtype=jnp.complex64)).work
    assert work.flops == 51_200
    assert work.nbytes == 16_384


@pytest.mark.parametrize("platform", PLATFORMS)
def test_cholesky(account_of, platform):
    found = account_of(jnp.linalg.cholesky, array(128, 128), platform=platform)
    assert found.work.matmul_flops == pytest.approx(128**3 / 3, rel=1e-12)
    assert found.complete


def attention(query, key, value, causal=False):
    return jax.nn.dot_product_attention(query, key, value, is_causal=causal, implementation="xla")


def test_grouped_query_attention(lower, account_of):
    args = (array(1, 256, 8, 64, dtype=BF16), array(1, 256, 2, 64, dtype=BF16), array(1, 256, 2, 64, dtype=BF16))
    assert account_of(attention, *args).work.matmul_flops == 134_217_728
    program = lower(attention, *args)
    dots = [op for op in program.walk() if op.name == "stablehlo.dot_general"]
    reads = [dict(zip(op.operand_types, work_of(op, Context(program)).reads, strict=True)) for op in dots]
    small = [nbytes for by_type in reads for kind, nbytes in by_type.items() if kind.elements == 256 * 2 * 64]
    assert sum(small) == 131_072


@pytest.mark.parametrize(("causal", "flops"), [("full", 12_582_912), ("exact", 6_389_760)])
def test_causal_attention(account_of, causal, flops):
    args = (array(1, 64, 12, 64),) * 3
    found = account_of(lambda q, k, v: attention(q, k, v, True), *args, conventions=Conventions(causal=causal))
    assert found.work.matmul_flops == flops


def test_gather_of_rows(account_of):
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))

    def rows(table, indices):
        return lax.gather(table, indices, numbers, (1, 4096), mode="promise_in_bounds")

    work = account_of(rows, array(50304, 4096), array(8, 1, dtype=jnp.int32)).work
    assert work.flops == 0
    assert work.nbytes == 262_176


def test_take_adds_only_its_checks(account_of):
    found = account_of(lambda table, i: jnp.take(table, i, axis=0), array(50304, 4096), array(8, dtype=jnp.int32))
    assert found.work.matmul_flops == found.work.transcendentals == 0
    assert 8 * 4096 <= found.work.vector_flops <= 8 * 4096 + 8 * 8


def test_sum_of_four(account_of):
    work = account_of(lambda x, y, z, w: x + y + z + w, *[array(1000, 1000)] * 4).work
    assert work.flops == 3_000_000
    assert work.nbytes == 36_000_000


def test_dynamic_update_slice(account_of):
    def update(x, row, i):
        return lax.dynamic_update_slice(x, row, (i, 0))

    args = (array(4096, 4096), array(1, 4096), array(dtype=jnp.int32))
    donated = account_of(update, *args, donate_argnums=(0,)).work
    kept = account_of(update, *args).work
    assert donated.nbytes == pytest.approx(32_772, abs=64)
    assert kept.nbytes == donated.nbytes + 134_217_728


def test_narrow_types(account_of):
    ints = account_of(lambda a, b: a + b, *[array(1024, 1024, dtype=jnp.int4)] * 2)
    assert ints.work.nbytes == 1_572_864
    bools = account_of(lambda a, b: a & b, *[array(1000, dtype=jnp.bool_)] * 2)
    assert bools.work.nbytes == 3_000


@pytest.mark.parametrize(("dtype", "name"), [(jnp.int8, "i8"), (jnp.int16, "i16")])
def test_integer_products_are_told_apart(account_of, dtype, name):
    def product(a, b):
        return lax.dot(a, b, preferred_element_type=jnp.int32)

    found = account_of(product, *[array(64, 64, dtype=dtype)] * 2)
    assert found.matmul_by_dtype == {name: 524_288}


def test_fp8_product(account_of):
    def product(a, b):
        return lax.dot(a, b, preferred_element_type=F32)

    found = account_of(product, *[array(64, 64, dtype=jnp.float8_e4m3fn)] * 2)
    assert found.work.flops == 524_288
    assert found.work.nbytes == 24_576
    assert found.matmul_by_dtype == {"f8e4m3fn": 524_288}


def test_exact_gelu_counts_one_erfc(account_of):
    work = account_of(lambda x: jax.nn.gelu(x, approximate=False), array(4096, 4096)).work
    assert work.transcendentals == 4096**2
    assert work.vector_flops == 4 * 4096**2


@pytest.mark.parametrize(("platform", "flops"), [("tpu", 1_048_576), ("cuda", 1_048_576), ("cpu", 8 * 1_048_576)])
def test_ragged_dot(account_of, platform, flops):
    args = (array(256, 64), array(8, 64, 32), array(8, dtype=jnp.int32))
    found = account_of(lax.ragged_dot, *args, platform=platform)
    assert found.work.matmul_flops == flops
    assert any("dense product over all groups" in note for note in found.notes) == (platform == "cpu")


def test_unknown_custom_call_is_opaque(account_text):
    found = account_text(
        "(%x: tensor<128x128xf32>) -> tensor<128x128xf32>",
        """%0 = stablehlo.sine %x : tensor<128x128xf32>
           %1 = stablehlo.custom_call @my_kernel(%0) : (tensor<128x128xf32>) -> tensor<128x128xf32>
           %2 = stablehlo.cosine %1 : tensor<128x128xf32>
           return %2 : tensor<128x128xf32>""",
    )
    (item,) = found.unmodelled
    assert (item.op, item.count, item.nbytes) == ("stablehlo.custom_call @my_kernel", 1, 131_072)
    assert item.share == pytest.approx(1 / 3)
    assert not found.complete
    assert found.work.transcendentals == 2 * 128**2


def layer_norm(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(
    ("function", "args"),
    [
        (layer_norm, (array(8, 1000),)),
        (jnp.floor, (array(8, 1000),)),
        (jnp.sort, (array(8, 1000),)),
        (lambda x: lax.top_k(x, 5), (array(8, 1000),)),
        (jax.nn.gelu, (array(8, 1000),)),
        (lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (2, 2), "VALID"), (array(8, 1000),)),
        (jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID").sum()), (array(8, 8),)),
        (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), (array(64, 64), array(64, 8))),
        (lambda key: lax.rng_bit_generator(key, (16, 16)), (array(4, dtype=jnp.uint32),)),
    ],
    ids=["layer_norm", "floor", "sort", "top_k", "gelu", "reduce_window", "max_pool_grad", "trsm", "rng_bits"],
)
def test_common_functions_are_costed(account_of, platform, function, args):
    found = account_of(function, *args, platform=platform)
    assert found.complete
    assert found.work.flops > 0
    assert found.work.nbytes >= sum(a.size * a.dtype.itemsize for a in args)


def test_random_normal_is_costed(account_of):
    found = account_of(lambda key: jax.random.normal(key, (64, 64)), jax.random.key(0))
    assert found.complete
    assert found.work.transcendentals == 64 * 64
    assert found.work.vector_flops > 20 * 5 * 64 * 64 / 2
