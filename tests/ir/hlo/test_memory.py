"""XLA's buffer assignment beside a dump."""

import pytest

from stablecast.ir.device_program import Buffers
from stablecast.ir.hlo.memory import read_assignment
from stablecast.ir.reader import read
from stablecast.lowering.device import lower
from stablecast.lowering.target import Target

TEXT = """BufferAssignment:
allocation 0: size 400, parameter 0, shape |f32[100]| at ShapeIndex {}, maybe-live-out:
 value: <2 a @0> (size=400,offset=0): f32[100]{0}
allocation 1: size 80, parameter 1, shape |f32[20]| at ShapeIndex {}:
 value: <3 b @0> (size=80,offset=0): f32[20]{0}
allocation 2: size 40, maybe-live-out:
allocation 3: size 4, thread-local:
allocation 4: size 8, constant:
allocation 5: size 1000, preallocated-temp:
 value: <9 fusion @0> (size=1000,offset=0): f32[250]{0}
"""


def test_memory_by_kind() -> None:
    assert read_assignment(TEXT) == Buffers(argument_bytes=480, output_bytes=440, alias_bytes=400, temp_bytes=1000)
    assert read_assignment("") is None


@pytest.mark.parametrize(("shape", "peak"), [("f32[1024]", 4096), ("f32[1,1024]", 4096), ("f32[32,32]", 8192)])
def test_an_elementwise_kernel_takes_over_a_buffer_of_its_own_shape_only(shape: str, peak: int) -> None:
    text = f"""HloModule jit_step, is_scheduled=true

%fused (p: f32[1024]) -> {shape} {{
  %p = f32[1024]{{0}} parameter(0)
  %seen = {shape} bitcast(%p)
  ROOT %n = {shape} cosine(%seen)
}}

ENTRY %main (x: f32[1024]) -> f32[] {{
  %x = f32[1024]{{0}} parameter(0)
  %a = f32[1024]{{0}} sine(%x)
  %b = {shape} fusion(%a), kind=kLoop, calls=%fused
  ROOT %c = {shape} negate(%b)
}}
"""
    buffers = lower(read(text.encode()), Target()).buffers
    assert buffers is not None
    assert buffers.temp_bytes == peak
