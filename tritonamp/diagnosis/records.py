"""Records of a step, and of a decision under way, on the host."""

from collections.abc import Sequence
from typing import NamedTuple

from tritonamp.diagnosis.replay import Snapshot
from tritonamp.kernels.decide import ScaleRule


class StepRecord(NamedTuple):
    """The outcome of one step.

    Attributes:
        step: number of the step, from 1, skipped ones included.
        cause: reason of a skip ("data", "forward fault", "scale overflow", "backward fault", "bad
            parameters", "scale exhausted", "divergence", "outlier", "veto", "huge gradient"); None:
            the step was taken.
        scale: loss scale that the backward used.
        grad_norm: norm of the unscaled gradients; None for a skipped step.
        parameters: names of the parameters whose gradients were not finite. Under "bad parameters",
            names of those whose values were not finite.
        detail: cause in words; "" for a step that was taken.
        loss: loss that ``amp.backward`` got, of micro-batches the sum; None: inf, NaN, or not
            known.
    """

    step: int
    cause: str | None
    scale: float
    grad_norm: float | None
    parameters: tuple[str, ...] = ()
    detail: str = ""
    loss: float | None = None


class Attached(NamedTuple):
    """Facts that the host knows about a decision."""

    rule: ScaleRule  # rule of the loss scale
    batches: Sequence[Snapshot]  # forwards that led to the decision
    untouched: bool = False  # whether only the last step has written to the parameters since it
