"""Classes of kernels by their names."""

import pytest

from stablecast.validation.kernel_names import classify


@pytest.mark.parametrize(
    ("name", "klass"),
    [
        ("wrapped_add", "elementwise"),
        ("wrapped_broadcast.2", "elementwise"),
        ("negate.3", "elementwise"),
        ("wrapped_reduce", "reduction"),
        ("wrapped_transpose", "copy"),
        ("wrapped_gather", "gather"),
        ("wrapped_scatter.1", "scatter"),
        ("wrapped_custom_thing", "other"),
    ],
)
def test_ops_that_xla_wraps_are_what_they_hold(name: str, klass: str) -> None:
    assert classify(name).value == klass
