"""Optimizer steps and their parts against every peer."""

from collections.abc import Callable

from case import Case

GROUPS = ("full step", "optimizer", "gradient statistics", "weight cast")


def test_step(case: Case, peer: str, compare: Callable[[Case, str], None]) -> None:
    compare(case, peer)
