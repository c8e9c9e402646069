"""Accounting a step of 67,000 ops takes well under two seconds."""

import time

from stablecast.ir.accounting import account
from stablecast.ir.reader import read

LAYERS = 96
BLOCK = """%a{i} = stablehlo.dot_general %x{p}, %w, contracting_dims = [1] x [0] : (M, M) -> M
%b{i} = stablehlo.add %a{i}, %x{p} : M
%c{i} = stablehlo.tanh %b{i} : M
%d{i} = stablehlo.multiply %c{i}, %b{i} : M
%e{i} = stablehlo.transpose %d{i}, dims = [1, 0] : (M) -> M
%f{i} = stablehlo.dynamic_slice %e{i}, %z, %z, sizes = [1, 64] : (M, tensor<i32>, tensor<i32>) -> tensor<1x64xf32>
%x{i} = stablehlo.dynamic_update_slice %e{i}, %f{i}, %z, %z : (M, tensor<1x64xf32>, tensor<i32>, tensor<i32>) -> M"""


def test_67_000_ops():
    blocks = LAYERS * 100
    body = "\n".join(BLOCK.format(i=i, p=i - 1) for i in range(1, blocks + 1))
    text = f"""func.func @main(%x0: M, %w: M) -> M {{
      %z = stablehlo.constant dense<0> : tensor<i32>
      {body}
      return %x{blocks} : M }}"""
    program = read(text.replace("M", "tensor<64x64xf32>").replace("tensor<64x64xf32>ain", "Main").encode())
    assert program.num_ops == 7 * blocks + 1 == 67_201
    start = time.perf_counter()
    work = account(program).work
    took = time.perf_counter() - start
    assert work.matmul_flops == blocks * 2 * 64**3
    assert work.bytes_written == blocks * (5 * 64 * 64 * 4 + 256 + 256)
    assert took < 2
