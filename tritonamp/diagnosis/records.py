"""What the host keeps of a step, and of a decision on its way."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tritonamp.diagnosis.replay import Snapshot
from tritonamp.kernels.decide import ScaleRule

DIRECTIONS = "forward", "backward"


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


class RangeRecord(NamedTuple):
    """What the values at one module's output were like in one step.

    Attributes:
        module: its name; "" is the model, of several models each begins with the model's number.
        direction: "forward": the output; "backward": its gradient, which carries the loss scale.
        step: the number of the step, from 1, as in ``amp.history``.
        absmax: largest magnitude; inf or NaN if there was one.
        headroom_bits: how often ``absmax`` can double before it leaves the format; inf where all
            is 0, -inf or NaN where something is inf or NaN.
        zeros: share of the elements that are 0.
        subnormals: share of those that are not 0 but below the smallest normal number (6e-5 in
            float16): they have lost digits, and what is smaller still is 0.
        elements: how many there were.
        dtype: the narrowest format among them.
        steps_left: of a forward that grows: about how many steps until it leaves the format, by
            the trend of the last readings; None: no trend that says so.
    """

    module: str
    direction: str
    step: int
    absmax: float
    headroom_bits: float
    zeros: float
    subnormals: float
    elements: int
    dtype: torch.dtype
    steps_left: int | None = None
