"""What PyTorch's allocator reserves, in predictions: beside the peak, with what it costs where memory is short."""

import json
from dataclasses import replace

import pytest

from stablecast.backends.catalogue import Catalogue
from stablecast.backends.predictor import ProgramRole, Settings, predict_device_program, predict_roles
from stablecast.backends.registry import Choice
from stablecast.ir.allocations import Allocations
from stablecast.ir.device_program import Buffers, DeviceProgram
from stablecast.ir.reader import read
from stablecast.lowering.device import lower
from stablecast.lowering.passes.body import with_body
from stablecast.lowering.target import Target

GIB = 1 << 30
TEXT = b"""module { func.func @main(%a: tensor<64xf32>) -> tensor<64xf32> {
 %0 = stablehlo.tanh %a : tensor<64xf32> %1 = stablehlo.tanh %0 : tensor<64xf32> return %1 : tensor<64xf32> } }"""


def program(*sizes: int, threads: int = 0) -> DeviceProgram:
    """One buffer after another, each on a stream of its own, so that none serves the next."""
    count = len(sizes)
    order = tuple(one for number in range(count) for one in (number, ~number))
    asked = Allocations(sizes, tuple(range(count)), tuple(range(1, count + 1)), order, threads=threads)
    return replace(lower(read(TEXT), Target()), allocations=asked, buffers=Buffers(temp_bytes=max(sizes)))


def test_reserved_stands_beside_the_peak() -> None:
    system = Catalogue().resolve("h100-sxm")
    made = predict_device_program(program(20 * GIB, 30 * GIB, threads=2), system, Settings(Choice(), {}), "two")
    assert made.peak_memory_bytes == 30 * GIB
    assert made.reserved_memory_bytes == 50 * GIB + (64 << 20)  # with cuBLAS's workspaces on a Hopper
    assert json.loads(made.to_json())["reserved_memory_bytes"] == made.reserved_memory_bytes
    assert "memory peak 32.2 GB (53.8 GB reserved) of 84.9 GB: fits" in repr(made)
    assert made.memory_retries == 0
    plain = predict_device_program(lower(read(TEXT), Target()), system, Settings(Choice(), {}), "one")
    assert plain.reserved_memory_bytes is None
    assert "reserved" not in repr(plain)


def test_expandable_segments_take_pages() -> None:
    system = Catalogue().resolve("h100-sxm")
    held = program(30 << 20)
    classic, pages = (
        predict_device_program(held, system, Settings(Choice(), {}, expandable=way), "one") for way in (False, True)
    )
    assert (classic.reserved_memory_bytes, pages.reserved_memory_bytes) == (30 << 20, 40 << 20)


def test_giving_back_is_said_and_so_is_where_it_does_not_help() -> None:
    system = Catalogue().resolve("h100-sxm")
    tight = predict_device_program(program(50 * GIB, 40 * GIB), system, Settings(Choice(), {}), "tight")
    assert (tight.reserved_memory_bytes, tight.memory_retries) == (50 * GIB, 2)
    assert any("runs out of memory 2 time(s) a step" in text for text in tight.assumptions)
    held = Allocations((40 * GIB, 50 * GIB), (0, 1), (1, 2), (0, ~0, 1, ~1), held=(35 * GIB,))
    short = replace(program(1), allocations=held, buffers=Buffers(temp_bytes=75 * GIB))
    made = predict_device_program(short, system, Settings(Choice(), {}), "short")
    assert made.reserved_memory_bytes == 85 * GIB
    assert any("out of memory on h100-sxm" in text for text in made.assumptions)


def test_the_role_that_takes_most_counts() -> None:
    system = Catalogue().resolve("h100-sxm:2")
    roles = [ProgramRole(f"rank {n}", replace(program(n * GIB), num_devices=2), {}, 1.0, (n - 1,)) for n in (1, 2)]
    assert predict_roles(roles, system, Settings(Choice(), {}), "two").reserved_memory_bytes == 2 * GIB


@pytest.mark.parametrize("change", [True, False])
def test_a_pass_that_changes_lifetimes_leaves_no_stale_answer(change: bool) -> None:
    held = program(GIB)
    nodes = tuple(replace(node, held_bytes=node.held_bytes + change) for node in held.body)
    assert (with_body(held, nodes).allocations is None) == change
