"""GPT-2, ViT, mixture of experts, DLRM and U-Net: their sizes, products and losses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

Example = Callable[[str], ModuleType]


def parameters(state: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(state["params"]))


def test_gpt2_parameters(example: Example) -> None:
    published = {"small": 124_439_808, "medium": 354_823_168, "large": 774_030_080, "xl": 1_557_611_200}
    assert {size: parameters(example("gpt2").make_args(size)[0]) for size in published} == published


def test_gpt2_products(example: Example, lower: Any) -> None:
    gpt2 = example("gpt2")
    step = lower(gpt2.train_step, gpt2.make_args(layers=2, batch=2))
    tokens, width = 2 * 1024, 768
    each = 12 * width * width + 2 * 1024 * width
    assert step.dot_flops() == 3 * 2 * tokens * (2 * each + width * 50257)


def test_vit_parameters(example: Example) -> None:
    """86.6 M, as the paper's table has for ViT-B/16 (86M) with its head of 1000 classes."""
    assert parameters(example("vit").make_args()[0]) == 86_567_656
    assert parameters(example("vit").make_args("large")[0]) == 304_326_632


def test_unet_parameters(example: Example) -> None:
    """859.5 M, as the U-Net of Stable Diffusion 1 has."""
    assert parameters(example("unet").make_args()[0]) == 859_520_964


def test_moe_uses_two_experts_a_token(example: Example) -> None:
    moe = example("moe")
    chances = jax.nn.softmax(jax.random.normal(jax.random.key(0), (2, 16, 4)))
    combine, imbalance = moe.routes(chances, capacity=16)
    used = np.asarray(combine > 0).sum((2, 3))
    assert used.tolist() == np.full((2, 16), 2).tolist()
    np.testing.assert_allclose(combine.sum((2, 3)), 1, rtol=1e-6)
    assert (np.asarray(combine > 0).sum(1) <= 1).all()
    assert float(imbalance) >= 0.5


def test_moe_drops_what_exceeds_the_capacity(example: Example) -> None:
    chances = jnp.broadcast_to(jnp.asarray([0.6, 0.3, 0.06, 0.04]), (1, 8, 4))
    combine, _ = example("moe").routes(chances, capacity=5)
    assert np.asarray(combine > 0).sum((1, 3)).tolist() == [[5, 5, 0, 0]]


def test_dlrm_interaction(example: Example) -> None:
    vectors = jax.random.normal(jax.random.key(0), (3, 5, 8))
    mixed = example("dlrm").interact(vectors[0], list(vectors[1:]))
    dots = [np.sum(np.asarray(vectors[i] * vectors[j]), -1) for i, j in ((1, 0), (2, 0), (2, 1))]
    np.testing.assert_allclose(mixed, np.concatenate([vectors[0], np.stack(dots, 1)], 1), rtol=1e-5)


def test_dlrm_touches_only_the_rows_it_looked_up(example: Example) -> None:
    dlrm = example("dlrm")
    shapes, batch = dlrm.make_args(batch=4, tables=2, rows=10, width=4, bottom=(8,), top=(8,))
    state = dlrm.init(shapes)
    before = np.asarray(state["tables"][0])
    values = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), batch)
    after, _ = dlrm.train_step(state, values)
    changed = np.flatnonzero((np.asarray(after["tables"][0]) != before).any(1))
    assert changed.tolist() == [1]


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("gpt2", {"size": "huge"}, "unknown size 'huge'"),
        ("gpt2", {"width": 100}, "no multiple of the 64 features"),
        ("gpt2", {"data": 3}, "cannot be split over 3 devices"),
        ("vit", {"size": "huge"}, "unknown size 'huge'"),
        ("vit", {"patch": 15}, "patches of 15 pixels"),
        ("moe", {"expert": 3}, "cannot be split over 3 devices"),
        ("unet", {"channels": 100}, "must be a multiple of 32"),
    ],
)
def test_wrong_arguments(example: Example, name: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        example(name).make_args(**settings)


@pytest.mark.parametrize("settings", [("gpt2", {"data": 4}), ("moe", {"expert": 4})])
def test_sharded_steps_lower(example: Example, lower: Any, settings: tuple[str, dict[str, int]]) -> None:
    name, axes = settings
    module = example(name)
    args = module.make_args(layers=1, vocab=512, seq=64, **axes)
    (mesh,) = lower(module.train_step, args).named("sdy.mesh")
    assert f'"{next(iter(axes))}"=4' in str(mesh)


@pytest.mark.parametrize(
    "name",
    ["dlrm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "vit", "moe", "unet"))],
)
def test_main_prints_a_falling_loss(example: Example, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    example(name).main()
    losses = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines()]
    assert losses == sorted(losses, reverse=True)
    assert np.isfinite(losses).all()


def test_llama_tpu_parameters(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Meta's model cards have."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    published = {"8b": 8_030_261_248, "70b": 70_553_706_496, "405b": 405_853_388_800}
    llama = example("llama_tpu")
    assert {size: parameters(llama.make_args(size)[0]) for size in published} == published


@pytest.mark.slow
def test_llama_tpu_loss_of_random_weights(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    llama = example("llama_tpu")
    llama.SIZES["tiny"] = (256, 2, 2, 1, 512)
    shapes, tokens = llama.make_args("tiny", batch=2, seq=16, vocab=64)
    text = jnp.arange(32, dtype=jnp.int32).reshape(2, 16) % 64
    _, loss = llama.train_step(llama.init(shapes), dict.fromkeys(tokens, text))
    assert float(loss) == pytest.approx(np.log(64), rel=0.1)


def test_moe_tpu_parameters(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    """As published, but for biases and sinks of attention and the multi-token head, which the example leaves out."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    moe = example("moe_tpu")
    counts = {size: parameters(moe.make_args(size)[0]) for size in moe.SIZES}
    left_out = 36 * (128 + 4096 + 2 * 512 + 2880 + 64)
    assert counts["gpt-oss-120b"] == 116_829_156_672 - left_out
    assert counts["deepseek-v3"] == pytest.approx(671_026_419_200, rel=1e-4)


def test_moe_tpu_window_and_routing(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention sees what a mask leaves; rows that moved come back, as their gradients do; experts as one by one."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    moe = example("moe_tpu")
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 16, 2, 8))
    scores = jnp.einsum("bthk,bshk->bhts", query, key) / 8**0.5
    back = jnp.arange(16)[:, None] - jnp.arange(16)[None]
    weights = jax.nn.softmax(jnp.where((back >= 0) & (back < 4), scores, -jnp.inf), axis=-1)
    expected = jnp.einsum("bhts,bshk->bthk", weights, value)
    np.testing.assert_allclose(moe.causal(query, key, value, 4), expected, rtol=1e-4, atol=1e-5)
    rows, order = query[0, :, 0], jnp.argsort(key[0, :, 0, 0])
    inverse = jnp.argsort(order)
    np.testing.assert_allclose(moe.moved(moe.moved(rows, order, inverse), inverse, order), rows)
    gradient = jax.grad(lambda x: jnp.sum(moe.moved(x, order, inverse) * rows))(rows)
    np.testing.assert_allclose(gradient, moe.moved(rows, inverse, order))
    x, router = jax.random.normal(jax.random.key(1), (2, 5, 8)), jax.random.normal(jax.random.key(2), (2, 5, 4))
    parts = [jax.random.normal(jax.random.key(n), (4, *shape)) for n, shape in enumerate(((8, 6), (8, 6), (6, 8)))]
    names = ["wi_0", "wi_1", "wo"]
    model = moe.Size(8, 1, 1, 1, 8, 4, 2, 6, 16)
    best, chosen = jax.lax.top_k(router, 2)
    gate, up, down = (part[chosen] for part in parts)
    each = jax.nn.silu(jnp.einsum("btd,btkdf->btkf", x, gate)) * jnp.einsum("btd,btkdf->btkf", x, up)
    alone = jnp.einsum("btkf,btkfd,btk->btd", each, down, jax.nn.softmax(best, axis=-1))
    np.testing.assert_allclose(moe.experts(model, names, 1, x, router, *parts), alone, rtol=2e-3, atol=2e-3)


def test_gemma_tpu_parameters(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand from MaxText's `gemma4-31b.yml` and `gemma4-e2b.yml`, without the images' part."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    gemma = example("gemma_tpu")
    vocab, width = 262144, 5376
    norms = 4 * width + 1
    local = 2 * width * 32 * 256 + 2 * width * 16 * 256 + 2 * 256 + norms
    whole = 2 * width * 32 * 512 + width * 4 * 512 + 2 * 512 + norms
    large = 50 * local + 10 * whole + 60 * 3 * width * 21504 + vocab * width + width
    width = 1536
    common = 5 * width + 1 + 2 * width * 256
    kinds = [(512 if number % 5 == 4 else 256, number < 15) for number in range(35)]
    small = sum(
        common + 2 * width * 8 * head + head + own * (2 * width * head + head) + 3 * width * 6144 * (1 if own else 2)
        for head, own in kinds
    )
    small += vocab * (width + 35 * 256) + width * 35 * 256 + width + 256
    counts = {size: parameters(gemma.make_args(size)[0]) for size in gemma.SIZES}
    assert counts == {"31b": large, "e2b": small}


@pytest.mark.slow
def test_gemma_tpu_loss_of_random_weights(
    example: Example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    example("gemma_tpu").main()
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert losses == pytest.approx([np.log(128), np.log(96)], rel=0.1)


@pytest.mark.slow
def test_moe_tpu_loss_of_random_weights(
    example: Example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    example("moe_tpu").main()
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert losses == pytest.approx([np.log(128), np.log(96)], rel=0.1)
