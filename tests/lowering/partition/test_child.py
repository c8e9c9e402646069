"""The child process: deaths, timeouts and refusals are one line each."""

import subprocess
import sys
import tempfile

import pytest

from stablecast.ir.errors import InputError, ToolError
from stablecast.lowering.partition import partition
from stablecast.lowering.partition.shardy import Worker, run_shardy

MODULE = b"""module @jit_f attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["x"=4]>
  func.func public @main(%arg0: tensor<ROWSx8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>} loc("params['w']"))
      -> tensor<ROWSx8xf32> {
    %0 = stablehlo.add %arg0, %arg0 : tensor<ROWSx8xf32>
    return %0 : tensor<ROWSx8xf32>
  }
}"""
EVEN, UNEVEN = MODULE.replace(b"ROWS", b"8"), MODULE.replace(b"ROWS", b"6")


def _worker(code: str) -> Worker:
    errors = tempfile.TemporaryFile()  # noqa: SIM115
    command = [sys.executable, "-c", code]
    return Worker(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors), errors)


CUSTOM = EVEN.replace(
    b"stablehlo.add %arg0, %arg0 : tensor<8x8xf32>",
    b"stablehlo.custom_call @mine(%arg0) : (tensor<8x8xf32>) -> tensor<8x8xf32>",
)

ABORT = "import os, sys; sys.stdin.buffer.read(); print('F0000 check.cc:7] Check failed: a == b', file=sys.stderr); "
ABORT += "sys.stderr.flush(); os.abort()"


def test_abort_is_one_line() -> None:
    with pytest.raises(ToolError) as caught:
        run_shardy(EVEN, "step", route="direct", worker=_worker(ABORT))
    message = str(caught.value)
    assert "partitioning step failed: killed by signal 6" in message
    assert "Check failed: a == b" in message
    assert "\n" not in message


def test_abort_of_the_import_takes_the_direct_route() -> None:
    done = run_shardy(EVEN, "step", worker=_worker(ABORT))
    assert done.header["route"] == "direct"
    assert "aborted" in done.header["notes"][0]


def test_timeout() -> None:
    with pytest.raises(ToolError, match=r"partitioning step took longer than 0\.3 s"):
        run_shardy(EVEN, "step", timeout_s=0.3, worker=_worker("import time; time.sleep(60)"))


def test_garbage_names_the_source() -> None:
    with pytest.raises(InputError, match=r"^notes\.mlir is not a StableHLO module: line 1"):
        partition(b"garbage", "notes.mlir")


def test_uneven_argument_is_refused_by_name() -> None:
    with pytest.raises(InputError) as caught:
        partition(UNEVEN, "step")
    assert str(caught.value).startswith(
        "argument 'params['w']' is split over 'x', so the global size of its dimension 0 should be divisible by 4, "
        "but it is 6 (full shape (6, 8))"
    )


def test_text_is_partitioned() -> None:
    program = partition(EVEN, "step")
    assert str(program.main.arguments[0].type) == "f32[2,8]"
    assert program.num_devices == 4
    assert not program.stage.is_global


def test_custom_call_without_a_rule_gathers_its_operands() -> None:
    program = partition(CUSTOM, "step")
    gather, call = program.main.body.ops
    assert (gather.name, str(gather.result_type)) == ("stablehlo.all_gather", "f32[8,8]")
    assert call.operand_types == gather.result_types
    assert any("custom call without a sharding rule" in note for note in program.notes)
