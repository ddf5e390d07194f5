"""Every case of ``matrix.py``, by every installed peer."""

from collections.abc import Callable

from case import Case


def test_case(case: Case, peer: str, compare: Callable[[Case, str], None]) -> None:
    compare(case, peer)
