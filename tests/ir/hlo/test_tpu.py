"""Scheduled HLO text of TPU compilers, written by hand: products as convolutions, memory on chip, collectives in fusions."""

from __future__ import annotations

import pytest

from stablecast.ir.device_program import COPY_STREAM, Collective, DeviceProgram, Kernel
from stablecast.ir.kernels import KernelRow
from stablecast.ir.reader import read
from stablecast.lowering.device import lower
from stablecast.lowering.products import TPU_ARITHMETIC
from stablecast.lowering.target import Target

HEADER = "HloModule jit_step, is_scheduled=true, entry_computation_layout={()->f32[]}, num_partitions=4"
ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  %y = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%x, %y)
}
"""
T = ":T(8,128)(2,1)"
NEAR = T + "S(1)"


def lowered(body: str, computations: str = "") -> DeviceProgram:
    text = f"{HEADER}\n{ADD}{computations}\nENTRY %main (a: f32[]) -> f32[] {{\n{body}\n}}\n"
    found = read(text.encode(), "step.txt")
    assert found.platform == "tpu"
    return lower(found, Target("tpu", TPU_ARITHMETIC))


def rows(made: DeviceProgram) -> list[KernelRow]:
    return [made.table.rows[node.row] for node in made.body if isinstance(node, Kernel)]


@pytest.mark.parametrize(
    ("shapes", "attributes", "sizes"),
    [
        (("64,128", "128,32", "64,32"), "dim_labels=bf_io->bf", (1, 64, 32, 128)),
        (("128,64", "32,128", "64,32"), "dim_labels=fb_oi->bf", (1, 64, 32, 128)),
        # 8 pairs of matrices: the batch as a spatial dimension, in either spelling
        (
            ("8,64,16", "8,16,32", "8,64,32"),
            "window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf",
            (8, 64, 32, 16),
        ),
        (
            ("8,64,16", "8,32,16", "8,32,64"),
            "window={size=8 stride=8 pad=7_7 lhs_dilate=7 rhs_reversal=1}, dim_labels=0bf_0oi->0fb",
            (8, 64, 32, 16),
        ),
        # a sum over two dimensions: 4 heads of 16
        (("64,4,16", "32,4,16", "64,32,1"), "window={size=4}, dim_labels=b0f_o0i->bf0", (1, 64, 32, 4 * 16)),
        # a free dimension on the right, and one on the left
        (
            ("64,16,1", "16,4,32", "64,4,32"),
            "window={size=4 pad=3_3 rhs_reversal=1}, dim_labels=bf0_i0o->b0f",
            (1, 64, 4 * 32, 16),
        ),
        (("16,4,64", "16,32,1", "4,64,32"), "window={size=1}, dim_labels=f0b_io0->0bf", (1, 4 * 64, 32, 16)),
    ],
)
def test_products_written_as_convolutions(
    shapes: tuple[str, str, str], attributes: str, sizes: tuple[int, int, int, int]
) -> None:
    a, b, c = (f"bf16[{shape}]{{{','.join(map(str, range(shape.count(',') + 1)))}{T}}}" for shape in shapes)
    body = f"""  %a = {a} parameter(0)
  %b = {b} parameter(1)
  ROOT %c = {c} convolution(%a, %b), {attributes}"""
    (row,) = rows(lowered(body))
    batch, m, n, k = sizes
    assert (row.klass, row.math) == ("matmul", "bf16")
    assert (row.batch, row.m, row.n, row.k) == sizes
    assert row.matmul_flops == 2 * batch * m * n * k


@pytest.mark.parametrize(
    "window",
    ["window={size=3 pad=1_1}", "window={size=3 stride=2 pad=1_1}", "window={size=16 stride=1 pad=15_0}"],
)
def test_a_window_that_slides_stays_a_convolution(window: str) -> None:
    size = 3 if "size=3" in window else 16
    out = 8 if "stride=2" in window else 16
    body = f"""  %a = bf16[2,16,4]{{2,1,0{T}}} parameter(0)
  %b = bf16[{size},4,8]{{2,1,0{T}}} parameter(1)
  ROOT %c = bf16[2,{out},8]{{2,1,0{T}}} convolution(%a, %b), {window}, dim_labels=b0f_0io->b0f"""
    (row,) = rows(lowered(body))
    assert row.klass == "convolution"


FUSED = f"""
%fused (p: f32[256,128], q: f32[128,64]) -> f32[256,64] {{
  %p = f32[256,128]{{1,0{NEAR}}} parameter(0)
  %q = f32[128,64]{{1,0{T}}} parameter(1)
  %c = f32[256,64]{{1,0{T}}} convolution(%p, %q), dim_labels=bf_io->bf
  ROOT %n = f32[256,64]{{1,0{NEAR}}} negate(%c)
}}
"""


def test_what_lies_on_chip_is_not_moved_and_copies_run_beside() -> None:
    body = f"""  %w = f32[256,128]{{1,0{T}}} parameter(0)
  %b = f32[128,64]{{1,0{T}}} parameter(1)
  %slice-start = ((f32[256,128]{{1,0{T}}}), f32[128,128]{{1,0{NEAR}}}, s32[]{{:S(2)}}) slice-start(%w), slice={{[0:128], [0:128]}}
  %slice-start.1 = ((f32[256,128]{{1,0{T}}}), f32[128,128]{{1,0{NEAR}}}, s32[]{{:S(2)}}) slice-start(%w), slice={{[128:256], [0:128]}}
  %slice-done = f32[128,128]{{1,0{NEAR}}} slice-done(%slice-start)
  %slice-done.1 = f32[128,128]{{1,0{NEAR}}} slice-done(%slice-start.1)
  %whole = f32[256,128]{{1,0{NEAR}}} custom-call(%slice-done, %slice-done.1), custom_call_target="ConcatBitcast"
  %f = f32[256,64]{{1,0{NEAR}}} fusion(%whole, %b), kind=kOutput, calls=%fused
  %copy-start = (f32[256,64]{{1,0{T}}}, f32[256,64]{{1,0{NEAR}}}, u32[]{{:S(2)}}) copy-start(%f)
  ROOT %copy-done = f32[256,64]{{1,0{T}}} copy-done(%copy-start)"""
    made = lowered(body, FUSED)
    first, second, whole, product, back = rows(made)
    assert made.complete
    assert (first.bytes_read, first.bytes_written, first.launches) == (4 * 128 * 128, 0, 0)
    assert (second.bytes_read, second.launches) == (4 * 128 * 128, 0)
    assert (whole.bytes_read, whole.bytes_written, whole.launches) == (0, 0, 0)
    assert (product.klass, product.math, product.bytes_read, product.bytes_written) == (
        "matmul",
        "bf16",
        4 * 128 * 64,
        0,
    )
    assert (back.bytes_read, back.bytes_written, back.launches) == (0, 4 * 256 * 64, 0)
    streams = [node.stream for node in made.body if isinstance(node, Kernel)]
    assert streams == [COPY_STREAM, COPY_STREAM, 0, 0, COPY_STREAM]
    assert made.buffers is not None
    assert made.buffers.temp_bytes == 0


def test_the_same_kernel_near_and_far_are_two_rows() -> None:
    body = """  %a = f32[64]{0:T(128)} parameter(0)
  %b = f32[64]{0:T(128)} negate(%a)
  %c = f32[64]{0:T(128)S(1)} negate(%b)
  ROOT %d = f32[64]{0:T(128)} negate(%c)"""
    assert [(row.bytes_read, row.bytes_written) for row in rows(lowered(body))] == [(256, 256), (256, 0), (0, 256)]


def test_scalars_launch_nothing() -> None:
    body = """  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)S(6)} multiply(%a, %a)
  ROOT %c = f32[]{:T(128)} negate(%b)"""
    assert [row.launches for row in rows(lowered(body))] == [0, 0]


GATHER = 'channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}, use_global_device_ids=true, frontend_attributes={chain_id="0"}'
STATE = "s32[2]{0:S(4)}, u32[]{:S(2)}"
ASYNC = f"""
%starts (p: bf16[64,32]) -> (bf16[64,32], bf16[256,32], s32[2], u32[]) {{
  %p = bf16[64,32]{{1,0{T}}} parameter(0)
  %gather.1 = bf16[256,32]{{1,0{T}}} all-gather(%p), {GATHER}
  ROOT %s = (bf16[64,32]{{1,0{T}}}, bf16[256,32]{{1,0{T}}}, {STATE}) custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}}

%drives (q0: bf16[64,32], q1: bf16[256,32], q2: s32[2], q3: u32[], q4: bf16[128,128]) -> (bf16[128,128], bf16[64,32], bf16[256,32], s32[2], u32[]) {{
  %q4 = bf16[128,128]{{1,0{T}}} parameter(4)
  %own = bf16[128,128]{{1,0{T}}} convolution(%q4, %q4), dim_labels=bf_io->bf
  %q0 = bf16[64,32]{{1,0{T}}} parameter(0)
  %q1 = bf16[256,32]{{1,0{T}}} parameter(1)
  %gather.2 = bf16[256,32]{{1,0{T}}} all-gather(%q0), {GATHER}
  %q2 = s32[2]{{0:S(4)}} parameter(2)
  %q3 = u32[]{{:S(2)}} parameter(3)
  ROOT %t = (bf16[128,128]{{1,0{T}}}, bf16[64,32]{{1,0{T}}}, bf16[256,32]{{1,0{T}}}, {STATE}) tuple(%own, %q0, %gather.2, %q2, %q3)
}}

%ends (r0: bf16[64,32], r1: bf16[256,32], r2: s32[2], r3: u32[]) -> bf16[256,32] {{
  %r0 = bf16[64,32]{{1,0{T}}} parameter(0)
  %r1 = bf16[256,32]{{1,0{T}}} parameter(1)
  %r2 = s32[2]{{0:S(4)}} parameter(2)
  %r3 = u32[]{{:S(2)}} parameter(3)
  %gather.3 = bf16[256,32]{{1,0{T}}} all-gather(%r0), {GATHER}
  ROOT %done = bf16[256,32]{{1,0{T}}} custom-call(%r0, %r1, %gather.3, %r2, %r3), custom_call_target="AsyncCollectiveDone"
}}
"""


def test_a_collective_driven_on_by_fusions_of_other_work() -> None:
    state = f"(bf16[64,32]{{1,0{T}}}, bf16[256,32]{{1,0{T}}}, {STATE})"
    body = f"""  %a = bf16[64,32]{{1,0{T}}} parameter(0)
  %b = bf16[128,128]{{1,0{T}}} parameter(1)
  %start = {state} fusion(%a), kind=kCustom, calls=%starts
  %g0 = bf16[64,32]{{1,0{T}}} get-tuple-element(%start), index=0
  %g1 = bf16[256,32]{{1,0{T}}} get-tuple-element(%start), index=1
  %g2 = s32[2]{{0:S(4)}} get-tuple-element(%start), index=2
  %g3 = u32[]{{:S(2)}} get-tuple-element(%start), index=3
  %drive = (bf16[128,128]{{1,0{T}}}, bf16[64,32]{{1,0{T}}}, bf16[256,32]{{1,0{T}}}, {STATE}) fusion(%g0, %g1, %g2, %g3, %b), kind=kOutput, calls=%drives
  %h = bf16[128,128]{{1,0{T}}} get-tuple-element(%drive), index=0
  %h0 = bf16[64,32]{{1,0{T}}} get-tuple-element(%drive), index=1
  %h1 = bf16[256,32]{{1,0{T}}} get-tuple-element(%drive), index=2
  %h2 = s32[2]{{0:S(4)}} get-tuple-element(%drive), index=3
  %h3 = u32[]{{:S(2)}} get-tuple-element(%drive), index=4
  %end = bf16[256,32]{{1,0{T}}} fusion(%h0, %h1, %h2, %h3), kind=kCustom, calls=%ends
  %n = bf16[256,32]{{1,0{T}}} negate(%end)
  ROOT %t = (bf16[128,128]{{1,0{T}}}, bf16[256,32]{{1,0{T}}}) tuple(%h, %n)"""
    made = lowered(body, ASYNC)
    gather, product, negate = made.body
    assert isinstance(gather, Collective)
    assert (gather.kind, gather.asynchronous, gather.result_bytes) == ("all_gather", True, 2 * 256 * 32)
    assert (product.deps, negate.deps) == ((), (0,))
    own, _ = rows(made)
    assert (own.klass, own.bytes_read, own.bytes_written) == ("matmul", 2 * 128 * 128, 2 * 128 * 128)


def test_a_reduce_scatter_as_a_fusion_and_a_call_on_another_core() -> None:
    computations = f"""
%all-reduce-scatter (i0: f32[64,32], i1: f32[16]) -> (f32[16,32], f32[4]) {{
  %i0 = f32[64,32]{{1,0{T}}} parameter(0)
  %i1 = f32[16]{{0:T(128)}} parameter(1)
  %ar = (f32[64,32]{{1,0{T}}}, f32[16]{{0:T(128)}}) all-reduce(%i0, %i1), channel_id=3, replica_groups=[1,4]<=[4], use_global_device_ids=true, to_apply=%add
  %g0 = f32[64,32]{{1,0{T}}} get-tuple-element(%ar), index=0
  %g1 = f32[16]{{0:T(128)}} get-tuple-element(%ar), index=1
  %z = u32[] constant(0)
  %d0 = f32[16,32]{{1,0{T}}} dynamic-slice(%g0, %z, %z), dynamic_slice_sizes={{16,32}}
  %d1 = f32[4]{{0:T(128)}} dynamic-slice(%g1, %z), dynamic_slice_sizes={{4}}
  ROOT %t = (f32[16,32]{{1,0{T}}}, f32[4]{{0:T(128)}}) tuple(%d0, %d1)
}}

%called (p: f32[16,32], token: token[]) -> f32[64,32] {{
  %p = f32[16,32]{{1,0{T}}} parameter(0)
  %token = token[] parameter(1)
  ROOT %ag = f32[64,32]{{1,0{T}}} all-gather(%p), channel_id=4, replica_groups=[1,4]<=[4], dimensions={{0}}, use_global_device_ids=true
}}, execution_thread="sparsecore"
"""
    body = f"""  %a = f32[64,32]{{1,0{T}}} parameter(0)
  %b = f32[16]{{0:T(128)}} parameter(1)
  %rs = (f32[16,32]{{1,0{T}}}, f32[4]{{0:T(128)}}) fusion(%a, %b), kind=kCustom, calls=%all-reduce-scatter
  %part = f32[16,32]{{1,0{T}}} get-tuple-element(%rs), index=0
  %ready = s32[]{{:S(2)}} custom-call(), custom_call_target="PrepareAsyncCallStart"
  %token = token[] custom-call(%ready), custom_call_target="PrepareAsyncCallDone"
  %call-start = ((f32[16,32]{{1,0{T}}}, token[]), f32[64,32]{{1,0{T}}}) call-start(%part, %token), async_execution_thread="sparsecore", to_apply=%called
  ROOT %call-done = f32[64,32]{{1,0{T}}} call-done(%call-start)"""
    made = lowered(body, computations)
    scatter, gather = made.body
    assert made.complete
    assert isinstance(scatter, Collective)
    assert isinstance(gather, Collective)
    assert (scatter.kind, scatter.reduce_op, scatter.merged) == ("reduce_scatter", "add", 2)
    assert (scatter.operand_bytes, scatter.result_bytes) == (4 * (64 * 32 + 16), 4 * (16 * 32 + 4))
    assert (scatter.asynchronous, gather.asynchronous, gather.deps) == (False, True, (0,))
