"""cuDNN's attention calls are priced as attention of the sizes in their configuration."""

from __future__ import annotations

import pytest

from stablecast.ir.reader import read
from stablecast.lowering.device import lower
from stablecast.lowering.target import Target

CALL = """HloModule jit_step, is_scheduled=true

ENTRY %main (q: bf16[2,512,8,64]) -> bf16[2,512,8,64] {{
  %q = bf16[2,512,8,64]{{3,2,1,0}} parameter(0)
  %k = bf16[2,1024,2,64]{{3,2,1,0}} parameter(1)
  %v = bf16[2,1024,2,64]{{3,2,1,0}} parameter(2)
  %call = (bf16[2,512,8,64]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%q, %k, %v), custom_call_target="{target}", backend_config={{"cudnn_fmha_backend_config":{{"fmha_scale":0.125,"intermediate_tensor_shape":{{"element_type":"BF16","dimensions":[{scores}]}},"mask_type":"{mask}"}}}}
  ROOT %out = bf16[2,512,8,64]{{3,2,1,0}} get-tuple-element(%call), index=0
}}
"""
SCORES = '"2","8","512","1024"'


@pytest.mark.parametrize(
    ("target", "direction", "products"), [("__cudnn$fmhaSoftmax", "fwd", 2), ("__cudnn$fmhaSoftmaxBackward", "bwd", 5)]
)
def test_sizes_follow_from_the_configuration(target: str, direction: str, products: int) -> None:
    text = CALL.format(target=target, scores=SCORES, mask="CAUSAL")
    (row,) = lower(read(text.encode()), Target()).table.rows
    assert (row.klass, row.math, row.direction, row.causal) == ("attention", "bf16", direction, 1)
    assert (row.batch, row.hq, row.hkv, row.sq, row.skv, row.d) == (2, 8, 2, 512, 1024, 64)
    assert row.matmul_flops == products * 2 * 2 * 8 * 512 * 1024 * 64


def test_without_the_shape_of_the_scores_it_is_unmodelled() -> None:
    text = CALL.format(target="__cudnn$fmhaSoftmax", scores="", mask="NO_MASK")
    program = lower(read(text.encode()), Target())
    assert [entry.op for entry in program.unmodelled] == ["stablehlo.custom_call @__cudnn$fmhaSoftmax"]
