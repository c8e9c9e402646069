from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

SEQ, VOCAB = 4096, 128256
PARAMETERS = {"100m": 190.7e6, "200m": 341.5e6, "500m": 813.3e6, "1b": 1766.7e6, "2b": 3173.8e6, "3b": 4749.4e6}
TFLOP = {"100m": 6.25, "200m": 11.98, "500m": 29.64, "1b": 62.70, "2b": 109.32, "3b": 159.04}
TINY = {"seq": 32, "layers": 2, "d_model": 64, "vocab": 97, "batch": 2, "dtype": "f32"}


def step_flops(width: int, layers: int) -> int:
    weights = 3 * 2 * SEQ * (4 * width * 2 * width + 3 * width * 3.5 * width)
    attention = 32 * SEQ**2 * width
    ends = 3 * 2 * SEQ * VOCAB * width + 2 * 2 * SEQ * VOCAB * width
    return int(layers * (weights + attention) + ends)


@pytest.fixture
def tiny(llama: Any) -> tuple[Any, Any]:
    state, batch = llama.make_args(**TINY)
    return llama.init(state), llama.random_batch(batch, TINY["vocab"])


@pytest.mark.parametrize("size", ["100m", "200m", "500m", "1b", "2b", "3b"])
def test_products_of_every_size(llama: Any, lower: Any, size: str) -> None:
    width, layers = llama.SIZES[size]
    lowered = lower(llama.train_step, llama.make_args(size))
    assert len(lowered.named("stablehlo.dot_general")) == 29 * layers + 5
    assert lowered.dot_flops() == step_flops(width, layers)
    assert lowered.dot_flops() == pytest.approx(1e12 * TFLOP[size], rel=2e-3)


@pytest.mark.parametrize("size", PARAMETERS)
def test_state_of_every_size(llama: Any, size: str) -> None:
    state, batch = llama.make_args(size)
    layers = llama.SIZES[size][1]
    assert len(jax.tree.leaves(state)) == 3 * (9 * layers + 3) + 3
    assert {(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(batch)} == {((1, SEQ), "int32")}
    params = jax.tree.leaves(state["params"])
    assert sum(leaf.size for leaf in params) == pytest.approx(PARAMETERS[size], rel=3e-4)
    assert {leaf.dtype.name for leaf in params + jax.tree.leaves(state["adam"]["mu"])} == {"bfloat16"}


def test_backward_keeps_five_products_and_the_attention_output(llama: Any, lower: Any) -> None:
    lowered = lower(llama.train_step, llama.make_args(layers=3))
    assert len(lowered.named("stablehlo.reduce_precision")) == 3 * 6
    assert len(lowered.named("stablehlo.optimization_barrier")) == 3


def test_a_scanned_step_has_one_layer(llama: Any, lower: Any) -> None:
    state, batch = llama.make_args("3b", scan=True)
    assert state["params"]["layers"]["query"].shape == (32, 2624, 41, 128)
    lowered = lower(llama.train_step, (state, batch))
    assert len(lowered.named("stablehlo.dot_general")) == 29 + 5
    assert len(lowered.named("stablehlo.while")) == 2


def test_overrides(llama: Any) -> None:
    state, batch = llama.make_args(layers=3, d_model=256, heads=2, vocab=1000, batch=4, seq=64)
    layers = state["params"]["layers"]
    assert len(layers) == 3
    assert layers[0]["query"].shape == (256, 2, 128)
    assert layers[0]["wo"].shape == (896, 256)
    assert state["params"]["embedding"].shape == (1000, 256)
    assert batch["inputs"].shape == (4, 64)


@pytest.mark.parametrize("mesh", [{}, {"fsdp": 4, "data": 2, "tensor": 3}])
@pytest.mark.parametrize("scan", [False, True])
def test_next_state_is_shaped_like_the_state(llama: Any, mesh: dict[str, int], scan: bool) -> None:
    state, batch = llama.make_args(scan=scan, **mesh)
    after, metrics = jax.eval_shape(llama.train_step, state, batch)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == shapes
    assert all(leaf.shape == () for leaf in jax.tree.leaves(metrics))


def test_unknown_names(llama: Any) -> None:
    with pytest.raises(ValueError, match="unknown size '7b': choose one of 100m, 200m, 500m, 1b, 2b, 3b"):
        llama.make_args("7b")
    with pytest.raises(ValueError, match="unknown dtype 'i4'"):
        llama.make_args(dtype="i4")


def test_one_device_has_no_sharding(llama: Any) -> None:
    assert all(leaf.sharding is None for leaf in jax.tree.leaves(llama.make_args()))


def test_shardings(llama: Any, lower: Any) -> None:
    state, batch = llama.make_args(layers=1, data=2, fsdp=4, tensor=3)
    assert batch["inputs"].shape == (8, SEQ)
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(batch)} == {P(("data", "fsdp"))}
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, state["adam"]["mu"])
    assert specs == jax.tree.map(lambda leaf: leaf.sharding.spec, state["params"])
    assert specs["embedding"] == P("tensor", "fsdp")
    assert specs["logits"] == P("fsdp", "tensor")
    (layer,) = specs["layers"]
    assert layer["attention_norm"] == layer["mlp_norm"] == specs["final_norm"] == P()
    assert layer["query"] == layer["key"] == layer["value"] == layer["wi_0"] == layer["wi_1"] == P("fsdp", "tensor")
    assert layer["out"] == P("tensor", None, "fsdp")
    assert layer["wo"] == P("tensor", "fsdp")

    lowered = lower(llama.train_step, (state, batch))
    (mesh,) = lowered.named("sdy.mesh")
    assert '"data"=2, "fsdp"=4, "tensor"=3, "pipeline"=1' in str(mesh)
    assert len(lowered.named("sdy.sharding_constraint")) == 2 * (1 + 1)


def test_pipeline_splits_stacked_layers(llama: Any) -> None:
    state, _ = llama.make_args("500m", pipeline=4, fsdp=2)
    assert state["params"]["layers"]["wo"].sharding.spec == P("pipeline", "tensor", "fsdp")


@pytest.mark.parametrize("wrong", [{"tensor": 2}, {"pipeline": 4}, {"fsdp": 4, "batch": 2}])
def test_indivisible_mesh(llama: Any, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="does not divide shape"):
        llama.make_args("100m", **wrong)


def test_scopes_reach_the_lowered_step(llama: Any) -> None:
    lowered = jax.jit(llama.train_step).trace(*llama.make_args(**TINY)).lower(lowering_platforms=("cuda",))
    text = lowered.as_text(debug_info=True)
    for scope in ("jvp(embed)/", "jvp(layer1)/attention/", "jvp(layer1)/mlp/", "jvp(loss)/", "optimizer/"):
        assert scope in text


def test_loss_falls(llama: Any, tiny: tuple[Any, Any]) -> None:
    state, batch = tiny
    losses = []
    for _ in range(6):
        state, metrics = llama.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(np.log(TINY["vocab"]), rel=0.05)
    assert losses == sorted(losses, reverse=True)
    assert int(state["step"]) == int(state["adam"]["count"]) == 6


def test_recomputing_changes_no_gradient(llama: Any, tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    state, batch = tiny
    grads = jax.jit(jax.grad(llama.loss_fn))(state["params"], batch)
    monkeypatch.setattr(jax, "checkpoint", lambda function, **_: function)
    kept = jax.jit(jax.grad(lambda *args: llama.loss_fn(*args)))(state["params"], batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), grads, kept)


def test_scanned_layers_equal_unrolled_ones(llama: Any, tiny: tuple[Any, Any]) -> None:
    state, batch = tiny
    layers = state["params"]["layers"]
    stacked = state["params"] | {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}
    loss = jax.jit(llama.loss_fn)
    assert float(loss(stacked, batch)) == pytest.approx(float(loss(state["params"], batch)), rel=1e-6)


def test_attention_is_causal_within_segments(llama: Any) -> None:
    mask = llama.attention_mask(jnp.asarray([[1, 1, 2, 2]]))
    assert mask[0, 0].tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, False, True, False],
        [False, False, True, True],
    ]


def test_attention_matches_jax(llama: Any, tiny: tuple[Any, Any]) -> None:
    state, batch = tiny
    layer = jax.tree.map(lambda weight: 5 * weight, state["params"]["layers"][0])
    x = jax.random.normal(jax.random.key(0), (*batch["inputs"].shape, TINY["d_model"]))
    query, key, value = (jnp.einsum("btd,dhk->bthk", x, layer[name]) for name in ("query", "key", "value"))
    query, key = (llama.rope(part, batch["positions"]) for part in (query, key))
    mixed = jax.nn.dot_product_attention(query, key, value, scale=1.0, is_causal=True)
    expected = jnp.einsum("bthk,hkd->btd", mixed, layer["out"])
    found = llama.attention(layer, x, batch["positions"], batch["segments"])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_cross_entropy_counts_only_real_targets(llama: Any) -> None:
    logits = jax.random.normal(jax.random.key(0), (1, 3, 5))
    targets, counted = jnp.asarray([[4, 0, 2]]), jnp.asarray([[True, True, False]])
    expected = -(jax.nn.log_softmax(logits)[0, 0, 4] + jax.nn.log_softmax(logits)[0, 1, 0]) / 2
    assert float(llama.cross_entropy(logits, targets, counted)) == pytest.approx(float(expected), rel=1e-6)


def test_rope_depends_on_the_distance_only(llama: Any) -> None:
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 8, 1, llama.HEAD_DIM))
    positions = jnp.arange(8)[None]

    def scores(offset: int) -> jax.Array:
        rotated = [llama.rope(x, positions + offset) for x in (query, key)]
        return jnp.einsum("bthk,bshk->bhts", *rotated)

    np.testing.assert_allclose(scores(0), scores(5), rtol=1e-3, atol=1e-3)
    assert not np.allclose(scores(0), jnp.einsum("bthk,bshk->bhts", query, key), atol=0.1)


def test_learning_rate(llama: Any) -> None:
    rates = [float(llama.learning_rate(jnp.asarray(count))) for count in range(31)]
    assert rates[:3] == pytest.approx([1e-5, 2e-5, 3e-5])
    assert rates[3] == max(rates) == pytest.approx(3e-5)
    assert rates[30] == min(rates) == pytest.approx(3e-6)


def test_first_adamw_update_is_the_sign_and_the_decay(llama: Any) -> None:
    params, grads = jnp.asarray([1.0, -2.0, 3.0]), jnp.asarray([0.5, 0.25, -4.0])
    zeros = jnp.zeros(3)
    adam = {"count": jnp.asarray(0), "mu": zeros, "nu": zeros}
    updated, after = llama.adamw(params, grads, adam, jnp.asarray(0.1))
    np.testing.assert_allclose(updated, params - 0.1 * (np.sign(grads) + 0.1 * params), rtol=1e-6)
    np.testing.assert_allclose(after["mu"], 0.1 * grads, rtol=1e-6)
    assert int(after["count"]) == 1


def test_main_prints_a_finite_loss(llama: Any, capsys: pytest.CaptureFixture[str]) -> None:
    llama.main()
    losses = [float(line.split()[3].rstrip(",")) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 2
    assert np.isfinite(losses).all()
    assert losses[1] < losses[0]
