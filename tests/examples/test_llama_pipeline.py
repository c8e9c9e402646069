"""The pipelined Llama step: the same numbers as without stages, and its shape."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

EXAMPLES = Path(__file__).parents[2] / "examples"

COMPARE = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding
import llama

names = ("data", "fsdp", "tensor", "pipeline")
axes = json.loads(sys.argv[1])
tiny = dict(seq=16, layers=4, d_model=128, vocab=96, batch=8, dtype="f32", scan=True)
state, batch = llama.make_args(**tiny, **axes)
mesh = Mesh(np.array(jax.devices()).reshape([axes.get(name, 1) for name in names]), names)
values = llama.init(state), llama.random_batch(batch, 96)
put = lambda leaf, like: jax.device_put(leaf, NamedSharding(mesh, like.sharding.spec))
piped = jax.tree.map(put, values, (state, batch))
plain = llama.init(llama.make_args(**tiny)[0]), jax.tree.map(lambda x: x.reshape(8, -1), values[1])
found, expected = llama.train_step(*piped), llama.train_step(*plain)
close = lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=5e-4, atol=2e-6)
jax.tree.map(close, found, expected)
grads = lambda step: jax.tree.map(np.asarray, step[0]["adam"]["mu"])
relative = lambda a, b: float(np.abs(a - b).max() / np.abs(b).max())
print(json.dumps(jax.tree.leaves(jax.tree.map(relative, grads(found), grads(expected)))))
"""


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"pipeline": 4}, {"pipeline": 2, "data": 2}, {"pipeline": 2, "tensor": 2}])
def test_a_pipelined_step_equals_the_plain_one(axes: dict[str, int]) -> None:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    made = subprocess.run(
        [sys.executable, "-c", COMPARE, json.dumps(axes)],
        cwd=EXAMPLES,
        env={**os.environ, **flags, "PYTHONPATH": str(EXAMPLES)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    errors = json.loads(made.stdout)
    assert len(errors) == 12
    assert max(errors) < 1e-4


def test_micro_batches_and_short_names(llama: Any) -> None:
    state, batch = llama.make_args(layers=8, d_model=512, seq=64, dp=2, tp=2, pp=4)
    long = llama.make_args(layers=8, d_model=512, seq=64, data=2, tensor=2, pipeline=4)
    assert jax.tree.leaves((state, batch)) == jax.tree.leaves(long)
    assert batch["inputs"].shape == (8, 2, 64)
    assert batch["inputs"].sharding.spec == P("pipeline", ("data", "fsdp"))
    _, batch = llama.make_args(layers=8, d_model=512, seq=64, pp=4, microbatches=4, batch=12)
    assert batch["inputs"].shape == (4, 3, 64)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"microbatches": 4}, "4 micro-batches need a pipeline"),
        ({"pp": 4, "microbatches": 6}, "4 stages must divide 6 micro-batches"),
        ({"pp": 4, "batch": 12}, "4 stages must divide 8 micro-batches, and these 12 sequences"),
        ({"tp": 3}, r"does not divide shape \(512, 8, 128\) split over \('fsdp', 'tensor'\): 8 by 3"),
    ],
)
def test_what_does_not_divide(llama: Any, wrong: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        llama.make_args(layers=8, d_model=512, vocab=1536, **wrong)


def test_stages_hand_on_what_they_made(llama: Any, lower: Any) -> None:
    args = llama.make_args(layers=8, d_model=512, seq=64, vocab=512, pp=4, dp=2)
    lowered = lower(llama.train_step, args)
    pairs = [str(op.attributes["source_target_pairs"]) for op in lowered.named("stablehlo.collective_permute")]
    assert len(pairs) == 2
    assert all("tensor<6x2xi64>" in text for text in pairs)
    after, _ = jax.eval_shape(llama.train_step, *args)
    assert jax.tree.map(lambda leaf: leaf.shape, after) == jax.tree.map(lambda leaf: leaf.shape, args[0])
