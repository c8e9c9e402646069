"""`@workload` and `region` are inert unless something asks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import stablecast
from stablecast.frontends.annotations import annotation_of, recording

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def step(x: Any) -> Any:
    return jnp.tanh(x) * 2


def test_the_marked_function_is_the_function() -> None:
    marked = stablecast.workload(args=(X,))(step)
    assert marked is step
    jitted = jax.jit(lambda x: x + 1)
    assert stablecast.workload(jitted) is jitted
    annotation = annotation_of(marked)
    assert annotation is not None
    assert annotation.args == (X,)


def test_outputs_are_bit_equal_and_the_program_is_the_same() -> None:
    plain = jax.jit(lambda x: jnp.tanh(x) * 2)

    @stablecast.workload(args=(X,))
    @jax.jit
    def marked(x: Any) -> Any:
        with stablecast.region("body"):
            return jnp.tanh(x) * 2

    assert np.array_equal(np.asarray(plain(X)), np.asarray(marked(X)))
    texts = [fn.lower(X).as_text().replace("jit_marked", "jit__lambda") for fn in (plain, marked)]
    assert texts[0] == texts[1]


def test_the_annotation_is_found_under_jit() -> None:
    @jax.jit
    @stablecast.workload(args=(X,), static="flag")
    def inner(x: Any, flag: bool = False) -> Any:
        return x

    annotation = annotation_of(inner)
    assert annotation is not None
    assert annotation.static == ("flag",)
    assert annotation_of(lambda x: x) is None


def test_a_region_reaches_the_scope() -> None:
    def named(x: Any) -> Any:
        with stablecast.region("attention"):
            return x @ x.T

    text = jax.jit(named).lower(X).as_text(debug_info=True)
    assert "attention/dot_general" in text


def test_a_recorder_sees_the_first_call_only() -> None:
    seen: list[tuple[Any, ...]] = []
    with recording(
        lambda function, annotation, args, kwargs: seen.append((function.__name__, len(args), dict(kwargs)))
    ):

        @stablecast.workload
        @jax.jit
        def recorded(x: Any, scale: float = 1.0) -> Any:
            return x * scale

        assert np.array_equal(np.asarray(recorded(X, scale=2.0)), X * 2)
        recorded(X)
        assert recorded.lower(X).as_text().startswith("module @jit_recorded")
    assert seen == [("recorded", 1, {"scale": 2.0})]
