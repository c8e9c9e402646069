"""The work of every op, by rule.

Importing this package registers the built-in rules; `register_work` adds one for a custom call or a composite.
"""

from stablecast.ir.accounting import (
    rules_collective,
    rules_contract,
    rules_custom,
    rules_elementwise,
    rules_fusion,
    rules_lapack,
    rules_linalg,
    rules_memory,
    rules_reduce,
    rules_structure,
    rules_window,
)
from stablecast.ir.accounting.account import Account, account
from stablecast.ir.accounting.context import Context, work_of
from stablecast.ir.accounting.matrix import Support, support_matrix
from stablecast.ir.accounting.registry import TARGETS, register_work
from stablecast.ir.accounting.user_rules import load_rules
from stablecast.ir.accounting.values import Basis, Conventions, OpWork

RULES = (
    rules_elementwise,
    rules_fusion,
    rules_memory,
    rules_contract,
    rules_window,
    rules_reduce,
    rules_linalg,
    rules_lapack,
    rules_custom,
    rules_collective,
    rules_structure,
)
"""The modules that hold the built-in rules."""

BUILT_IN_TARGETS = len(TARGETS)
"""Custom-call targets and composites with a built-in rule; users' own come on top."""

__all__ = [
    "RULES",
    "Account",
    "Basis",
    "Context",
    "Conventions",
    "OpWork",
    "Support",
    "account",
    "load_rules",
    "register_work",
    "support_matrix",
    "work_of",
]
