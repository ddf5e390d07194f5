"""All cases, for ``run.py`` and ``test_cases.py``."""

import functools

import activation_ops
import group_norm_ops
import loss_ops
import norm_ops
import row_ops
import steps
import training
import update_rows
from case import Case


@functools.cache
def all_cases(toy: bool = False) -> list[Case]:
    """Return the cases in order of importance, because a run that is out of time omits the last.

    Args:
        toy: whether to use sizes that take milliseconds on a CPU.
    """
    return [
        *training.cases(toy),
        *steps.cases(toy),
        *update_rows.cases(toy),
        *row_ops.cases(toy),
        *norm_ops.cases(toy),
        *group_norm_ops.cases(toy),
        *loss_ops.cases(toy),
        *activation_ops.cases(toy),
    ]
