"""Accuracy suites: predictions against public measurements that stablecast was not made from, and some that it was."""

from stablecast.validation.suites.base import Data, Row, Suite
from stablecast.validation.suites.registry import SUITES, run_suite, suite_names

__all__ = ["SUITES", "Data", "Row", "Suite", "run_suite", "suite_names"]
