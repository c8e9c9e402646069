"""Open dimensions are refused by name, or bound."""

import jax
import jax.numpy as jnp
import pytest
from jax import export

from stablecast.ir.accounting import account
from stablecast.ir.errors import InputError
from stablecast.ir.reader import bind_dimensions, dynamic_dimensions, read

F32 = jnp.float32


@pytest.fixture(scope="module")
def exported():
    """(batch, time, 16) @ (16, 16), reshaped, as jax.export writes it."""
    batch, time = export.symbolic_shape("batch, time")
    function = jax.jit(lambda x, w: (x @ w).reshape(-1))
    args = (jax.ShapeDtypeStruct((batch, time, 16), F32), jax.ShapeDtypeStruct((16, 16), F32))
    return export.export(function)(*args).mlir_module_serialized


def test_names_come_from_the_export(exported):
    found = dynamic_dimensions(read(exported))
    assert [(item.name, item.argument, item.axis) for item in found] == [("batch", 0, 0), ("time", 0, 1)]


def test_open_dimensions_are_refused_by_name(exported):
    with pytest.raises(InputError, match="'batch', 'time' open; bind it, as in --dim batch=16"):
        account(read(exported))


def test_bound_dimensions(exported):
    bound = read(bind_dimensions(exported, {"batch": 4, "time": 3}))
    assert account(bound).work.matmul_flops == 2 * 4 * 3 * 16 * 16
    assert not dynamic_dimensions(bound)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batch": 4}, "dimension 'time' open"),
        ({"batch": 4, "tim": 3}, "no dynamic dimension 'tim'; did you mean time"),
    ],
)
def test_wrong_names(exported, sizes, message):
    with pytest.raises(InputError, match=message):
        bind_dimensions(exported, sizes, "model")


TEXT = b"""func.func @main(%a: tensor<?x4xf32>, %b: tensor<?x4xf32>) -> tensor<?x4xf32> {
  %0 = stablehlo.add %a, %b : tensor<?x4xf32>
  return %0 : tensor<?x4xf32> }"""


def test_programs_without_names_call_them_by_argument():
    assert [item.name for item in dynamic_dimensions(read(TEXT))] == ["arg0[0]", "arg1[0]"]
    assert account(read(bind_dimensions(TEXT, {"arg0[0]": 3, "arg1[0]": 3}))).work.vector_flops == 12


def test_sizes_that_do_not_fit():
    with pytest.raises(InputError, match=r"does not take these sizes: .*same shape"):
        bind_dimensions(TEXT, {"arg0[0]": 3, "arg1[0]": 4})


def test_static_programs():
    text = b"func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> { return %a : tensor<4xf32> }"
    assert bind_dimensions(text, {}) is text
    with pytest.raises(InputError, match="all its shapes are fixed"):
        bind_dimensions(text, {"batch": 4})
