"""How the TPU suite takes attention and layouts."""

from dataclasses import replace

from stablecast.backends.catalogue import Catalogue
from stablecast.backends.kernel_specs import elementwise, matmul
from stablecast.ir.device_program import DeviceProgram, Kernel
from stablecast.ir.kernels import KernelClass, KernelRow, KernelTable
from stablecast.ir.work import SymbolicWork
from stablecast.validation.suites.tpu_steps import layout, masked_on_chip

TPU = Catalogue().device("tpu-v5p")
HEADS, GROUPS, SEQ, SIZE = 8, 2, 512, 128


def attention(queries: int, direction: str = "fwd") -> KernelRow:
    return KernelRow(
        klass=KernelClass.ATTENTION,
        batch=3,
        hq=HEADS,
        hkv=GROUPS,
        sq=queries,
        skv=SEQ,
        d=SIZE,
        direction=direction,
        matmul_flops=8e9,
        vector_flops=4e6,
        bytes_read=1e9,
    )


def seen(*rows: KernelRow) -> tuple[KernelRow, ...]:
    program = DeviceProgram("test", tuple(map(Kernel, range(len(rows)))), KernelTable.of(rows), SymbolicWork())
    return masked_on_chip(program, SEQ).table.rows


def test_attention_reads_its_heads_and_masks_cost_nothing() -> None:
    mask = elementwise(TPU, "bf16", 3 * SEQ, SEQ)
    product, other = matmul(TPU, "bf16", SEQ, SEQ, SIZE, HEADS), elementwise(TPU, "bf16", SEQ, 100)
    forward, backward, made, *rest = seen(attention(SEQ), attention(SEQ, "bwd"), mask, product, other)
    one = 3 * SEQ * SIZE * 2
    assert (forward.causal, forward.bytes_read, forward.bytes_written) == (1, one * (HEADS + 2 * GROUPS), one * HEADS)
    assert backward.bytes_read == one * (3 * HEADS + 2 * GROUPS)
    assert backward.bytes_written == one * (HEADS + 2 * GROUPS)
    assert (made.bytes_read, made.bytes_written, made.vector_flops) == (0, 0, 0)
    assert rest == [product, other]


def test_devices_that_share_a_sequence_see_half_of_its_keys() -> None:
    part, window = seen(attention(SEQ // 8), replace(attention(64), skv=128))
    assert (part.causal, part.skv, part.matmul_flops, part.vector_flops) == (0, SEQ // 2, 4e9, 2e6)
    assert part.bytes_read == 3 * SIZE * 2 * (HEADS * SEQ // 8 + 2 * GROUPS * SEQ)
    assert window == replace(attention(64), skv=128)


def test_layouts() -> None:
    assert layout("llama_tpu.py", 128, 256) == {"fsdp": 128}
    assert layout("llama_tpu.py", 512, 64) == {"fsdp": 64, "context": 8}
    assert layout("llama_tpu.py", 512, 60) == {}
    assert layout("moe_tpu.py", 256, 2048) == {"fsdp": 64, "outer": 4}
    assert layout("moe_tpu.py", 96, 192) == {}
