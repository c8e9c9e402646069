"""Laws that hold for every program: layouts do not matter, work adds up, loops multiply, sizes only make more."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stablecast.ir.accounting import account
from stablecast.ir.accounting.rules_window import Window, valid_pairs
from stablecast.ir.reader import read
from stablecast.ir.work import Work

SIZES = st.integers(1, 9)
STEPS = ("add", "exponential", "tanh", "select", "convert", "transpose", "dot", "sum", "scale", "concatenate", "pad")


def kind(shape: Sequence[int], element: str = "f32") -> str:
    return f"tensor<{'x'.join([*map(str, shape), element])}>"


@dataclass
class Chain:
    """Text of ops, each on the result of the one before, a rank-2 tensor."""

    shape: tuple[int, int]
    value: str = "%x"
    prefix: str = "%v"
    lines: list[str] = field(default_factory=list)

    def emit(self, text: str) -> str:
        name = f"{self.prefix}{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    def step(self, name: str, width: int) -> None:
        m, n = self.shape
        x, here = self.value, kind(self.shape)
        if name in ("exponential", "tanh"):
            self.value = self.emit(f"stablehlo.{name} {x} : {here}")
        elif name == "add":
            self.value = self.emit(f"stablehlo.add {x}, {x} : {here}")
        elif name == "select":
            flags = kind(self.shape, "i1")
            flag = self.emit(f"stablehlo.compare GT, {x}, {x} : ({here}, {here}) -> {flags}")
            self.value = self.emit(f"stablehlo.select {flag}, {x}, {x} : {flags}, {here}")
        elif name == "convert":
            low = kind(self.shape, "bf16")
            small = self.emit(f"stablehlo.convert {x} : ({here}) -> {low}")
            self.value = self.emit(f"stablehlo.convert {small} : ({low}) -> {here}")
        elif name == "transpose":
            self.shape = (n, m)
            self.value = self.emit(f"stablehlo.transpose {x}, dims = [1, 0] : ({here}) -> {kind(self.shape)}")
        elif name == "dot":
            self.shape = (m, width)
            weights = kind((n, width))
            w = self.emit(f"stablehlo.iota dim = 0 : {weights}")
            types = f"({here}, {weights}) -> {kind(self.shape)}"
            self.value = self.emit(f"stablehlo.dot_general {x}, {w}, contracting_dims = [1] x [0] : {types}")
        elif name == "concatenate":
            self.shape = (2 * m, n)
            types = f"({here}, {here}) -> {kind(self.shape)}"
            self.value = self.emit(f"stablehlo.concatenate {x}, {x}, dim = 0 : {types}")
        else:
            self.with_scalar(name)

    def with_scalar(self, name: str) -> None:
        m, n = self.shape
        x, here = self.value, kind(self.shape)
        scalar = self.emit("stablehlo.constant dense<0.0> : tensor<f32>")
        if name == "pad":
            self.shape = (m + 2, n)
            types = f"({here}, tensor<f32>) -> {kind(self.shape)}"
            edges = "low = [1, 0], high = [1, 0], interior = [0, 0]"
            self.value = self.emit(f"stablehlo.pad {x}, {scalar}, {edges} : {types}")
            return
        if name == "sum":
            types = f"({here}, tensor<f32>) -> tensor<f32>"
            scalar = self.emit(
                f"stablehlo.reduce({x} init: {scalar}) applies stablehlo.add across dimensions = [0, 1] : {types}"
            )
        wide = self.emit(f"stablehlo.broadcast_in_dim {scalar}, dims = [] : (tensor<f32>) -> {here}")
        self.value = self.emit(f"stablehlo.multiply {x}, {wide} : {here}")


def chain(steps: Sequence[tuple[str, int]], shape: tuple[int, int], value: str = "%x", prefix: str = "%v") -> Chain:
    made = Chain(shape, value, prefix)
    for name, width in steps:
        made.step(name, width)
    return made


def work_of_lines(lines: Sequence[str], shape: tuple[int, int], value: str, out: tuple[int, int]) -> Work:
    body = "\n".join(lines)
    text = f"func.func @main(%x: {kind(shape)}) -> {kind(out)} {{\n{body}\nreturn {value} : {kind(out)}\n}}"
    found = account(read(text.encode()))
    assert found.complete
    return found.work


def work_of_chain(made: Chain, shape: tuple[int, int]) -> Work:
    return work_of_lines(made.lines, shape, made.value, made.shape)


programs = st.lists(st.tuples(st.sampled_from(STEPS), SIZES), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(programs, programs, SIZES, SIZES)
def test_work_adds_over_concatenation(first, second, m, n):
    head = chain(first, (m, n))
    tail = chain(second, head.shape)
    both = chain(second, head.shape, head.value, "%w")
    whole = work_of_lines([*head.lines, *both.lines], (m, n), both.value, both.shape)
    parts = work_of_chain(head, (m, n)) + work_of_chain(tail, head.shape)
    assert whole == parts


@settings(deadline=None, max_examples=60)
@given(programs, SIZES, SIZES, st.integers(0, 7))
def test_a_loop_is_n_times_its_body(steps, m, n, trips):
    made = chain(steps, (m, n))
    assume(made.shape == (m, n))
    here = kind((m, n))
    body = chain(steps, (m, n), "%c")
    lines = [
        "%zero = stablehlo.constant dense<0> : tensor<i32>",
        f"%loop:2 = stablehlo.while(%i = %zero, %c = %x) : tensor<i32>, {here}",
        "cond {",
        f"%n = stablehlo.constant dense<{trips}> : tensor<i32>",
        "%go = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>",
        "stablehlo.return %go : tensor<i1>",
        "} do {",
        "%one = stablehlo.constant dense<1> : tensor<i32>",
        "%next = stablehlo.add %i, %one : tensor<i32>",
        *body.lines,
        f"stablehlo.return %next, {body.value} : tensor<i32>, {here}",
        "}",
    ]
    assert work_of_lines(lines, (m, n), "%loop#1", (m, n)) == work_of_chain(made, (m, n)) * trips


@settings(deadline=None, max_examples=60)
@given(programs, SIZES, SIZES, st.sampled_from([(1, 0), (0, 1)]))
def test_work_grows_with_each_size(steps, m, n, more):
    small = work_of_chain(chain(steps, (m, n)), (m, n))
    wider = (m + more[0], n + more[1])
    large = work_of_chain(chain(steps, wider), wider)
    assert all(a <= b for a, b in zip(small.parts, large.parts, strict=True))


@settings(deadline=None, max_examples=60)
@given(programs, SIZES, SIZES)
def test_bytes_are_at_least_compulsory(steps, m, n):
    made = chain(steps, (m, n))
    work = work_of_chain(made, (m, n))
    assert work.bytes_read >= 4 * m * n
    assert work.bytes_written >= 4 * made.shape[0] * made.shape[1]
    assert min(work.parts) >= 0


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_products_do_not_depend_on_the_order_of_dimensions(data):
    """Batch, row, column and contracted dimensions in any order: 2 x the product of all sizes."""
    sizes = {label: data.draw(SIZES) for label in "abmnkl"}
    left = data.draw(st.permutations("abmkl"))
    right = data.draw(st.permutations("abnkl"))
    batch, contracted = data.draw(st.permutations("ab")), data.draw(st.permutations("kl"))
    shapes = [[sizes[label] for label in labels] for labels in (left, right, [*batch, "m", "n"])]
    dims = [[[labels.index(label) for label in group] for labels in (left, right)] for group in (batch, contracted)]
    (batch_left, batch_right), (contracted_left, contracted_right) = dims
    text = f"""func.func @main(%a: {kind(shapes[0])}, %b: {kind(shapes[1])}) -> {kind(shapes[2])} {{
      %0 = stablehlo.dot_general %a, %b, batching_dims = {batch_left} x {batch_right},
        contracting_dims = {contracted_left} x {contracted_right}
        : ({kind(shapes[0])}, {kind(shapes[1])}) -> {kind(shapes[2])}
      return %0 : {kind(shapes[2])} }}"""
    work = account(read(text.encode())).work
    assert work.matmul_flops == 2 * np.prod(list(sizes.values()))
    assert work.nbytes == 4 * sum(int(np.prod(shape)) for shape in shapes)


def brute_force(w: Window) -> int:
    """Counts the pairs one by one."""
    return sum(
        0 <= position <= (w.size - 1) * w.lhs_dilation and position % w.lhs_dilation == 0
        for output in range(w.outputs)
        for tap in range(w.window)
        for position in [output * w.stride + tap * w.rhs_dilation - w.low]
    )


@settings(deadline=None, max_examples=300)
@given(
    st.builds(
        Window,
        size=st.integers(1, 12),
        window=st.integers(1, 6),
        outputs=st.integers(1, 14),
        stride=st.integers(1, 5),
        low=st.integers(-4, 6),
        lhs_dilation=st.integers(1, 5),
        rhs_dilation=st.integers(1, 4),
    )
)
def test_window_positions_are_counted_exactly(window):
    assert valid_pairs(window) == brute_force(window)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_convolutions_do_not_depend_on_their_layout(data):
    batch, channels, features = (data.draw(st.integers(1, 4)) for _ in range(3))
    size, window = data.draw(st.integers(3, 8)), data.draw(st.integers(1, 3))
    stride = data.draw(st.integers(1, 2))
    outputs = (size - window) // stride + 1
    places = {"b": batch, "f": channels, "0": size, "i": channels, "o": features, "1": window, "c": features}
    x, w = data.draw(st.permutations("bf0")), data.draw(st.permutations("io1"))
    y = data.draw(st.permutations("bf0"))
    x_shape = [places[label] for label in x]
    w_shape = [places[label] for label in w]
    y_shape = [{"b": batch, "f": features, "0": outputs}[label] for label in y]
    labels = f"[{', '.join(x)}]x[{', '.join(w).replace('1', '0')}]->[{', '.join(y)}]"
    text = f"""func.func @main(%x: {kind(x_shape)}, %w: {kind(w_shape)}) -> {kind(y_shape)} {{
      %0 = stablehlo.convolution(%x, %w) dim_numbers = {labels}, window = {{stride = [{stride}]}}
        {{batch_group_count = 1 : i64, feature_group_count = 1 : i64}}
        : ({kind(x_shape)}, {kind(w_shape)}) -> {kind(y_shape)}
      return %0 : {kind(y_shape)} }}"""
    found = account(read(text.encode()))
    assert found.work.matmul_flops == 2 * batch * outputs * features * channels * window
    assert found.padded_flops == 0


@pytest.mark.parametrize("steps", [[("add", 1)], [("dot", 3)], [("sum", 1)]])
def test_empty_tensors_cost_nothing_but_are_no_error(steps):
    made = chain(steps, (0, 4))
    work = work_of_chain(made, (0, 4))
    assert work.matmul_flops == 0
    assert min(work.parts) >= 0
