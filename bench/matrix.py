"""Everything that is measured, for ``run.py`` and the pytest files."""

import row_ops
import steps
import training
from case import Case

KERNELS = {
    "softmax forward": {"softmax"},
    "softmax backward": {"softmax_backward"},
    "log_softmax forward": {"log_softmax"},
    "log_softmax backward": {"log_softmax_backward"},
    "sum forward": {"sum"},
    "gradient statistics": {"grad_stats"},
    "optimizer": {"adamw"},
    "weight cast": {"cast"},
    "loss scale": {"update_scale"},
    "full step": {"grad_stats", "decide", "adamw"},
}
"""Which groups measure a kernel."""


def all_cases(toy: bool = False) -> list[Case]:
    """In order of importance: a run that is out of time leaves out the last ones.

    Args:
        toy: sizes that a CPU gets through in milliseconds, the same cases.
    """
    return [*row_ops.cases(toy), *steps.cases(toy), *training.cases(toy)]
