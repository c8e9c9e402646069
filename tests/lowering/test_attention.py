"""Attention recognised in what frameworks really write."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from stablecast.frontends.script import load_module
from stablecast.ir.device_program import DeviceProgram, Kernel, Loop
from stablecast.ir.kernels import KernelClass, KernelRow
from stablecast.lowering.attention_shape import AttentionShape
from stablecast.lowering.categories import Category
from stablecast.lowering.execution import attention
from stablecast.lowering.execution.attention_form import Site
from stablecast.lowering.graph import Graph
from stablecast.lowering.target import Target

Lower = Callable[..., DeviceProgram]
EXAMPLES = Path(__file__).parents[2] / "examples"
FLASH = Target(attention="flash")
B, T, S, H, D = 2, 256, 384, 4, 64


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def rows_of(program: DeviceProgram) -> list[KernelRow]:
    found: list[KernelRow] = []
    bodies = [program.body]
    while bodies:
        for node in bodies.pop():
            if isinstance(node, Kernel):
                found.append(program.table.rows[node.row])
            elif isinstance(node, Loop):
                bodies.append(node.body)
    return found


def attention_rows(program: DeviceProgram) -> list[KernelRow]:
    return [row for row in rows_of(program) if row.klass == KernelClass.ATTENTION]


def written_out(
    q: Any, k: Any, v: Any, *, causal: bool = False, scale: bool = True, shift: bool = True, after: bool = False
) -> Any:
    """softmax(q k) v with q of [b, t, h, d]; `after`: divided after the value product."""
    scores = jnp.einsum("bthd,bshd->bhts", q, k)
    if scale:
        scores = scores / 8.0
    if causal:
        t, s = scores.shape[-2:]
        scores = jnp.where(jnp.tril(jnp.ones((t, s), bool), s - t), scores, -1e30)
    if shift:
        scores = scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores)
    total = weights.sum(-1, keepdims=True)
    if after:
        return jnp.einsum("bhts,bshd->bthd", weights, v) / total.transpose(0, 2, 1, 3)
    return jnp.einsum("bhts,bshd->bthd", weights / total, v)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"causal": True},
        {"shift": False},
        {"scale": False},
        {"after": True},
        {"causal": True, "after": True, "shift": False, "scale": False},
    ],
)
def test_every_spelling_is_one_kernel(lowered: Lower, settings: dict[str, bool]) -> None:
    """bf16 q of 2x256x4x64, k and v of 2x384x4x64: read once, the result written once, nothing of the scores."""
    program = lowered(
        lambda q, k, v: written_out(q, k, v, **settings),
        bf16(B, T, H, D),
        bf16(B, S, H, D),
        bf16(B, S, H, D),
        target=FLASH,
    )
    (row,) = rows_of(program)
    assert (row.batch, row.hq, row.hkv, row.sq, row.skv, row.d) == (B, H, H, T, S, D)
    assert (row.klass, row.direction, row.causal) == (KernelClass.ATTENTION, "fwd", int(settings.get("causal", False)))
    assert row.matmul_flops == 2 * 2 * B * H * T * S * D
    assert row.bytes_read == 2 * (B * T * H * D + 2 * B * S * H * D)
    assert row.bytes_written == 2 * B * T * H * D
    assert row.math == "bf16"


@pytest.mark.parametrize(
    ("seen", "window"),
    [
        (lambda q, k: q - k < 48, 48),
        (lambda q, k: q - k <= 48, 49),
        (lambda q, k: k - q > -48, 48),
        (lambda q, k: jax.lax.gt(jnp.full((T, T), 48), q - k), 48),
        (lambda q, k: q >= k, 0),
    ],
)
def test_window_of_a_mask(lowered: Lower, seen: Any, window: int) -> None:
    """Whether positions are compared as they are or by their difference, in a loop whose positions lie outside."""

    def layers(q: Any, k: Any, v: Any) -> Any:
        def layer(q: Any, _: Any) -> Any:
            at = jnp.arange(T)
            mask = (at[:, None] >= at[None, :]) & seen(at[:, None], at[None, :])
            scores = jnp.einsum("bthd,bshd->bhts", q, k) + (mask.astype(jnp.bfloat16) - 1) * 1e30
            return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v), None

        return jax.lax.scan(layer, q, None, length=3)[0]

    shape = bf16(B, T, H, D)
    (row,) = attention_rows(lowered(layers, shape, shape, shape, target=FLASH))
    assert (row.causal, row.window) == (1, window)


def test_as_written_is_what_xla_does_by_itself(lowered: Lower) -> None:
    shapes = bf16(B, T, H, D), bf16(B, S, H, D), bf16(B, S, H, D)
    assert not attention_rows(lowered(written_out, *shapes))
    assert len(rows_of(lowered(written_out, *shapes))) > 2


def test_masked_pairs_are_not_useful_work(lowered: Lower) -> None:
    shape = bf16(B, T, H, D)
    program = lowered(lambda q, k, v: written_out(q, k, v, causal=True), shape, shape, shape, target=FLASH)
    (row,) = attention_rows(program)
    assert row.padded_flops == pytest.approx(row.matmul_flops * (1 - (T + 1) / (2 * T)))


@pytest.mark.parametrize("settings", [{}, {"causal": True}, {"after": True}, {"shift": False}])
def test_the_backward_pass_is_one_kernel_more(lowered: Lower, settings: dict[str, bool]) -> None:
    def step(q: Any, k: Any, v: Any, g: Any) -> Any:
        out, pull = jax.vjp(lambda *a: written_out(*a, **settings), q, k, v)
        return out, pull(g)

    q, k = bf16(B, T, H, D), bf16(B, S, H, D)
    program = lowered(step, q, k, k, q, target=FLASH)
    forward, backward = attention_rows(program)
    assert (forward.direction, backward.direction) == ("fwd", "bwd")
    assert backward.matmul_flops == 5 * 2 * B * H * T * S * D
    scores = 2 * B * H * T * S
    assert forward.bytes_written < scores
    assert backward.bytes_read < scores
    assert not [row for row in rows_of(program) if row.klass == KernelClass.MATMUL]


def test_recomputed_attention_runs_forward_twice(lowered: Lower) -> None:
    def step(q: Any, k: Any, v: Any, g: Any) -> Any:
        out, pull = jax.vjp(jax.checkpoint(lambda *a: written_out(*a, after=True)), q, k, v)
        return out, pull(g)

    q, k = bf16(B, T, H, D), bf16(B, S, H, D)
    directions = [row.direction for row in attention_rows(lowered(step, q, k, k, q, target=FLASH))]
    assert directions in (["fwd", "fwd", "bwd"], ["fwd", "bwd"])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_jax_nn(lowered: Lower, kv_heads: int, causal: bool) -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal)

    key = bf16(B, T, kv_heads, D)
    (row,) = attention_rows(lowered(attend, bf16(B, T, H, D), key, key, target=FLASH))
    assert (row.batch, row.hq, row.hkv, row.sq, row.skv, row.d) == (B, H, kv_heads, T, T, D)
    assert row.causal == int(causal)


def test_a_bias_that_is_read_and_dropout(lowered: Lower) -> None:
    def attend(q: Any, k: Any, v: Any, bias: Any, keep: Any) -> Any:
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) + bias)
        return jnp.einsum("bhts,bshd->bthd", jnp.where(keep, weights / 0.9, 0.0), v)

    shape = bf16(B, T, H, D)
    keep = jax.ShapeDtypeStruct((B, H, T, T), jnp.bool_)
    (row,) = rows_of(lowered(attend, shape, shape, shape, bf16(1, H, T, T), keep, target=FLASH))
    assert row.klass == KernelClass.ATTENTION
    assert row.bytes_read == 3 * 2 * B * T * H * D + 2 * H * T * T + B * H * T * T


def test_a_loop_over_layers(lowered: Lower) -> None:
    def layers(x: Any, w: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            q = jnp.einsum("btd,dhk->bthk", x, w)
            return x + written_out(q, q, q, causal=True).reshape(x.shape), None

        return jax.lax.scan(layer, x, w)[0]

    program = lowered(layers, bf16(B, T, H * D), bf16(6, H * D, H, D), target=FLASH)
    (row,) = attention_rows(program)
    assert program.table.count[program.table.rows.index(row)] == 6


def test_layers_of_a_loop_run_again(lowered: Lower) -> None:
    """A decoder whose layers keep their input only: softmax's gradient reaches that of the scores in two ways.

    Each pass is one kernel, and none of them waits for what only another one can make.
    """
    module = load_module(EXAMPLES / "llama_tpu.py")
    module.SIZES["tiny"] = (512, 2, H, 2, 1024)
    state, batch = module.make_args("tiny", batch=B, seq=T, vocab=256)
    rows = rows_of(lowered(jax.grad(module.loss_fn), state["params"], batch, target=FLASH))
    passes = [row for row in rows if row.klass == KernelClass.ATTENTION]
    assert sorted(row.direction for row in passes) == ["bwd", "fwd", "fwd"]
    assert max(row.matmul_flops for row in passes) == 5 * 2 * B * H * T * T * module.HEAD_DIM
    assert not [row for row in rows if row.klass == KernelClass.MATMUL and row.batch > 1]


def test_no_kernel_waits_for_itself(lowered: Lower, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recognition that took the first and the last of three products for one kernel: they stay three."""

    def site(graph: Graph, score: int) -> Site:
        products = [node for node, kind in enumerate(graph.categories) if kind is Category.MATMUL]
        return Site(AttentionShape(B, 1, 1, T, T, T), {products[0], products[-1]}, set(), set(), set())

    monkeypatch.setattr(attention, "find_site", site)
    program = lowered(lambda x: x @ (x @ (x @ x)), bf16(B, T, T), target=FLASH)
    assert [row.klass for row in rows_of(program)] == [KernelClass.MATMUL] * 3
    program = lowered(lambda x: x @ (x @ x), bf16(B, T, T), target=FLASH)
    assert [row.klass for row in rows_of(program)] == [KernelClass.ATTENTION]


def test_products_that_only_look_like_attention(lowered: Lower) -> None:
    """No row sum, no exponential, or the wrong dimension: matrix products all."""

    def no_sum(q: Any, k: Any, v: Any) -> Any:
        return jnp.einsum("bhts,bshd->bthd", jnp.exp(jnp.einsum("bthd,bshd->bhts", q, k)), v)

    def linear(q: Any, k: Any, v: Any) -> Any:
        return jnp.einsum("bhts,bshd->bthd", jnp.einsum("bthd,bshd->bhts", q, k), v)

    shape = bf16(B, T, H, D)
    for function in (no_sum, linear):
        assert not attention_rows(lowered(function, shape, shape, shape, target=FLASH))


def test_unknown_choice(lowered: Lower) -> None:
    from stablecast.ir.errors import InputError

    with pytest.raises(InputError, match="unknown --attention 'fast'"):
        lowered(lambda x: x + 1, bf16(4), target=replace(FLASH, attention="fast"))
