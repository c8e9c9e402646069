"""Scheduled HLO text, written by hand in the spellings of XLA's GPU, CPU and TPU compilers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stablecast.ir.accounting import account
from stablecast.ir.device_program import Collective, DeviceProgram, Kernel, Loop
from stablecast.ir.errors import InputError, StablecastError
from stablecast.ir.hlo import is_scheduled
from stablecast.ir.kernels import KernelRow
from stablecast.ir.program import Program, Stage
from stablecast.ir.reader import read
from stablecast.lowering.device import lower
from stablecast.lowering.target import Target

HEADER = "HloModule jit_step, is_scheduled=true, entry_computation_layout={()->f32[]}"
ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""


def module(body: str, header: str = HEADER, computations: str = ADD) -> bytes:
    return f"{header}\n{computations}\nENTRY %main (a: f32[]) -> f32[] {{\n{body}\n}}\n".encode()


def program(body: str, header: str = HEADER, computations: str = ADD) -> Program:
    return read(module(body, header, computations), "step.txt")


def lowered(body: str, header: str = HEADER, computations: str = ADD) -> DeviceProgram:
    return lower(program(body, header, computations), Target())


def rows(made: DeviceProgram) -> list[KernelRow]:
    return [made.table.rows[node.row] for node in made.body if isinstance(node, Kernel)]


TRITON = """
%gemm_computation (p0: bf16[64,128], p1: bf16[128,32], p2: bf16[32]) -> bf16[64,32] {
  %p0 = bf16[64,128]{1,0} parameter(0)
  %p1 = bf16[128,32]{1,0} parameter(1)
  %dot.1 = bf16[64,32]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/mlp/dot_general" stack_frame_id=2}
  %p2 = bf16[32]{0} parameter(2)
  %wide = bf16[64,32]{1,0} broadcast(%p2), dimensions={1}
  ROOT %out = bf16[64,32]{1,0} add(%dot.1, %wide)
}
"""
TRITON_CALL = """  %a = bf16[64,128]{1,0} parameter(0), metadata={op_name="state[\\'a\\']"}
  %b = bf16[128,32]{1,0} parameter(1)
  %c = bf16[32]{0} parameter(2)
  ROOT %gemm = bf16[64,32]{1,0} fusion(%a, %b, %c), kind=kCustom, calls=%gemm_computation, backend_config={"operation_queue_id":"0","fusion_backend_config":{"kind":"__triton_nested_gemm_fusion","block_level_fusion_config":{"num_warps":"2","output_tiles":[{"sizes":["16","8"]}]}}}"""


def test_a_generated_product_with_its_epilogue_is_one_kernel() -> None:
    frames = 'FileNames\n1 "model.py"\n\nFileLocations\n1 {file_name_id=1 line=7 column=1}\n\nStackFrames\n2 {file_location_id=1}\n\n'
    made = lowered(TRITON_CALL, computations=frames + TRITON)
    (row,) = rows(made)
    assert (row.klass, row.m, row.n, row.k, row.math) == ("matmul", 64, 32, 128, "bf16")
    assert (row.matmul_flops, row.vector_flops) == (2 * 64 * 32 * 128, 64 * 32)
    assert (row.bytes_read, row.bytes_written) == (2 * (64 * 128 + 128 * 32 + 32), 2 * 64 * 32)
    assert (row.library, row.label) == ("triton", "16x8")
    (node,) = made.body
    assert (node.scope, node.location.source) == ("jit(step)/mlp/dot_general", "model.py:7")
    assert made.platform in ("cuda", "")


def test_arguments_aliases_and_devices() -> None:
    header = HEADER + ", input_output_alias={ {}: (0, {}, may-alias) }, num_partitions=64, replica_count=2"
    found = program(TRITON_CALL, header, TRITON)
    assert [argument.name for argument in found.main.arguments] == ["state['a']", "b", "c"]
    assert [argument.aliases_output for argument in found.main.arguments] == [0, None, None]
    assert (found.num_replicas, found.num_partitions, found.stage) == (2, 64, Stage.SCHEDULED)
    assert (found.platform, found.prefused) == ("cuda", True)


def test_a_cublas_call_with_a_bias_is_a_product() -> None:
    body = """  %a = f32[64,128]{1,0} parameter(0)
  %b = f32[128,32]{1,0} parameter(1)
  %c = f32[32]{0} parameter(2)
  %call = (f32[64,32]{1,0}, s8[4194304]{0}) custom-call(%a, %b, %c), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"alpha_real":1,"beta":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},"precision_config":{"operand_precision":["DEFAULT","DEFAULT"]},"epilogue":"BIAS_RELU"}}
  ROOT %out = f32[64,32]{1,0} get-tuple-element(%call), index=0"""
    (row,) = rows(lowered(body))
    assert (row.klass, row.m, row.n, row.k, row.math) == ("matmul", 64, 32, 128, "tf32")
    assert row.matmul_flops == 2 * 64 * 32 * 128
    assert row.bytes_read == 4 * (64 * 128 + 128 * 32 + 32)
    assert row.epilogue == "add+maximum"


CONVOLUTION = (
    'window={{size=3x3 stride=2x2 pad=1_1x1_1}}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{kind}"'
)


@pytest.mark.parametrize(
    ("kind", "shapes", "im2col"),
    [
        ("Forward", ("f16[8,16,16,4]", "f16[32,3,3,4]", "f16[8,8,8,32]"), (8 * 64, 32, 9 * 4)),
        ("BackwardInput", ("f16[8,8,8,32]", "f16[32,3,3,4]", "f16[8,16,16,4]"), (8 * 256, 4, 9 * 32)),
        ("BackwardFilter", ("f16[8,16,16,4]", "f16[8,8,8,32]", "f16[32,3,3,4]"), (9 * 4, 32, 8 * 64)),
    ],
)
def test_cudnn_convolutions_and_their_gradients(
    kind: str, shapes: tuple[str, str, str], im2col: tuple[int, int, int]
) -> None:
    body = f"""  %a = {shapes[0]} parameter(0)
  %b = {shapes[1]} parameter(1)
  %call = ({shapes[2]}, u8[0]) custom-call(%a, %b), {CONVOLUTION.format(kind=kind)}
  ROOT %out = {shapes[2]} get-tuple-element(%call), index=0"""
    (row,) = rows(lowered(body))
    assert (row.klass, row.math) == ("convolution", "fp16")
    assert sorted((row.m, row.n, row.k)) == sorted(im2col)
    forward = 2 * (8 * 8 * 8 * 32) * (9 * 4)
    if kind == "BackwardInput":
        assert 0.8 * forward < row.matmul_flops <= forward
    else:
        assert row.matmul_flops == forward


def test_asynchronous_collectives_and_combined_operands() -> None:
    body = """  %a = bf16[16,4]{1,0} parameter(0)
  %b = f32[8]{0} parameter(1)
  %start = (bf16[16,4]{1,0}, bf16[64,4]{1,0}) all-gather-start(%a), channel_id=3, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, use_global_device_ids=true
  %twice = f32[8]{0} add(%b, %b)
  %done = bf16[64,4]{1,0} all-gather-done(%start)
  %reduced = (f32[8]{0}, bf16[64,4]{1,0}) all-reduce-start(%twice, %done), channel_id=4, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add, backend_config={"collective_backend_config":{"is_sync":true}}
  ROOT %both = (f32[8]{0}, bf16[64,4]{1,0}) all-reduce-done(%reduced)"""
    gather, kernel, reduce = lowered(body, HEADER + ", num_partitions=8").body
    assert isinstance(gather, Collective)
    assert isinstance(kernel, Kernel)
    assert isinstance(reduce, Collective)
    assert (gather.kind, gather.operand_bytes, gather.result_bytes, gather.channel) == ("all_gather", 128, 512, 3)
    assert [gather.groups.members(rank) for rank in (0, 1)] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert (reduce.kind, reduce.operand_bytes, reduce.reduce_op, reduce.groups.size) == ("all_reduce", 544, "add", 2)
    assert (gather.asynchronous, reduce.asynchronous) == (True, False)
    assert reduce.deps == (0, 1)


LOOP = """
%body (s: (s32[], f32[4,8], f32[8])) -> (s32[], f32[4,8], f32[8]) {
  %s = (s32[], f32[4,8]{1,0}, f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %all = f32[4,8]{1,0} get-tuple-element(%s), index=1
  %x = f32[8]{0} get-tuple-element(%s), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %row = f32[1,8]{1,0} bitcast(%x)
  %zero = s32[] constant(0)
  %new = f32[4,8]{1,0} dynamic-update-slice(%all, %row, %i, %zero)
  ROOT %t = (s32[], f32[4,8]{1,0}, f32[8]{0}) tuple(%next, %new, %x)
}

%cond (s.1: (s32[], f32[4,8], f32[8])) -> pred[] {
  %s.1 = (s32[], f32[4,8]{1,0}, f32[8]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %n = s32[] constant(4)
  ROOT %less = pred[] compare(%i.1, %n), direction=LT
}
"""
LOOP_CALL = """  %zero.1 = s32[] constant(0)
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8]{0} parameter(1)
  %init = (s32[], f32[4,8]{1,0}, f32[8]{0}) tuple(%zero.1, %a, %b)
  %loop = (s32[], f32[4,8]{1,0}, f32[8]{0}) while(%init), condition=%cond, body=%bodyTRIPS
  ROOT %out = f32[4,8]{1,0} get-tuple-element(%loop), index=1"""


@pytest.mark.parametrize(
    ("trips", "count"),
    [
        (', backend_config={"known_trip_count":{"n":"7"}}', 7),
        (', backend_config="{\\"known_trip_count\\":{\\"n\\":\\"9\\"}}"', 9),
        ("", 4),
    ],
)
def test_loops_with_known_trips_and_updates_in_place(trips: str, count: int) -> None:
    made = lowered(LOOP_CALL.replace("TRIPS", trips), computations=LOOP)
    (loop,) = [node for node in made.body if isinstance(node, Loop)]
    assert loop.count == count
    update = next(row for row in made.table.rows if row.bytes_written == 32)
    assert update.bytes_read <= 32 + 8


def test_a_loop_that_nobody_counted_is_a_symbol() -> None:
    open_loop = LOOP.replace("%n = s32[] constant(4)", "%n = s32[] get-tuple-element(%s.1), index=0")
    made = lowered(LOOP_CALL.replace("TRIPS", ""), computations=open_loop)
    assert [symbol.name for symbol in made.work.symbols] == ["while_trips"]
    assert not made.complete


def test_branches_take_their_operands() -> None:
    branches = """
%yes (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %e = f32[8]{0} exponential(%p)
}

%no (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %c = f32[8]{0} copy(%q)
}
"""
    body = """  %flag = pred[] parameter(0)
  %a = f32[8]{0} parameter(1)
  ROOT %out = f32[8]{0} conditional(%flag, %a, %a), true_computation=%yes, false_computation=%no"""
    work, _ = lowered(body, computations=branches).work.evaluate()
    assert (work.transcendentals, work.bytes_read, work.bytes_written) == (8, 32, 32)


def test_order_is_that_of_the_schedule() -> None:
    body = """  %a = f32[8]{0} parameter(0)
  %late = f32[8]{0} sine(%a)
  %early = f32[8]{0} cosine(%a)
  %mid = f32[8]{0} negate(%late)
  ROOT %t = (f32[8]{0}, f32[8]{0}) tuple(%mid, %early)"""
    made = program(body)
    assert [op.name for op in made.main.body.ops] == ["stablehlo.sine", "stablehlo.cosine", "stablehlo.negate"]
    assert [node.ops for node in lowered(body).body if isinstance(node, Kernel)] == [(0,), (1,), (2,)]


def test_operands_with_shapes_and_unquoted_names_as_older_dumps_have_them() -> None:
    body = """  a = f32[8]{0} parameter(0)
  ROOT out = (f32[8]{0}, /*index=1*/f32[8]{0}) tuple(f32[8]{0} %a, f32[8]{0} a)"""
    assert len(program(body).main.body.returns) == 2


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (module(TRITON_CALL, computations=TRITON)[:-3], "does not end"),
        (module(TRITON_CALL), "has no computation %gemm_computation, which it calls"),
        (module("  %x = f32[8]{0} negate(%nowhere)\n  ROOT %y = f32[8]{0} negate(%x)"), "reads 'nowhere'"),
        (module("  %x = f32[8]{0} negate(%a"), "the line of %x is cut off"),
        (module("  nonsense"), "cannot read the line 'nonsense'"),
        (HEADER.encode() + b"\n", "has no entry computation"),
        (module("  ROOT %x = q7[8]{0} parameter(0)"), "q7"),
        (module(""), "is empty"),
        (HEADER.encode() + b"\n\xff\xfe", "is not text"),
    ],
)
def test_damaged_text_is_one_line(data: bytes, said: str) -> None:
    with pytest.raises(InputError) as caught:
        read(data, "step.txt")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_scheduled_text_is_taken_as_it_is() -> None:
    assert is_scheduled(module(""))
    assert not is_scheduled(b"HloModule jit_step, entry_computation_layout={()->f32[]}\n\nis_scheduled=true")


def test_tiled_layouts_and_estimated_cycles_of_a_tpu() -> None:
    computations = """
%fused (p: bf16[128,256]) -> bf16[128,256] {
  %p = bf16[128,256]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %n = bf16[128,256]{1,0:T(8,128)(2,1)S(1)} negate(%p)
}
"""
    body = """  %a = bf16[128,256]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %f = bf16[128,256]{1,0:T(8,128)(2,1)S(1)} fusion(%a), kind=kLoop, calls=%fused, backend_config={"flag_configs":[],"window_config":{"estimated_cycles":"1234","iteration_bounds":["2"]}}"""
    found = program(body, computations=computations)
    assert found.platform == "tpu"
    fusion: Any = found.main.body.ops[0]
    assert fusion.attrs["estimated_cycles"] == 1234
    (row,) = rows(lower(found, Target("tpu")))
    assert (row.bytes_read, row.estimated_cycles) == (2 * 128 * 256, 1234)


def test_copies_permutes_and_wrapped_computations_that_run_beside_others() -> None:
    computations = """
%wrapped (p: bf16[64,128]) -> bf16[32,128] {
  %p = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %s = bf16[32,128]{1,0:T(8,128)(2,1)} slice(%p), slice={[0:32], [0:128]}
}
"""
    body = """  %a = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %copy-start = (bf16[64,128]{1,0:T(8,128)(2,1)S(1)}, bf16[64,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%a), cross_program_prefetch_index=0
  %copy-done = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %permute-start = (bf16[64,128]{1,0:T(8,128)(2,1)}, bf16[64,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%copy-done), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %slice-start = ((bf16[64,128]{1,0:T(8,128)(2,1)}), bf16[32,128]{1,0:T(8,128)(2,1)}, s32[]) async-start(%a), calls=%wrapped
  %slice-update = ((bf16[64,128]{1,0:T(8,128)(2,1)}), bf16[32,128]{1,0:T(8,128)(2,1)}, s32[]) async-update(%slice-start)
  %slice-done = bf16[32,128]{1,0:T(8,128)(2,1)} async-done(%slice-update)
  %permute-done = bf16[64,128]{1,0:T(8,128)(2,1)} collective-permute-done(%permute-start)
  ROOT %t = (bf16[64,128]{1,0:T(8,128)(2,1)}, bf16[32,128]{1,0:T(8,128)(2,1)}) tuple(%permute-done, %slice-done)"""
    made = lowered(body, HEADER + ", num_partitions=4", computations)
    copy, permute, cut = made.body
    assert isinstance(permute, Collective)
    assert isinstance(copy, Kernel)
    assert isinstance(cut, Kernel)
    assert (permute.kind, permute.operand_bytes, permute.asynchronous, permute.deps) == (
        "collective_permute",
        2 * 64 * 128,
        True,
        (0,),
    )
    assert permute.shift is not None
    assert (permute.shift.by, permute.shift.cyclic) == (1, True)
    assert [(row.klass, row.bytes_read) for row in rows(made)] == [("copy", 2 * 64 * 128), ("copy", 2 * 32 * 128)]


def test_work_of_a_fusion_counts_what_lies_behind_a_bitcast_and_the_rows_that_a_scatter_updates() -> None:
    computations = (
        ADD
        + """
%fused (p: f32[1000,64], i: s32[8], u: f32[512]) -> f32[1000,64] {
  %p = f32[1000,64]{1,0} parameter(0)
  %i = s32[8]{0} parameter(1)
  %rows = s32[8,1]{1,0} bitcast(%i)
  %u = f32[512]{0} parameter(2)
  %wide = f32[8,64]{1,0} bitcast(%u)
  %twice = f32[8,64]{1,0} add(%wide, %wide)
  ROOT %s = f32[1000,64]{1,0} scatter(%p, %rows, %twice), update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%add
}
"""
    )
    body = """  %a = f32[1000,64]{1,0} parameter(0)
  %b = s32[8]{0} parameter(1)
  %c = f32[512]{0} parameter(2)
  ROOT %f = f32[1000,64]{1,0} fusion(%a, %b, %c), kind=kInput, calls=%fused"""
    header = HEADER + ", input_output_alias={ {}: (0, {}, may-alias) }"
    total = account(program(body, header, computations)).low
    (row,) = rows(lowered(body, header, computations))
    assert (row.bytes_read, row.bytes_written) == (2048 + 32 + 2048, 2048)
    assert (total.bytes_read, total.bytes_written) == (row.bytes_read, row.bytes_written)


WHOLE = (
    module(TRITON_CALL, computations=TRITON),
    module(LOOP_CALL.replace("TRIPS", ', backend_config={"known_trip_count":{"n":"7"}}'), computations=LOOP),
)


@settings(deadline=None)
@given(st.sampled_from(WHOLE), st.integers(0), st.integers(0, 30), st.sampled_from(["", "(", "}", "%", '"', ",", "0"]))
def test_any_damage_is_one_line_or_harmless(whole: bytes, where: int, length: int, put: str) -> None:
    text = whole.decode()
    start = where % len(text)
    damaged = text[:start] + put + text[start + length :]
    said = ""
    try:
        lower(read(damaged.encode(), "step.txt"), Target())
    except StablecastError as error:
        said = str(error)
    assert "\n" not in said


@settings(deadline=None)
@given(st.sampled_from(WHOLE), st.integers(0))
def test_text_that_was_cut_off_is_refused(whole: bytes, where: int) -> None:
    with pytest.raises(InputError):
        read(whole.rstrip()[: where % (len(whole.rstrip()) - 1)], "step.txt")
