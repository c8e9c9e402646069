"""No op of a random JAX program is silently zero."""

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from stablecast.ir.accounting import Context, account
from stablecast.ir.accounting.context import is_control
from stablecast.ir.program import Op, Program

Array = Any
STEPS: tuple[Callable[[Array], Array], ...] = (
    jnp.exp,
    jnp.tanh,
    jnp.floor,
    lambda x: jnp.cumsum(x, 0),
    jnp.sort,
    jax.nn.softmax,
    jax.nn.gelu,
    lambda x: jax.nn.gelu(x, approximate=False),
    jax.scipy.special.digamma,
    jax.scipy.special.erfinv,
    lambda x: x @ jnp.ones((x.shape[-1], 6)),
    lambda x: jnp.einsum("ij,kj->ik", x, x),
    lambda x: x.T * 2.0,
    lambda x: x.sum(-1, keepdims=True) + x,
    lambda x: jnp.where(x > 0, x, -x),
    lambda x: (x * 3).astype(jnp.int8).astype(jnp.float32),
    lambda x: jnp.clip(x, -1, 1),
    lambda x: jnp.concatenate([x, x + 1], 0),
    lambda x: jnp.pad(x, 1),
    lambda x: x[1:, :] - x[:-1, :],
    lambda x: x[::-1],
    lambda x: jnp.fft.rfft(x).real,
    lambda x: jnp.take(x, jnp.argsort(x[:, 0])[:3], axis=0),
    lambda x: x.at[0].add(1.0),
    lambda x: x.at[jnp.array([0, 1])].set(0.0),
    lambda x: lax.top_k(x, 2)[0],
    lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME"),
    lambda x: lax.conv_general_dilated(x[None, None], jnp.ones((2, 1, 3, 3)), (1, 1), "SAME")[0, 0],
    lambda x: lax.scan(lambda c, row: (c + row, c * row), x[0], x)[1],
    lambda x: lax.fori_loop(0, 3, lambda i, y: y * 1.5 + i, x),
    lambda x: lax.cond(x[0, 0] > 0, jnp.sin, lambda y: y - 1, x),
    lambda x: jax.checkpoint(lambda y: jnp.log1p(jnp.abs(y)))(x),
    lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
    lambda x: jax.jit(lambda y: y**2.5)(jnp.abs(x)),
    lambda x: lax.dynamic_update_slice(x, x[:1], (1, 0)),
    lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(x.shape[0])),
    lambda x: lax.map(lambda row: row / row.max(), x),
    lambda x: jnp.bitwise_xor(x.astype(jnp.int32), 5).astype(jnp.float32),
)
FREE = ("metadata", "annotation", "counted at")
ONLY_BYTES = ("0 FLOP", "writes its result only")


def random_program(lower: Callable[..., Program], seed: int) -> Program:
    """Two to six steps, now and then with their gradient."""
    dice = random.Random(seed)
    steps = dice.choices(STEPS, k=dice.randint(2, 6))
    shape = (dice.randint(4, 9), dice.randint(4, 9))

    def forward(x: Array) -> Array:
        for step in steps:
            x = step(x)
        return x

    function = forward if dice.random() < 0.7 else jax.grad(lambda x: forward(x).sum())
    return lower(function, jax.ShapeDtypeStruct(shape, jnp.float32), platform=dice.choice(("cpu", "cuda", "tpu")))


def silent(op: Op, context: Context) -> bool:
    """Whether `op` has no work although nothing says that such ops have none."""
    entry = context.entry(op)
    if entry is None or entry.rule is None or entry.notes.startswith(FREE) or not op.results:
        return entry is None
    if (entry.control and is_control(op)) or not any(kind.elements for kind in op.result_types):
        return False
    work = context.work(op, in_place=True)
    if not work.nbytes:
        return True
    if any(text in entry.notes for text in ONLY_BYTES) or not work.modelled:
        return False
    arithmetic = work.matmul_flops + work.vector_flops + work.transcendentals
    folds_nothing = "elements - results" in entry.notes and op.operand_types[0].elements == op.result_type.elements
    overwrites = "unless it overwrites" in entry.notes
    return not arithmetic and not folds_nothing and not overwrites


def check(lower: Callable[..., Program], seed: int) -> None:
    program = random_program(lower, seed)
    context = Context(program)
    inner = {id(op) for outer in program.walk() for region in outer.regions for op in region.walk() if _scalar(outer)}
    zeros = [op.name for op in program.walk() if id(op) not in inner and silent(op, context)]
    assert not zeros, (seed, zeros)
    found = account(program)
    assert not found.unmodelled, (seed, found.unmodelled)
    assert found.work.nbytes > 0
    assert min(found.work.parts) >= 0
    assert found.low.flops <= found.work.flops <= found.high.flops


def _scalar(op: Op) -> bool:
    """Whether the regions of `op` are the bodies of a reduction, not control flow."""
    return op.name not in ("stablehlo.while", "stablehlo.case", "stablehlo.if")


@pytest.mark.parametrize("seed", range(25))
def test_no_silent_zeros(lower, seed):
    check(lower, seed)


@pytest.mark.slow
def test_no_silent_zeros_in_2000_programs(lower):
    for seed in range(25, 2025):
        check(lower, seed)
