"""Element types, tensor types and the cost algebra."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablecast.ir.dtypes import DTYPES, dtype
from stablecast.ir.errors import InputError
from stablecast.ir.types import DYNAMIC, Symbol, TensorType, TupleType
from stablecast.ir.work import SymbolicWork, Work


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("bf16", "bf16"),
        ("s32", "i32"),
        ("u8", "ui8"),
        ("pred", "i1"),
        ("int4", "i4"),
        ("uint16", "ui16"),
        ("float8_e4m3fn", "f8e4m3fn"),
        ("complex64", "c64"),
        ("F32", "f32"),
    ],
)
def test_every_spelling_of_an_element_type(spelling: str, name: str) -> None:
    assert dtype(spelling).name == name


def test_unknown_element_type_names_near_ones() -> None:
    with pytest.raises(InputError, match="unknown element type 'bf61'; did you mean"):
        dtype("bf61")


@pytest.mark.parametrize(("name", "nbytes"), [("i4", 524_288), ("i1", 1_048_576), ("i2", 262_144), ("c64", 8_388_608)])
def test_bytes_are_of_the_real_width_packed(name: str, nbytes: int) -> None:
    assert TensorType((1024, 1024), dtype(name)).nbytes == nbytes


def test_an_odd_number_of_nibbles_takes_a_whole_byte() -> None:
    assert TensorType((3,), dtype("i4")).nbytes == 2


def test_tuples_add_up_and_dynamic_shapes_say_so() -> None:
    pair = TupleType((TensorType((4,), dtype("f32")), TensorType((2, DYNAMIC), dtype("f32"))))
    assert pair.parts[0].nbytes == 16
    assert pair.is_dynamic
    assert str(pair) == "(f32[4], f32[2,?])"


works = st.builds(Work, *[st.integers(0, 10**12)] * 5)


@given(works, works, st.integers(0, 1000))
def test_work_is_a_vector_space(one: Work, two: Work, count: int) -> None:
    assert one + two == two + one
    assert (one + two) * count == one * count + two * count
    assert one.maximum(two) + one.minimum(two) == one + two


def test_unknown_loops_stay_symbols_until_they_are_set() -> None:
    n, m = Symbol("n", low=1), Symbol("m", low=1, default=3)
    body = SymbolicWork({(): Work(matmul_flops=10)})
    total = body.times(m).times(n) + body.times(5)
    assert [symbol.name for symbol in total.symbols] == ["m", "n"]
    assert total.evaluate() == (Work(matmul_flops=80), False)
    assert total.evaluate({"n": 7}) == (Work(matmul_flops=10 * 3 * 7 + 50), True)
    assert DTYPES["f32"].nbytes(3) == 12
