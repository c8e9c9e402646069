"""Modules from producers other than today's JAX: other forms, older spellings, other dialects, narrow types."""

import pytest
from jaxlib.mlir.dialects import stablehlo

from stablecast.ir import mlir
from stablecast.ir.attributes import Dense, DotDims
from stablecast.ir.errors import InputError
from stablecast.ir.groups import Groups
from stablecast.ir.program import Axis, Program, Sharding, Stage
from stablecast.ir.reader import read

ADD = b"""module @m { func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %a, %a : tensor<4xf32>
  return %0 : tensor<4xf32> } }"""


def names(program: Program) -> list[str]:
    return [op.name for op in program.walk()]


def test_text_bytecode_and_portable_artifact_give_one_program() -> None:
    module = mlir.parse(ADD, "add.mlir")
    bytecode = mlir.write_bytecode(module)
    artifact = stablehlo.serialize_portable_artifact(module, "1.0.0", allow_other_dialects=True)
    assert mlir.is_artifact(artifact)
    for data in (ADD, bytecode, artifact):
        program = read(data, "add")
        assert names(program) == ["stablehlo.add"]
        assert str(program.main.result_types[0]) == "f32[4]"
        assert program.num_ops == 1


def test_generic_form() -> None:
    program = read(
        b""""builtin.module"() ({
 "func.func"() <{function_type = (tensor<8x16xf32>, tensor<16x4xf32>) -> tensor<8x4xf32>, sym_name = "main"}> ({
 ^bb0(%a: tensor<8x16xf32>, %b: tensor<16x4xf32>):
  %0 = "stablehlo.dot_general"(%a, %b) {dot_dimension_numbers = #stablehlo.dot<lhs_contracting_dimensions = [1],
    rhs_contracting_dimensions = [0]>} : (tensor<8x16xf32>, tensor<16x4xf32>) -> tensor<8x4xf32>
  "func.return"(%0) : (tensor<8x4xf32>) -> ()
 }) : () -> ()
}) : () -> ()"""
    )
    assert program.main.body.ops[0].attrs["dot_dimension_numbers"] == DotDims((), (), (1,), (0,))


def test_integer_lists_as_older_stablehlo_spelt_them() -> None:
    program = read(
        b"""module { func.func @main(%a: tensor<4x8xf32>) -> tensor<2x4xf32> {
 %0 = "stablehlo.broadcast_in_dim"(%a) {broadcast_dimensions = dense<[0,1]> : tensor<2xi64>} : (tensor<4x8xf32>) -> tensor<4x8xf32>
 %1 = "stablehlo.slice"(%0) {start_indices = dense<[0,0]> : tensor<2xi64>, limit_indices = dense<[4,2]> : tensor<2xi64>,
   strides = dense<1> : tensor<2xi64>} : (tensor<4x8xf32>) -> tensor<4x2xf32>
 %2 = "stablehlo.transpose"(%1) {permutation = dense<[1,0]> : tensor<2xi64>} : (tensor<4x2xf32>) -> tensor<2x4xf32>
 return %2 : tensor<2x4xf32> } }"""
    )
    assert [dict(op.attrs) for op in program.walk()] == [
        {"broadcast_dimensions": (0, 1)},
        {"start_indices": (0, 0), "limit_indices": (4, 2), "strides": (1, 1)},
        {"permutation": (1, 0)},
    ]


def test_collectives_in_an_attribute_dictionary() -> None:
    program = read(
        b"""module attributes {mhlo.num_partitions = 4 : i32} { func.func @main(%a: tensor<8xf32>) -> tensor<8xf32> {
 %0 = "stablehlo.all_reduce"(%a) ({
 ^bb0(%x: tensor<f32>, %y: tensor<f32>):
   %s = stablehlo.add %x, %y : tensor<f32>
   stablehlo.return %s : tensor<f32>
 }) {replica_groups = dense<[[0,2],[1,3]]> : tensor<2x2xi64>,
     channel_handle = #stablehlo.channel_handle<handle = 3, type = 1>, use_global_device_ids}
  : (tensor<8xf32>) -> tensor<8xf32>
 %p = "stablehlo.collective_permute"(%0) {source_target_pairs = dense<[[0,1],[1,0]]> : tensor<2x2xi64>}
  : (tensor<8xf32>) -> tensor<8xf32>
 return %p : tensor<8xf32> } }"""
    )
    reduce, add, permute = program.walk()
    assert reduce.attrs["replica_groups"] == Groups(2, 2, (2, 2), (1, 0))
    assert reduce.attrs["channel_handle"] == 3
    assert reduce.regions[0].returns == add.results
    assert permute.attrs["source_target_pairs"] == ((0, 1), (1, 0))
    assert program.stage is Stage.PER_DEVICE
    assert program.num_devices == 4


def test_narrow_and_fp8_types() -> None:
    program = read(
        b"""module { func.func @main(%a: tensor<8xi4>, %b: tensor<8xui4>, %c: tensor<8xf8E4M3FN>, %d: tensor<8xf8E5M2>,
 %e: tensor<8xi1>, %f: tensor<8xcomplex<f32>>, %g: tensor<8xf4E2M1FN>, %h: tensor<8xi2>) -> tensor<8xi4> {
 %0 = stablehlo.add %a, %a : tensor<8xi4>
 return %0 : tensor<8xi4> } }"""
    )
    types = [str(argument.type) for argument in program.main.arguments]
    assert types == ["i4[8]", "ui4[8]", "f8e4m3fn[8]", "f8e5m2[8]", "i1[8]", "c64[8]", "f4e2m1fn[8]", "i2[8]"]


def test_composites_name_their_decomposition() -> None:
    program = read(
        b"""module { func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {
 %0 = stablehlo.composite "my.gelu" %a {composite_attributes = {approx = "none"}, decomposition = @impl, version = 1 : i32}
   : (tensor<4xf32>) -> tensor<4xf32>
 return %0 : tensor<4xf32> }
 func.func private @impl(%a: tensor<4xf32>) -> tensor<4xf32> { %0 = stablehlo.tanh %a : tensor<4xf32> return %0 : tensor<4xf32> } }"""
    )
    op = program.main.body.ops[0]
    assert op.callee == "impl"
    assert op.attrs["name"] == "my.gelu"
    assert op.attrs["composite_attributes"] == {"approx": "none"}
    assert set(program.functions) == {"main", "impl"}


def test_large_constants_keep_no_values_and_small_ones_do() -> None:
    program = read(
        b"""module { func.func @main() -> tensor<2xf32> {
 %0 = stablehlo.constant dense_resource<w> : tensor<2xf32>
 %1 = stablehlo.constant dense<[1.0, 2.0]> : tensor<2xf32>
 %2 = stablehlo.constant dense<3> : tensor<100xi32>
 return %0 : tensor<2xf32> } }
{-# dialect_resources: { builtin: { w: "0x040000000000803F00000040" } } #-}"""
    )
    resource, small, splat = (op.attrs["value"] for op in program.walk())
    assert not isinstance(resource, Dense)
    assert small == Dense((1.0, 2.0), splat=False)
    assert splat.scalar == 3


def test_shardy_and_its_manual_computation() -> None:
    program = read(
        b"""module attributes {mhlo.num_partitions = 16 : i32} { sdy.mesh @mesh = <["data"=4, "model"=4]>
 func.func public @main(%a: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {"model":(1)2, ?}]>})
   -> tensor<8x16xf32> {
 %0 = sdy.manual_computation(%a) in_shardings=[<@mesh, [{"data"}, {}]>] out_shardings=[<@mesh, [{"data"}, {}]>]
   manual_axes={"data"} (%x: tensor<2x16xf32>) {
   %1 = stablehlo.negate %x : tensor<2x16xf32>
   sdy.return %1 : tensor<2x16xf32>
 } : (tensor<8x16xf32>) -> tensor<8x16xf32>
 return %0 : tensor<8x16xf32> } }"""
    )
    assert program.stage is Stage.GLOBAL_SDY
    assert program.meshes[0].axes == (("data", 4), ("model", 4))
    sharding = program.main.arguments[0].sharding
    assert sharding is not None
    assert sharding.dims == ((Axis("data"),), (Axis("model", (1, 2)),))
    assert sharding.open_dims == (1,)
    manual, negate = program.walk()
    assert manual.attrs["manual_axes"] == ("data",)
    assert str(negate.result_type) == "f32[2,16]"


def test_gspmd_annotations() -> None:
    program = read(
        b"""module attributes {mhlo.num_partitions = 8 : i32} {
 func.func public @main(%a: tensor<8x16xf32> {mhlo.sharding = "{devices=[2,4]<=[8]}"}) -> tensor<8x16xf32> {
 %0 = stablehlo.custom_call @Sharding(%a) {mhlo.sharding = "{replicated}"} : (tensor<8x16xf32>) -> tensor<8x16xf32>
 return %0 : tensor<8x16xf32> } }"""
    )
    assert program.stage is Stage.GLOBAL_GSPMD
    assert program.main.arguments[0].sharding == Sharding(gspmd="{devices=[2,4]<=[8]}")
    assert program.main.body.ops[0].shardings == (Sharding(gspmd="{replicated}"),)


def test_fusions_that_the_producer_made() -> None:
    program = read(
        b"""module { func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {
 %0 = "mhlo.fusion"(%a) ({
  ^bb0(%x: tensor<4xf32>):
   %1 = stablehlo.add %x, %x : tensor<4xf32>
   mhlo.return %1 : tensor<4xf32> }) {fusion_kind = #mhlo<fusion_kind kLoop>} : (tensor<4xf32>) -> tensor<4xf32>
 return %0 : tensor<4xf32> } }"""
    )
    assert program.prefused
    assert names(program) == ["mhlo.fusion", "stablehlo.add"]


def test_replicas_are_told_from_partitions() -> None:
    program = read(b"module attributes {mhlo.num_replicas = 4 : i32, mhlo.num_partitions = 1 : i32} {" + ADD[11:])
    assert (program.stage, program.num_replicas, program.num_partitions) == (Stage.PER_DEVICE, 4, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"hello world", "not a StableHLO module: line 1, column 1"),
        (b"module {}", "holds no function"),
        (b"module { func.func @main() { return } }", "function @main is empty"),
        (b"module { func.func private @main() }", "function @main is only declared"),
        (ADD.replace(b"stablehlo.add %a, %a", b'"foo.bar"(%a)'), "not a StableHLO module"),
        (
            ADD.replace(b"@main", b"@one").replace(b"} }", b"} func.func @two() -> () { return } }"),
            "none is @main: @one, @two",
        ),
        (ADD.replace(b"tensor<4xf32>", b"tensor<*xf32>"), "not a StableHLO module|without a rank"),
        (mlir.BYTECODE_MAGIC + b"garbage", "not a StableHLO module"),
    ],
)
def test_what_is_no_module_is_one_line(text: bytes, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=message) as raised:
        read(text, "bad.mlir")
    assert "\n" not in str(raised.value)
    assert capfd.readouterr().err == ""
