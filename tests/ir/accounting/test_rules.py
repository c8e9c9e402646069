"""The rules, op by op, on programs written as text."""

import pytest

from stablecast.ir.accounting import Conventions, account
from stablecast.ir.errors import InputError
from stablecast.ir.reader import read

M = "tensor<8x16xf32>"
C = "tensor<8x16xcomplex<f32>>"
SUM = """^bb0(%p: tensor<f32>, %q: tensor<f32>):
  %r = stablehlo.add %p, %q : tensor<f32>
  stablehlo.return %r : tensor<f32>"""
LESS = (
    "^bb0(%p: tensor<f32>, %q: tensor<f32>):\n %r = stablehlo.compare LT, %p, %q : (tensor<f32>, tensor<f32>) -> "
    "tensor<i1>\n stablehlo.return %r : tensor<i1>"
)
ZERO = "%z = stablehlo.constant dense<0.0> : tensor<f32>"

ONE_OP = {
    "abs": (f"stablehlo.abs %x : {M}", M, M, (0, 128, 0, 512, 512)),
    "sine": (f"stablehlo.sine %x : {M}", M, M, (0, 0, 128, 512, 512)),
    "erf": (f"chlo.erf %x : {M} -> {M}", M, M, (0, 0, 128, 512, 512)),
    "lgamma": (f"chlo.lgamma %x : {M} -> {M}", M, M, (0, 0, 128, 512, 512)),
    "mhlo erf": (f"mhlo.erf %x : {M}", M, M, (0, 0, 128, 512, 512)),
    "convert": (f"stablehlo.convert %x : ({M}) -> tensor<8x16xbf16>", M, "tensor<8x16xbf16>", (0, 0, 0, 512, 256)),
    "complex multiply": (f"stablehlo.multiply %x, %x : {C}", C, C, (0, 768, 0, 2048, 1024)),
    "complex add": (f"stablehlo.add %x, %x : {C}", C, C, (0, 256, 0, 2048, 1024)),
    "complex abs": (f"stablehlo.abs %x : ({C}) -> {M}", C, M, (0, 384, 128, 1024, 512)),
    "reshape": (f"stablehlo.reshape %x : ({M}) -> tensor<128xf32>", M, "tensor<128xf32>", (0, 0, 0, 0, 0)),
    "barrier": (f"stablehlo.optimization_barrier %x : {M}", M, M, (0, 0, 0, 0, 0)),
    "transpose": (
        f"stablehlo.transpose %x, dims = [1, 0] : ({M}) -> tensor<16x8xf32>",
        M,
        "tensor<16x8xf32>",
        (0, 0, 0, 512, 512),
    ),
    "slice": (
        f"stablehlo.slice %x [0:2, 0:16] : ({M}) -> tensor<2x16xf32>",
        M,
        "tensor<2x16xf32>",
        (0, 0, 0, 128, 128),
    ),
    "broadcast": (
        "stablehlo.broadcast_in_dim %x, dims = [1] : (tensor<16xf32>) -> tensor<8x16xf32>",
        "tensor<16xf32>",
        M,
        (0, 0, 0, 64, 512),
    ),
    "top_k": (
        f"chlo.top_k(%x, k = 4) : {M} -> (tensor<8x4xf32>, tensor<8x4xi32>)",
        M,
        "tensor<8x4xf32>",
        (0, 128 * 3, 0, 512, 256),
    ),
    "cholesky": ("stablehlo.cholesky %x, lower = true : tensor<2x6x6xf32>",)
    + ("tensor<2x6x6xf32>",) * 2
    + ((144, 0, 0, 288, 288),),
    "rfft": (
        "stablehlo.fft %x, type = RFFT, length = [8] : (tensor<3x8xf32>) -> tensor<3x5xcomplex<f32>>",
        "tensor<3x8xf32>",
        "tensor<3x5xcomplex<f32>>",
        (0, 3 * 2.5 * 8 * 3, 0, 96, 120),
    ),
}


@pytest.mark.parametrize("name", ONE_OP)
def test_one_op(account_text, name):
    op, operand, result, parts = ONE_OP[name]
    many = ":2" if "-> (" in op else ""
    first = "#0" if many else ""
    found = account_text(f"(%x: {operand}) -> {result}", f"%0{many} = {op}\nreturn %0{first} : {result}")
    assert found.work.parts == parts
    assert found.complete


def test_iota_writes_only(account_text):
    found = account_text(
        "() -> tensor<8x4xi32>", "%0 = stablehlo.iota dim = 0 : tensor<8x4xi32>\nreturn %0 : tensor<8x4xi32>"
    )
    assert found.work.parts == (0, 0, 0, 0, 128)


def test_reduce_needs_one_application_less_than_elements(account_text):
    body = f"""{ZERO}
      %0 = "stablehlo.reduce"(%x, %z) <{{dimensions = array<i64: 1>}}> ({{ {SUM} }})
        : ({M}, tensor<f32>) -> tensor<8xf32>
      return %0 : tensor<8xf32>"""
    assert account_text(f"(%x: {M}) -> tensor<8xf32>", body).work.parts == (0, 8 * 15, 0, 516, 32)


def test_reduce_body_on_integers_is_no_loop_control(account_text):
    body = """%z = stablehlo.constant dense<0> : tensor<i32>
      %0 = stablehlo.reduce(%x init: %z) applies stablehlo.maximum across dimensions = [0]
        : (tensor<100xi32>, tensor<i32>) -> tensor<i32>
      return %0 : tensor<i32>"""
    assert account_text("(%x: tensor<100xi32>) -> tensor<i32>", body).work.vector_flops == 99


def test_sort_counts_its_comparator(account_text):
    body = f"""%0 = "stablehlo.sort"(%x) <{{dimension = 1 : i64, is_stable = true}}> ({{ {LESS} }}) : ({M}) -> {M}
      return %0 : {M}"""
    assert account_text(f"(%x: {M}) -> {M}", body).work.parts == (0, 128 * 4, 0, 512, 512)


def test_map_counts_its_body(account_text):
    body = f"""%0 = "stablehlo.map"(%x, %x) <{{dimensions = array<i64: 0, 1>}}> ({{ {SUM} }}) : ({M}, {M}) -> {M}
      return %0 : {M}"""
    assert account_text(f"(%x: {M}) -> {M}", body).work.parts == (0, 128, 0, 1024, 512)


def pooling(window, strides, padding, operand, result):
    return f"""{ZERO}
      %0 = "stablehlo.reduce_window"(%x, %z) <{{window_dimensions = array<i64: {window}>,
        window_strides = array<i64: {strides}>, padding = dense<{padding}> : tensor<{len(padding)}x2xi64>}}>
        ({{ {SUM} }}) : ({operand}, tensor<f32>) -> {result}
      return %0 : {result}"""


def test_reduce_window_folds_each_window(account_text):
    body = pooling("2, 2", "2, 2", [[0, 0], [0, 0]], M, "tensor<4x8xf32>")
    assert account_text(f"(%x: {M}) -> tensor<4x8xf32>", body).work.parts == (0, 32 * 3, 0, 516, 128)


def test_a_running_sum_is_linear(account_text):
    body = pooling("1, 16", "1, 1", [[0, 0], [15, 0]], M, M)
    assert account_text(f"(%x: {M}) -> {M}", body).work.vector_flops == 128


def scatter(kind_of_update):
    body = SUM if kind_of_update == "add" else SUM.replace("return %r", "return %q")
    return f"""%0 = "stablehlo.scatter"(%x, %i, %u) <{{scatter_dimension_numbers = #stablehlo.scatter<
        update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0],
        index_vector_dim = 1>}}>
        ({{ {body} }}) : ({M}, tensor<3x1xi32>, tensor<3x16xf32>) -> {M}
      return %0 : {M}"""


@pytest.mark.parametrize(("kind_of_update", "flops", "old"), [("add", 48, 192), ("set", 48, 0)])
def test_scatter_touches_its_rows(account_text, kind_of_update, flops, old):
    arguments = "%i: tensor<3x1xi32>, %u: tensor<3x16xf32>"
    donated = f"(%x: {M} {{tf.aliasing_output = 0 : i32}}, {arguments}) -> {M}"
    work = account_text(donated, scatter(kind_of_update)).work
    assert work.parts == (0, flops, 0, old + 12 + 192, 192)
    kept = account_text(f"(%x: {M}, {arguments}) -> {M}", scatter(kind_of_update)).work
    assert kept.nbytes == work.nbytes + 2 * 512


UPDATE = f"""%c = stablehlo.constant dense<0> : tensor<i32>
   %0 = stablehlo.dynamic_update_slice %y, %u, %c, %c : ({M}, tensor<1x16xf32>, tensor<i32>, tensor<i32>) -> {M}"""


def test_an_update_of_a_value_that_is_needed_later_copies_it(account_text):
    used = f"%y = stablehlo.negate %x : {M}\n{UPDATE}\n%1 = stablehlo.add %0, %y : {M}\nreturn %1 : {M}"
    dead = used.replace("%0, %y", "%0, %0")
    signature = f"(%x: {M}, %u: tensor<1x16xf32>) -> {M}"
    assert account_text(signature, used).work.nbytes == account_text(signature, dead).work.nbytes + 2 * 512


def test_an_update_inside_a_function_reuses_what_the_caller_gives_away(account_text):
    rest = f"""func.func private @set(%y: {M}, %u: tensor<1x16xf32>) -> {M} {{
      {UPDATE}
      return %0 : {M} }}"""
    signature = f"(%x: {M}, %u: tensor<1x16xf32>) -> {M}"
    body = f"""%y = stablehlo.negate %x : {M}
      %1 = func.call @set(%y, %u) : ({M}, tensor<1x16xf32>) -> {M}
      %2 = stablehlo.add %1, %OTHER : {M}
      return %2 : {M}"""
    given = account_text(signature, body.replace("%OTHER", "%1"), rest=rest).work
    kept = account_text(signature, body.replace("%OTHER", "%y"), rest=rest).work
    assert given.nbytes == 2 * 512 + 128 + 8 + 3 * 512
    assert kept.nbytes == given.nbytes + 2 * 512


def test_a_loop_updates_what_it_carries_in_place(account_text):
    body = f"""%zero = stablehlo.constant dense<0> : tensor<i32>
      %w:2 = stablehlo.while(%i = %zero, %y = %x) : tensor<i32>, {M}
      cond {{
        %n = stablehlo.constant dense<8> : tensor<i32>
        %go = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %go : tensor<i1>
      }} do {{
        %one = stablehlo.constant dense<1> : tensor<i32>
        %next = stablehlo.add %i, %one : tensor<i32>
        {UPDATE}
        stablehlo.return %next, %0 : tensor<i32>, {M}
      }}
      return %w#1 : {M}"""
    assert account_text(f"(%x: {M}, %u: tensor<1x16xf32>) -> {M}", body).work.nbytes == 8 * (2 * 64 + 8)


def test_a_tensor_condition_is_evaluated_once_more_than_the_body(account_text):
    body = f"""%zero = stablehlo.constant dense<0> : tensor<i32>
      %w:2 = stablehlo.while(%i = %zero, %y = %x) : tensor<i32>, {M}
      cond {{
        %unused = stablehlo.exponential %y : {M}
        %n = stablehlo.constant dense<5> : tensor<i32>
        %go = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %go : tensor<i1>
      }} do {{
        %one = stablehlo.constant dense<1> : tensor<i32>
        %next = stablehlo.add %i, %one : tensor<i32>
        stablehlo.return %next, %y : tensor<i32>, {M}
      }}
      return %w#1 : {M}"""
    assert account_text(f"(%x: {M}) -> {M}", body).work.transcendentals == 6 * 128


def test_branches_choose_flops_and_bytes_apart(account_text):
    """One branch computes more, the other moves more."""
    body = """%0 = "stablehlo.if"(%p) ({
        %1 = stablehlo.exponential %x : tensor<1000xf32>
        %2 = stablehlo.exponential %1 : tensor<1000xf32>
        stablehlo.return %2 : tensor<1000xf32>
      }, {
        %3 = stablehlo.concatenate %x, %x, %x, %x, %x, dim = 0 : (tensor<1000xf32>, tensor<1000xf32>, tensor<1000xf32>,
          tensor<1000xf32>, tensor<1000xf32>) -> tensor<5000xf32>
        %4 = stablehlo.slice %3 [0:1000] : (tensor<5000xf32>) -> tensor<1000xf32>
        stablehlo.return %4 : tensor<1000xf32>
      }) : (tensor<i1>) -> tensor<1000xf32>
      return %0 : tensor<1000xf32>"""
    signature = "(%p: tensor<i1>, %x: tensor<1000xf32>) -> tensor<1000xf32>"
    found = account_text(signature, body)
    assert (found.high.flops, found.high.nbytes) == (2000, 48_000)
    assert (found.low.flops, found.low.nbytes) == (0, 16_000)
    assert account_text(signature, body, Conventions(branch=0.25)).work.parts == (
        0,
        0,
        500,
        0.25 * 8e3 + 0.75 * 24e3,
        0.25 * 8e3 + 0.75 * 24e3,
    )


def test_case_with_three_branches(account_text):
    def branch(count):
        ops = [f"%b{count}{i} = stablehlo.sine %x : {M}" for i in range(count)]
        last = f"%b{count}{count - 1}" if count else "%x"
        return "{" + "\n".join([*ops, f"stablehlo.return {last} : {M}"]) + "}"

    body = f"""%0 = "stablehlo.case"(%i) ({branch(0)}, {branch(1)}, {branch(3)}) : (tensor<i32>) -> {M}
      return %0 : {M}"""
    signature = f"(%i: tensor<i32>, %x: {M}) -> {M}"
    found = account_text(signature, body)
    assert (found.low.flops, found.high.flops) == (0, 384)
    assert account_text(signature, body, Conventions(branch=0.5)).work.flops == 192


def test_fusion_counts_its_boundary(account_text):
    body = f"""%0 = "mhlo.fusion"(%x, %x) ({{
        ^bb0(%a: {M}, %b: {M}):
        %1 = stablehlo.add %a, %b : {M}
        %2 = stablehlo.exponential %1 : {M}
        mhlo.return %2 : {M}
      }}) {{fusion_kind = #mhlo<fusion_kind kLoop>}} : ({M}, {M}) -> {M}
      return %0 : {M}"""
    assert account_text(f"(%x: {M}) -> {M}", body).work.parts == (0, 128, 128, 1024, 512)


def test_fused_slices_and_updates_touch_what_they_use(account_text):
    body = f"""%0 = "mhlo.fusion"(%x, %x) ({{
        ^bb0(%a: {M}, %b: {M}):
        %c = stablehlo.constant dense<0> : tensor<i32>
        %1 = stablehlo.dynamic_slice %a, %c, %c, sizes = [1, 16] : ({M}, tensor<i32>, tensor<i32>) -> tensor<1x16xf32>
        %2 = stablehlo.dynamic_update_slice %b, %1, %c, %c : ({M}, tensor<1x16xf32>, tensor<i32>, tensor<i32>) -> {M}
        mhlo.return %2 : {M}
      }}) {{fusion_kind = #mhlo<fusion_kind kLoop>}} : ({M}, {M}) -> {M}
      return %0 : {M}"""
    assert account_text(f"(%x: {M}) -> {M}", body).work.parts == (0, 0, 0, 64, 64)


def test_composite_counts_its_decomposition(account_text):
    rest = f"func.func private @impl(%x: {M}) -> {M} {{ %0 = stablehlo.sine %x : {M}\n return %0 : {M} }}"
    body = f"""%0 = stablehlo.composite "my.sine" %x {{decomposition = @impl}} : ({M}) -> {M}
      return %0 : {M}"""
    assert account_text(f"(%x: {M}) -> {M}", body, rest=rest).work.transcendentals == 128


def test_collectives_move_bytes_and_sum_on_the_network(account_text):
    body = f"""%0 = "stablehlo.all_reduce"(%x) <{{replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}}> ({{ {SUM} }})
        : ({M}) -> {M}
      return %0 : {M}"""
    assert account_text(f"(%x: {M}) -> {M}", body).work.parts == (0, 0, 0, 512, 512)


def test_an_op_without_a_rule_is_opaque():
    text = f"""func.func @main(%x: {M}) -> {M} {{
      %0 = tensor.cast %x : {M} to tensor<?x16xf32>
      %1 = tensor.cast %0 : tensor<?x16xf32> to {M}
      return %1 : {M} }}"""
    with pytest.raises(InputError, match="dynamic shape"):
        account(read(text.encode()))
    text = f"""func.func @main(%x: {M}) -> {M} {{
      %0 = math.cbrt %x : {M}
      return %0 : {M} }}"""
    found = account(read(text.encode()))
    (item,) = found.unmodelled
    assert (item.op, item.nbytes, item.share) == ("math.cbrt", 1024, 1.0)
    assert not found.complete


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("padding", "maybe"),
        ("causal", "half"),
        ("branch", "mean"),
        ("branch", 1.5),
        ("loops", {"n": -1}),
        ("dims", {"b": 0}),
    ],
)
def test_conventions_are_checked(field, value):
    with pytest.raises(InputError):
        Conventions(**{field: value})


def test_an_account_prints_itself(account_text):
    m = "tensor<8x16xf32>"
    body = f"%0 = stablehlo.custom_call @mine(%x) : ({m}) -> {m}\nreturn %0 : {m}"
    text = repr(account_text(f"(%x: {m}) -> {m}", body))
    assert "padding in, causal full, branch max" in text
    assert "not modelled: stablehlo.custom_call @mine, 1 times, 100.0% of the bytes" in text


def test_the_work_object_names_its_conventions(account_text):
    found = account_text(
        f"(%x: {M}) -> {M}", f"%0 = stablehlo.sine %x : {M}\nreturn %0 : {M}", Conventions(padding="out")
    )
    result = found.to_dict()
    assert result["transcendentals"] == 128
    assert isinstance(result["bytes_read"], int)
    assert result["conventions"]["padding"] == "out"
    assert result["complete"]
    assert result["unmodelled"] == []
