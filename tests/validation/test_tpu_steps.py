"""TPU rows: scores stay on chip, everything else stays as it was."""

from dataclasses import replace

from stablecast.backends.catalogue import Catalogue
from stablecast.backends.kernel_specs import elementwise, matmul, softmax
from stablecast.ir.device_program import DeviceProgram, Kernel
from stablecast.ir.kernels import KernelTable
from stablecast.ir.work import SymbolicWork
from stablecast.validation.suites.tpu_steps import scores_on_chip

TPU = Catalogue().device("tpu-v5p")
HEADS, SEQ, SIZE = 8, 512, 128


def test_scores_stay_on_chip() -> None:
    rows = (
        replace(matmul(TPU, "bf16", SEQ, SEQ, SIZE, HEADS), vector_flops=1e9),
        matmul(TPU, "bf16", SEQ, SIZE, SEQ, HEADS),
        softmax(TPU, "bf16", HEADS * SEQ, SEQ),
        matmul(TPU, "bf16", 4096, 4096, 4096),
        elementwise(TPU, "bf16", SEQ, 1024),
    )
    program = DeviceProgram("test", tuple(map(Kernel, range(5))), KernelTable.of(rows), SymbolicWork())
    scores, mixed, weights, product, other = scores_on_chip(program, HEADS, SEQ).table.rows
    assert (scores.n, mixed.k) == (SEQ // 2, SEQ // 2)
    assert scores.matmul_flops == rows[0].matmul_flops / 2
    assert scores.bytes_read == scores.bytes_written == weights.bytes_read == weights.bytes_written == 0
    assert scores.vector_flops == weights.transcendentals == 0
    assert (product, other) == rows[3:]
