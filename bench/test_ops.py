"""softmax, log_softmax, sum, norms and losses against every peer."""

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
    "layer_norm forward",
    "layer_norm backward",
    "rms_norm forward",
    "rms_norm backward",
    "add_rms_norm forward",
    "add_rms_norm backward",
    "group_norm forward",
    "group_norm backward",
    "cross_entropy forward",
    "cross_entropy backward",
    "linear cross entropy",
    "token_log_probs forward",
    "token_log_probs backward",
)


def test_ops(case: Case, peer: str, compare: Callable[[Case, str], None]) -> None:
    compare(case, peer)
