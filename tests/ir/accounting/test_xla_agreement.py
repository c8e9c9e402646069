"""Agreement with XLA's own cost analysis of unoptimised HLO, on programs without loops.

Where the two differ on purpose: XLA does not count edge padding of convolutions (so it is left out here), counts a
type conversion as a FLOP, a comparison of a sort as one whatever its comparator, a complex op as one, and N^2 for
cumsum. Those are left out of the programs.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from stablecast.ir.accounting import Conventions, account
from stablecast.ir.mlir import write_bytecode
from stablecast.ir.reader import read

F32 = jnp.float32


def array(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def both(function, *args):
    """FLOPs and transcendentals, ours and XLA's."""
    lowered = jax.jit(function).trace(*args).lower(lowering_platforms=("cpu",))
    program = read(write_bytecode(lowered.compiler_ir("stablehlo")))
    work = account(program, Conventions(padding="out")).work
    theirs = lowered.cost_analysis()
    ours = (work.matmul_flops + work.vector_flops, work.transcendentals)
    return ours, (theirs.get("flops", 0), theirs.get("transcendentals", 0)), work.nbytes, theirs["bytes accessed"]


X = array(64, 96)
CASES = {
    "add": (lambda x: x + x, X),
    "exp": (jnp.exp, X),
    "power": (lambda x: x**2.5, X),
    "sign": (jnp.sign, X),
    "matmul": (lambda x: x @ x, array(64, 64)),
    "batched": (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), array(3, 8, 16), array(3, 16, 4)),
    "conv": (
        lambda x, w: lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        array(2, 17, 15, 8),
        array(3, 3, 8, 16),
    ),
    "transposed conv": (
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        array(2, 9, 7, 8),
        array(3, 3, 8, 16),
    ),
    "weight gradient": (
        jax.grad(
            lambda w, x: lax.conv_general_dilated(
                x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=4
            ).sum()
        ),
        array(3, 3, 2, 16),
        array(2, 17, 15, 8),
    ),
    "softmax": (jax.nn.softmax, X),
    "sum": (lambda x: x.sum(0), X),
    "argmax": (lambda x: jnp.argmax(x, 1), X),
    "gelu": (jax.nn.gelu, X),
    "where": (lambda x: jnp.where(x > 0, x, 0.0), X),
    "max pool": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"), X),
    "max pool gradient": (
        jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID").sum()),
        X,
    ),
    "scatter add": (lambda x, i, u: x.at[i].add(u), X, array(8, dtype=jnp.int32), array(8, 96)),
    "reduced precision": (lambda x: lax.reduce_precision(x, 5, 10), X),
    "layer norm": (lambda x: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5), X),
}


@pytest.mark.parametrize("name", CASES)
def test_flops_agree(name):
    function, *args = CASES[name]
    ours, theirs, _, _ = both(function, *args)
    # XLA counts the few rank-0 integer ops, which are loop and address control here.
    assert ours == pytest.approx(theirs, abs=8)


@pytest.mark.parametrize(
    "name", ["add", "exp", "matmul", "batched", "conv", "transposed conv", "sum", "max pool", "gelu"]
)
def test_bytes_agree(name):
    function, *args = CASES[name]
    _, _, ours, theirs = both(function, *args)
    assert ours == pytest.approx(theirs, abs=64)
