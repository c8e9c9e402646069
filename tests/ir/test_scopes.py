"""Name stacks as people read them."""

import pytest

from stablecast.ir.reader.locations import join_scopes
from stablecast.ir.scopes import family, generalised, parse_scope


@pytest.mark.parametrize(
    ("stack", "label"),
    [
        ("jit(step)/jvp(layer0)/attn/dot_general", "layer0/attn"),
        ("jit(step)/transpose(jvp(layer0))/mlp/dot_general", "layer0/mlp (backward)"),
        (
            "jit(f)/transpose(jvp(layer0))/jvp(layer0)/checkpoint/rematted_computation/attention/bthk,bshk->bhts/dot_general",
            "layer0/attention (recomputed)",
        ),
        ("jit(step)/jvp()/while/body/closed_call/attn/dot_general", "attn"),
        ("jit(step)/optimizer/mul", "optimizer"),
        ("jit(step)/mul", "mul"),
        ("", ""),
    ],
)
def test_transformations_are_unwrapped(stack: str, label: str) -> None:
    assert parse_scope(stack).label == label


def test_layers_get_one_family() -> None:
    assert (
        family("layer12/attention (backward)") == family("layer3/attention (backward)") == "layer*/attention (backward)"
    )
    assert family("h2/mlp1") == "h*/mlp*"
    assert generalised(["layer0/mlp", "layer1/mlp"]) == "layer*/mlp"
    assert generalised(["layer0/mlp"]) == "layer0/mlp"


def test_scopes_join_over_calls() -> None:
    assert join_scopes("jit(f)/loop", "dot") == "jit(f)/loop/dot"
    assert join_scopes("jit(f)/loop", "jit(f)/loop/dot") == "jit(f)/loop/dot"
    assert join_scopes("", "dot") == "dot"
    assert join_scopes("jit(f)", "") == "jit(f)"
