"""What the host keeps of a step, and of a decision on its way."""

from collections.abc import Sequence
from typing import NamedTuple

from tritonamp.diagnosis.replay import Snapshot
from tritonamp.kernels.decide import ScaleRule


class StepRecord(NamedTuple):
    """What became of one step.

    Attributes:
        step: its number, from 1, skipped ones included.
        cause: why it was skipped ("data", "forward fault", "scale overflow", "backward fault", "bad
            parameters", "scale exhausted", "divergence", "outlier", "veto"), or None: it was not.
        scale: the loss scale that its backward used.
        grad_norm: of the unscaled gradients; None for a skipped one.
        parameters: names of those whose gradients (under "bad parameters" whose values) were not
            finite.
        detail: the cause in words, "" for a step.
        loss: that of ``amp.backward``, of micro-batches their sum; None: inf, NaN, or not known.
    """

    step: int
    cause: str | None
    scale: float
    grad_norm: float | None
    parameters: tuple[str, ...] = ()
    detail: str = ""
    loss: float | None = None


class Attached(NamedTuple):
    """What is known on the host about a decision."""

    rule: ScaleRule  # of its loss scale
    batches: Sequence[Snapshot]  # the forwards that led to it
    untouched: bool = False  # nobody but the last step has written to the parameters since
