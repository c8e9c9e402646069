"""Modules that a compiler has fused already are taken as they are."""

from stablecast.ir.reader import read
from stablecast.lowering.device import Target, lower

TEXT = b"""module { func.func @main(%a: tensor<1024xf32>, %b: tensor<1024xf32>) -> tensor<1024xf32> {
 %0 = "mhlo.fusion"(%a, %b) ({
  ^bb0(%x: tensor<1024xf32>, %y: tensor<1024xf32>):
   %1 = func.call @fused_0(%x, %y) : (tensor<1024xf32>, tensor<1024xf32>) -> tensor<1024xf32>
   mhlo.return %1 : tensor<1024xf32> }) {fusion_kind = #mhlo<fusion_kind kLoop>}
   : (tensor<1024xf32>, tensor<1024xf32>) -> tensor<1024xf32>
 %2 = "mhlo.bitcast"(%0) : (tensor<1024xf32>) -> tensor<1024xf32>
 %3 = stablehlo.exponential %2 : tensor<1024xf32>
 %4 = stablehlo.negate %3 : tensor<1024xf32>
 return %4 : tensor<1024xf32> }
 func.func private @fused_0(%x: tensor<1024xf32>, %y: tensor<1024xf32>) -> tensor<1024xf32> {
   %0 = stablehlo.add %x, %y : tensor<1024xf32>
   %1 = stablehlo.multiply %0, %x : tensor<1024xf32>
   return %1 : tensor<1024xf32> } }"""


def test_a_fusion_is_one_kernel_and_nothing_is_added_to_it() -> None:
    program = lower(read(TEXT), Target())
    rows = [program.table.rows[node.row] for node in program.body]  # type: ignore[union-attr]
    size = 4096
    assert [(row.bytes_read, row.bytes_written, row.vector_flops) for row in rows] == [
        (2 * size, size, 2048),
        (size, size, 0),
        (size, size, 1024),
    ]
    assert rows[1].transcendentals == 1024
    assert program.exec_model == "as-written"
