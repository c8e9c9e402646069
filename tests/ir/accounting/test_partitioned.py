"""A global program counts all devices together, manual regions included."""

import jax
import jax.numpy as jnp
from jax import lax, shard_map
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from stablecast.ir.accounting import account

MESH = AbstractMesh((4, 2), ("x", "y"))


def array(*spec):
    return jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(MESH, P(*spec)))


def test_manual_computation_counts_once_for_each_device(lower):
    def run(a, b):
        return shard_map(
            lambda a, b: lax.psum(a @ b, "y"), mesh=MESH, in_specs=(P("x", "y"), P("y")), out_specs=P("x")
        )(a, b)

    found = account(lower(run, array("x", "y"), array("y"), platform="cuda"))
    assert found.work.matmul_flops == 2 * 64**3
    reduced = 8 * 16 * 64 * 4
    assert found.work.bytes_written == 2 * reduced
    assert "all 8 devices together" in found.notes[0]


def test_constraints_are_annotations(lower):
    def run(a, b):
        return lax.with_sharding_constraint(a @ b, NamedSharding(MESH, P("x", "y")))

    found = account(lower(run, array("x"), array(None, "y"), platform="cuda"))
    assert found.work.matmul_flops == 2 * 64**3
    assert found.work.nbytes == 3 * 64 * 64 * 4
