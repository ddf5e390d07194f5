"""softmax, log_softmax and sum against every peer."""

from collections.abc import Callable

from case import Case

GROUPS = (
    "softmax forward",
    "softmax forward, small",
    "softmax backward",
    "log_softmax forward",
    "log_softmax backward",
    "sum forward",
    "sum backward",
)


def test_ops(case: Case, peer: str, compare: Callable[[Case, str], None]) -> None:
    compare(case, peer)
