from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest


def test_products(mlp: Any, lower: Any) -> None:
    step = lower(mlp.train_step, mlp.make_args())
    first, second, last = 784 * 1024, 1024 * 1024, 1024 * 10
    assert len(step.named("stablehlo.dot_general")) == 8
    assert step.dot_flops() == 2 * 128 * (2 * first + 3 * second + 3 * last)


def test_shapes(mlp: Any) -> None:
    params, images, labels = mlp.make_args(batch=32, hidden=256)
    assert [layer["weight"].shape for layer in params] == [(784, 256), (256, 256), (256, 10)]
    assert (images.shape, labels.shape) == ((32, 784), (32,))
    after, loss = jax.eval_shape(mlp.train_step, params, images, labels)
    assert [layer["bias"].shape for layer in after] == [(256,), (256,), (10,)]
    assert loss.shape == ()


def test_main_prints_a_falling_loss(mlp: Any, capsys: pytest.CaptureFixture[str]) -> None:
    mlp.main()
    losses = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines()]
    assert losses[0] == pytest.approx(np.log(10), rel=0.1)
    assert losses == sorted(losses, reverse=True)
