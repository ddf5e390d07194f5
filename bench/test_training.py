"""Training steps of whole models in every mode."""

from collections.abc import Callable

from case import Case

GROUPS = ("training step",)


def test_training(case: Case, peer: str, compare: Callable[[Case, str], None]) -> None:
    compare(case, peer)
