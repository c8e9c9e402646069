from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

PARAMETERS = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160}
CONVOLUTIONS = {18: 20, 34: 36, 50: 53, 101: 104, 200: 203}


def network_args(resnet: Any, **kwargs: Any) -> tuple[Any, ...]:
    state, batch = resnet.make_args(**kwargs)
    return state["params"], state["statistics"], batch["images"]


@pytest.mark.parametrize("depth", [18, 34, 50, 101, pytest.param(200, marks=pytest.mark.slow)])
def test_forward_and_step_convolutions(resnet: Any, lower: Any, depth: int) -> None:
    forward = lower(resnet.network, network_args(resnet, depth=depth))
    step = lower(resnet.train_step, resnet.make_args(depth))
    count = CONVOLUTIONS[depth]
    assert len(forward.named("stablehlo.convolution")) == count
    assert len(step.named("stablehlo.convolution")) == 3 * count - 1


def test_resnet_50_forward_flops(resnet: Any, lower: Any) -> None:
    flops = lower(resnet.network, network_args(resnet)).conv_flops()
    assert flops == pytest.approx(2.093e12, rel=1e-3)
    assert flops == 256 * sum(2 * pixels * weights for pixels, weights in resnet_50_convolutions())


def resnet_50_convolutions() -> list[tuple[int, int]]:
    """Output pixels and kernel weights of each convolution, written out from the paper's table."""
    found = [(112 * 112, 7 * 7 * 3 * 64)]
    channels, side = 64, 56
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            before = side
            if stage and not block:
                side //= 2
            found.append((before**2, channels * width))
            found.append((side**2, 9 * width * width))
            found.append((side**2, width * 4 * width))
            if not block:
                found.append((side**2, channels * 4 * width))
            channels = 4 * width
    return found


@pytest.mark.parametrize("depth", PARAMETERS)
def test_parameters(resnet: Any, depth: int) -> None:
    state, _ = resnet.make_args(depth)
    assert sum(leaf.size for leaf in jax.tree.leaves(state["params"])) == PARAMETERS[depth]


def test_resnet_50_arguments(resnet: Any) -> None:
    state, batch = resnet.make_args()
    assert len(jax.tree.leaves(state["params"])) == len(jax.tree.leaves(state["momentum"])) == 161
    assert len(jax.tree.leaves(state["statistics"])) == 106
    assert {leaf.dtype.name for name in ("params", "statistics") for leaf in jax.tree.leaves(state[name])} == {
        "float32"
    }
    assert (batch["images"].shape, batch["images"].dtype.name) == ((256, 224, 224, 3), "float16")


@pytest.mark.parametrize(("dtype", "element"), [("f16", "f16"), ("bf16", "bf16")])
def test_convolutions_run_in_the_images_dtype(resnet: Any, lower: Any, dtype: str, element: str) -> None:
    step = lower(resnet.train_step, resnet.make_args(18, batch=8, image=64, dtype=dtype))
    found = {str(op.results[0].type.element_type) for op in step.named("stablehlo.convolution")}
    assert found == {element}


@pytest.mark.parametrize("depth", [18, 50])
def test_next_state_is_shaped_like_the_state(resnet: Any, depth: int) -> None:
    state, batch = resnet.make_args(depth)
    after, _ = jax.eval_shape(resnet.train_step, state, batch)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == shapes


def test_batch_is_split_and_the_rest_copied(resnet: Any, lower: Any) -> None:
    state, batch = resnet.make_args(18, batch=1024, data=4)
    assert batch["images"].sharding.spec == batch["labels"].sharding.spec == P("data")
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(state)} == {P()}
    (mesh,) = lower(resnet.train_step, (state, batch)).named("sdy.mesh")
    assert '"data"=4' in str(mesh)


def test_wrong_arguments(resnet: Any) -> None:
    with pytest.raises(ValueError, match="unknown depth 19: choose one of 18, 34, 50, 101, 200"):
        resnet.make_args(19)
    with pytest.raises(ValueError, match="unknown dtype 'f8'"):
        resnet.make_args(dtype="f8")
    with pytest.raises(ValueError, match="10 images cannot be split over 4 devices"):
        resnet.make_args(batch=10, data=4)


def test_batch_norm_matches_its_definition(resnet: Any) -> None:
    x = np.random.default_rng(0).normal(3, 2, (4, 5, 5, 6)).astype(np.float32)
    params = {"scale": np.full(6, 2, np.float32), "bias": np.full(6, 1, np.float32)}
    old = {"mean": np.zeros(6, np.float32), "variance": np.ones(6, np.float32)}
    y, new = resnet.batch_norm(params, old, x)
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    np.testing.assert_allclose(y, 2 * (x - mean) / np.sqrt(variance + 1e-5) + 1, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(new["mean"], 0.1 * mean, rtol=1e-5)
    np.testing.assert_allclose(new["variance"], 0.9 + 0.1 * variance, rtol=1e-4)


@pytest.mark.slow
def test_main_prints_a_falling_loss(resnet: Any, capsys: pytest.CaptureFixture[str]) -> None:
    resnet.main()
    losses = [float(line.split()[3].rstrip(",")) for line in capsys.readouterr().out.splitlines()]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
