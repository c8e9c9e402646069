"""Lowered programs on disk: equal to fresh ones, found by content, made again where damaged."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from stablecast.ir.attributes import Shift
from stablecast.ir.device_program import P2P, Branch, Collective, DeviceProgram, Loop
from stablecast.ir.groups import from_lists, over_axes
from stablecast.ir.program_json import device_program_of_json, device_program_to_json
from stablecast.lowering import program_cache

Lower = Callable[..., DeviceProgram]
X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
N = jax.ShapeDtypeStruct((), jnp.int32)


@pytest.fixture
def program(lowered: Lower) -> DeviceProgram:
    def step(x: Any, n: Any) -> Any:
        y = lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x, None, length=3)[0]
        y = lax.fori_loop(0, n, lambda i, c: c + 1, y)
        return lax.cond(n > 3, lambda a: a @ a, lambda a: a, y)

    made = lowered(step, X, N)
    mesh = over_axes("mesh", [("data", 4), ("model", 2)], ["data"])
    extra = (
        Collective("all_reduce", mesh, 8, 8, "add", "f32", 1, scope="s", deps=(0,)),
        Collective("collective_permute", from_lists([[0, 3], [1, 2]]), 8, 8, shift=Shift("data", -1, True)),
        P2P("send", "pipe", 1, 7, 64, deps=(0,)),
    )
    return replace(made, body=(*made.body, *extra))


def test_a_program_comes_back_as_it_was(program: DeviceProgram) -> None:
    assert any(isinstance(node, Loop) for node in program.body)
    assert any(isinstance(node, Branch) for node in program.body)
    back = device_program_of_json(device_program_to_json(program))
    assert back.body == program.body
    assert back.table.rows == program.table.rows
    assert back.table.count.tolist() == program.table.count.tolist()
    assert back.work == program.work
    assert replace(back, table=program.table) == program


def test_found_by_content_and_made_again_where_damaged(
    program: DeviceProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STABLECAST_CACHE", str(tmp_path))
    made: list[int] = []

    def make() -> DeviceProgram:
        made.append(1)
        return program

    key = program_cache.key_of(b"module", "cuda")
    assert program_cache.cached(key, make) is program
    assert program_cache.cached(key, make).body == program.body
    assert len(made) == 1
    (entry,) = tmp_path.iterdir()
    for damage in (b"", b"nonsense", entry.read_bytes()[:-20]):
        entry.write_bytes(damage)
        assert program_cache.cached(key, make) is program
    assert len(made) == 4
    keys = {program_cache.key_of(data, choice) for data in (b"a", b"b") for choice in ("cuda", "tpu")}
    assert len(keys) == 4


def test_a_folder_that_cannot_be_written_is_no_error(program: DeviceProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STABLECAST_CACHE", "/proc/nowhere")
    assert program_cache.cached("key", lambda: program) is program
