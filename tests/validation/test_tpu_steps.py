"""How the TPU suite takes layouts, and sequences that devices share."""

import pytest

from stablecast.backends.catalogue import Catalogue
from stablecast.backends.kernel_specs import attention, matmul
from stablecast.ir.device_program import DeviceProgram, Kernel
from stablecast.ir.kernels import KernelTable
from stablecast.ir.work import SymbolicWork
from stablecast.validation.suites.tpu_steps import Model, balanced, layouts

TPU = Catalogue().device("tpu-v5p")


def test_devices_that_share_a_sequence_see_half_of_its_keys_on_average() -> None:
    part, alone, product = (
        attention(TPU, "bf16", 3, 8, 64, 512, 128, hkv=2, causal=1),
        attention(TPU, "bf16", 3, 8, 512, 512, 128, hkv=2, causal=1),
        matmul(TPU, "bf16", 512, 512, 128, 8),
    )
    program = DeviceProgram(
        "test", (Kernel(0), Kernel(1), Kernel(2)), KernelTable.of([part, alone, product]), SymbolicWork()
    )
    shared, *rest = balanced(program, 512).table.rows
    assert rest == [alone, product]
    # 64 queries and 288 keys: the first sees 225, the last all, 256.5 on average
    assert (shared.causal, shared.skv, shared.matmul_flops) == (1, 288, part.matmul_flops * 288 / 512)
    assert shared.matmul_flops - shared.padded_flops == pytest.approx(part.matmul_flops * 256.5 / 512)
    assert (shared.bytes_read, shared.bytes_written) == (part.bytes_read, part.bytes_written)


def test_layouts_of_a_dense_model() -> None:
    """All devices, or several to a sequence; never more than the width or the batch can be split over."""
    dense = Model("", "", 8192, ("context",))
    assert layouts(dense, 128, 256) == [{"fsdp": fsdp, "context": 128 // fsdp} for fsdp in (8, 16, 32, 64, 128)]
    assert layouts(dense, 512, 64) == [{"fsdp": 32, "context": 16}, {"fsdp": 64, "context": 8}]
    assert layouts(dense, 512, 60) == []
    assert layouts(Model("", "", 1536), 128, 256) == [{"fsdp": 128}]


@pytest.mark.parametrize(("width", "outer"), [(2880, 2), (7168, 1)])
def test_layouts_of_experts(width: int, outer: int) -> None:
    """2,880 is 64 x 45: 64 devices split the width, two the other side."""
    found = layouts(Model("", "", width, ("outer", "expert")), 128, 256)
    wide = 128 // outer
    assert found == [{"fsdp": wide // expert, "expert": expert, "outer": outer} for expert in (32, 16, 8, 4, 2, 1)]
    assert layouts(Model("", "", width, ("outer", "expert")), 128, 100) == []
