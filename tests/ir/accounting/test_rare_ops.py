"""Ops that current exports rarely carry, each on an 8x16 f32 tensor or smaller; the figures follow from its size."""

import re

import pytest

# name: arguments, ops, (matrix FLOP, vector FLOP, transcendentals, bytes read, bytes written)
CASES = {
    "einsum": (
        "%x: M, %y: tensor<16x4xf32>",
        """%0 = "stablehlo.einsum"(%x, %y) <{einsum_config = "ij,jk->ik"}> : (M, tensor<16x4xf32>) ->
        tensor<8x4xf32>""",
        (1024, 0, 0, 768, 128),
    ),
    "unary_einsum": (
        "%x: M",
        """%0 = "stablehlo.unary_einsum"(%x) <{einsum_config = "ij->i"}> : (M) -> tensor<8xf32>""",
        (0, 120, 0, 512, 32),
    ),
    "dot": (
        "%x: M, %y: tensor<16xf32>",
        """%0 = stablehlo.dot %x, %y : (M, tensor<16xf32>) -> tensor<8xf32>""",
        (256, 0, 0, 576, 32),
    ),
    "torch_index_select": (
        "%x: M, %i: tensor<3xi32>",
        """%0 = "stablehlo.torch_index_select"(%x, %i) <{dim = 0 : i64, batch_dims = 0 : i64}> : (M,
        tensor<3xi32>) -> tensor<3x16xf32>""",
        (0, 0, 0, 204, 192),
    ),
    "batch_norm_inference": (
        "%x: M, %s: tensor<16xf32>",
        """%0 = "stablehlo.batch_norm_inference"(%x, %s, %s, %s, %s) <{epsilon = 0.1 : f32, feature_index =
        1 : i64}> : (M, tensor<16xf32>, tensor<16xf32>, tensor<16xf32>, tensor<16xf32>) -> M""",
        (0, 512, 16, 768, 512),
    ),
    "batch_norm_training": (
        "%x: M, %s: tensor<16xf32>",
        """%0:3 = "stablehlo.batch_norm_training"(%x, %s, %s) <{epsilon = 0.1 : f32, feature_index = 1 :
        i64}> : (M, tensor<16xf32>, tensor<16xf32>) -> (M,tensor<16xf32>,tensor<16xf32>)""",
        (0, 1024, 16, 640, 640),
    ),
    "batch_norm_grad": (
        "%x: M, %s: tensor<16xf32>",
        """%0:3 = "stablehlo.batch_norm_grad"(%x, %s, %s, %s, %x) <{epsilon = 0.1 : f32, feature_index = 1 :
        i64}> : (M, tensor<16xf32>, tensor<16xf32>, tensor<16xf32>, M) -> (M,tensor<16xf32>,tensor<16xf32>)""",
        (0, 1536, 16, 1216, 640),
    ),
    "rng": (
        "%a: tensor<f32>, %s: tensor<2xi32>",
        """%0 = stablehlo.rng %a, %a, %s, distribution = UNIFORM : (tensor<f32>, tensor<f32>, tensor<2xi32>)
        -> M""",
        (0, 3456, 0, 16, 512),
    ),
    "real_dynamic_slice": (
        "%x: M, %i: tensor<2xi32>",
        """%0 = stablehlo.real_dynamic_slice %x, %i, %i, %i : (M, tensor<2xi32>, tensor<2xi32>,
        tensor<2xi32>) -> tensor<2x4xf32>""",
        (0, 0, 0, 56, 32),
    ),
    "dynamic_pad": (
        "%x: M, %z: tensor<f32>, %i: tensor<2xi32>",
        """%0 = stablehlo.dynamic_pad %x, %z, %i, %i, %i : (M, tensor<f32>, tensor<2xi32>, tensor<2xi32>,
        tensor<2xi32>) -> tensor<9x17xf32>""",
        (0, 0, 0, 516, 612),
    ),
    "dynamic_iota": (
        "%i: tensor<2xi32>",
        """%0 = stablehlo.dynamic_iota %i, dim = 0 : (tensor<2xi32>) -> M""",
        (0, 0, 0, 0, 512),
    ),
    "dynamic_reshape": (
        "%x: M, %i: tensor<2xi32>",
        """%0 = stablehlo.dynamic_reshape %x, %i : (M, tensor<2xi32>) -> tensor<16x8xf32>""",
        (0, 0, 0, 0, 0),
    ),
    "dynamic_gather": (
        "%x: M, %i: tensor<3x1xi32>, %s: tensor<2xi32>",
        """%0 = "stablehlo.dynamic_gather"(%x, %i, %s) <{dimension_numbers = #stablehlo.gather<offset_dims =
        [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>}> : (M,
        tensor<3x1xi32>, tensor<2xi32>) -> tensor<3x16xf32>""",
        (0, 0, 0, 204, 192),
    ),
    "dynamic_conv": (
        "%x: tensor<1x8x8x2xf32>, %w: tensor<3x3x2x4xf32>, %p: tensor<2x2xi32>",
        """%0 = "stablehlo.dynamic_conv"(%x, %w, %p) <{dimension_numbers = #stablehlo.conv<[b, 0, 1, f]x[0,
        1, i, o]->[b, 0, 1, f]>, batch_group_count = 1 : i64, feature_group_count = 1 : i64}> :
        (tensor<1x8x8x2xf32>, tensor<3x3x2x4xf32>, tensor<2x2xi32>) -> tensor<1x8x8x4xf32>""",
        (9216, 0, 0, 816, 1024),
    ),
    "reverse": (
        "%x: M",
        """%0 = "stablehlo.reverse"(%x) <{dimensions = array<i64: 0>}> : (M) -> M""",
        (0, 0, 0, 512, 512),
    ),
    "outfeed": (
        "%x: M",
        """%t = stablehlo.create_token : !stablehlo.token
        %0 = "stablehlo.outfeed"(%x, %t) <{outfeed_config = ""}> : (M, !stablehlo.token) -> !stablehlo.token""",
        (0, 0, 0, 512, 0),
    ),
    "infeed": (
        "",
        """%t = stablehlo.create_token : !stablehlo.token
        %0:2 = "stablehlo.infeed"(%t) <{infeed_config = ""}> : (!stablehlo.token) -> (M, !stablehlo.token)""",
        (0, 0, 0, 0, 512),
    ),
    "tuple": (
        "%x: M",
        """%0 = stablehlo.tuple %x, %x : tuple<M, M>
        %1 = stablehlo.get_tuple_element %0[1] : (tuple<M, M>) -> M""",
        (0, 0, 0, 0, 0),
    ),
    "cross-replica-sum": (
        "%x: M",
        """%0 = "stablehlo.cross-replica-sum"(%x) <{replica_groups = dense<[[0,1]]> : tensor<1x2xi64>}> :
        (M) -> M""",
        (0, 0, 0, 512, 512),
    ),
    "reduce_precision": (
        "%x: M",
        """%0 = stablehlo.reduce_precision %x, format = e5m10 : M""",
        (0, 128, 0, 512, 512),
    ),
    "get_dimension_size": (
        "%x: M",
        """%0 = stablehlo.get_dimension_size %x, dim = 0 : (M) -> tensor<i32>""",
        (0, 0, 0, 0, 0),
    ),
    "scan of rows": (
        "%x: tensor<10x4xf32>, %c: tensor<4xf32>",
        """%0:2 = "chlo.scan"(%x, %c) <{dimension = 0 : i64, operandSegmentSizes = array<i32: 1, 1>,
        resultSegmentSizes = array<i32: 1, 1>, is_reverse = false}> ({
        ^bb0(%a: tensor<4xf32>, %b: tensor<4xf32>):
        %s = stablehlo.add %a, %b : tensor<4xf32>
        stablehlo.return %s, %s : tensor<4xf32>, tensor<4xf32> }) : (tensor<10x4xf32>, tensor<4xf32>) ->
        (tensor<10x4xf32>, tensor<4xf32>)""",
        (0, 40, 0, 320, 160),
    ),
    "scan of integers": (
        "%x: tensor<10xi32>, %c: tensor<i32>",
        """%0:2 = "chlo.scan"(%x, %c) <{dimension = 0 : i64, operandSegmentSizes = array<i32: 1, 1>,
        resultSegmentSizes = array<i32: 1, 1>, is_reverse = false}> ({
        ^bb0(%a: tensor<i32>, %b: tensor<i32>):
        %s = stablehlo.add %a, %b : tensor<i32>
        stablehlo.return %s, %s : tensor<i32>, tensor<i32> }) : (tensor<10xi32>, tensor<i32>) ->
        (tensor<10xi32>, tensor<i32>)""",
        (0, 10, 0, 44, 44),
    ),
    "next_after": (
        "%x: M",
        """%0 = chlo.broadcast_next_after %x, %x : (M, M) -> M""",
        (0, 128, 0, 1024, 512),
    ),
    "zeta": (
        "%x: M",
        """%0 = chlo.zeta %x, %x : M, M -> M""",
        (0, 0, 128, 1024, 512),
    ),
    "is_inf": (
        "%x: M",
        """%0 = chlo.is_inf %x : M -> tensor<8x16xi1>""",
        (0, 128, 0, 512, 128),
    ),
    "mulhi": (
        "%x: tensor<8xi32>",
        """%0 = chlo.mulhi %x, %x : tensor<8xi32>, tensor<8xi32> -> tensor<8xi32>""",
        (0, 8, 0, 64, 32),
    ),
    "constant_like": (
        "%x: M",
        """%0 = "chlo.constant_like"(%x) <{value = 1.0 : f32}> : (M) -> M""",
        (0, 0, 0, 0, 512),
    ),
    "broadcast_select": (
        "%p: tensor<i1>, %x: M",
        """%0 = "chlo.broadcast_select"(%p, %x, %x) : (tensor<i1>, M, M) -> M""",
        (0, 128, 0, 1025, 512),
    ),
    "stochastic_convert": (
        "%x: M, %r: tensor<8x16xui32>",
        """%0 = "mhlo.stochastic_convert"(%x, %r) : (M, tensor<8x16xui32>) -> tensor<8x16xbf16>""",
        (0, 384, 0, 1024, 256),
    ),
    "rng state": (
        "",
        """%0 = "mhlo.xla.rng_get_and_update_state"() <{delta = 1 : i64}> : () -> tensor<2xui64>""",
        (0, 1, 0, 0, 16),
    ),
    "mhlo tan": (
        "%x: M",
        """%0 = mhlo.tan %x : M""",
        (0, 0, 128, 512, 512),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_work(account_text, name):
    arguments, ops, parts = CASES[name]
    signature, body = (re.sub(r"\bM\b", "tensor<8x16xf32>", text) for text in (f"({arguments})", f"{ops}\nreturn"))
    found = account_text(signature, body)
    assert found.work.parts == parts
    assert found.complete
