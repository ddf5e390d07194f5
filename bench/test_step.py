"""Optimizer steps and their parts against every peer."""

from collections.abc import Callable

from case import Case

GROUPS = (
    "full step",
    "full step without outliers",
    "Muon",
    "optimizer",
    "gradient statistics",
    "ranges",
    "weight cast",
)


def test_step(case: Case, peer: str, compare: Callable[[Case, str], None]) -> None:
    compare(case, peer)
