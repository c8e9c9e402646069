"""Every op that the dialects have stands in the support matrix, and the page in the docs is that matrix."""

import importlib
from pathlib import Path

import pytest

from stablecast.ir.accounting.matrix import markdown, support_matrix
from stablecast.ir.accounting.registry import OPS, Entry, Kind, Registry
from stablecast.ir.errors import InputError

ROOT = Path(__file__).parents[3]


def names(dialect):
    """The op names of a dialect, from the bindings."""
    module = importlib.import_module(f"jaxlib.mlir.dialects._{dialect}_ops_gen")
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    return {value.OPERATION_NAME for value in classes if hasattr(value, "OPERATION_NAME")}


@pytest.mark.parametrize("dialect", ["stablehlo", "chlo", "mhlo", "sdy"])
def test_every_op_is_known(dialect):
    assert not {name for name in names(dialect) if name not in OPS}


@pytest.mark.parametrize("dialect", ["stablehlo", "chlo", "mhlo", "sdy"])
def test_no_op_is_made_up(dialect):
    known = {entry.name for entry in OPS if entry.name.startswith(f"{dialect}.")}
    assert not known - names(dialect)


def test_rules_say_what_they_do():
    for row in support_matrix():
        assert row.notes, row.op
        if row.work == "rule":
            assert row.klass
            assert row.basis
    assert not [entry.name for entry in OPS if entry.kind is Kind.RULE and entry.rule is None]


def test_the_page_is_current():
    text = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    assert text == markdown(), "python -m stablecast.ir.accounting docs/ops.md"


def test_a_name_is_registered_once():
    registry = Registry("op")
    registry.add(Entry("a.b", Kind.PART))
    with pytest.raises(InputError, match=r"'a\.b' already has"):
        registry.add(Entry("a.b", Kind.PART))
