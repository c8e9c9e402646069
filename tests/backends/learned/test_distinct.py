"""Equal kernels are found, whatever they are called."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stablecast.backends.learned.distinct import distinct
from stablecast.ir.kernels import KernelRow, KernelTable


def test_names_do_not_count() -> None:
    rows = [
        KernelRow(m=4, math="bf16", label="first"),
        KernelRow(m=4, math="fp16"),
        KernelRow(m=4, math="bf16", label="second"),
    ]
    first, position = distinct(KernelTable.of(rows))
    assert sorted(first.tolist()) == [0, 1]
    assert first[position].tolist() == [0, 1, 0]


def test_no_rows() -> None:
    first, position = distinct(KernelTable.of([]))
    assert (len(first), len(position)) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from(["", "fwd", "bwd"])), max_size=30))
def test_every_row_equals_the_one_that_stands_for_it(found: list[tuple[int, int, str]]) -> None:
    table = KernelTable.of(KernelRow(batch=a, bytes_read=float(b), direction=c) for a, b, c in found)
    first, position = distinct(table)
    assert [found[i] for i in first[position]] == found
    assert len(first) == len(set(found))
    assert np.array_equal(position[first], np.arange(len(first)))
