"""Arguments as the command line spells them."""

from typing import Any

import jax.numpy as jnp
import pytest

from stablecast.frontends.arguments import ArraySpec, call_factory, numpy_name, parse_array, parse_arrays, parse_value
from stablecast.ir.dtypes import DTYPES
from stablecast.ir.errors import InputError


def test_arrays() -> None:
    assert parse_array("i32[8,4096]") == ArraySpec((8, 4096), "int32")
    assert parse_array("bf16[ 2, 3 ]") == ArraySpec((2, 3), "bfloat16")
    assert parse_array("f32[]") == ArraySpec((), "float32")
    assert parse_array("pred[4]") == ArraySpec((4,), "bool")


@pytest.mark.parametrize("name", [n for n in DTYPES if n not in ("token", "index", "tf32") and not n.startswith("f6")])
def test_every_element_type_has_a_name_that_jax_knows(name: str) -> None:
    kind = jnp.dtype(numpy_name(DTYPES[name]))
    assert kind.itemsize == max(1, DTYPES[name].bits // 8)


def test_paths_build_pytrees() -> None:
    tree = parse_arrays(
        ["x=f32[2]", "batch.tokens=i32[8]", "batch['seg ids']=i32[8]", "p.layers[0].w=f32[1]", "p.layers[1].w=f32[2]"]
    )
    assert tree["x"] == ArraySpec((2,), "float32")
    assert tree["batch"] == {"tokens": ArraySpec((8,), "int32"), "seg ids": ArraySpec((8,), "int32")}
    assert [layer["w"].shape for layer in tree["p"]["layers"]] == [(1,), (2,)]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["tokens"], "is not name=value"),
        (["tokens=8"], "'8' is not an array"),
        (["tokens=f32[a]"], "is not an array"),
        (["tokens=zz[3]"], "unknown element type 'zz'"),
        (["[0]=f32[3]"], "does not start with a parameter's name"),
        (["a..b=f32[3]"], "is not understood at"),
        (["a=f32[3]", "a.b=f32[3]"], "contradicts another"),
        (["a.b=f32[3]", "a.b.c=f32[3]"], "contradicts another"),
        (["a[0]=f32[3]", "a[2]=f32[3]"], "have gaps"),
    ],
)
def test_what_is_no_array_is_one_line(texts: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_arrays(texts)


def test_settings_are_literals_or_text() -> None:
    assert [parse_value(text) for text in ("32", "0.5", "True", "100m", "(1, 2)", "None")] == [
        32,
        0.5,
        True,
        "100m",
        (1, 2),
        None,
    ]


def test_factories_are_told_what_they_know_only() -> None:
    def factory(layers: int = 2) -> Any:
        return layers

    assert call_factory(factory, {"layers": 5}, "make_args") == 5
    with pytest.raises(InputError, match="make_args has no parameter 'layer' to --set; did you mean layers"):
        call_factory(factory, {"layer": 5}, "make_args")
