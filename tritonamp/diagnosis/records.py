"""Records of a step, and of the values in it, on the host."""

from typing import NamedTuple

import torch

DIRECTIONS = "forward", "backward"
ATTENTION = "attention"


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


class RangeRecord(NamedTuple):
    """The values at one module's output in one step, or the attention logits of one head.

    Attributes:
        module: name of the module; "" is the model. With several models, a name begins with the
            model's number.
        direction: "forward": the output; "backward": the gradient of the output, which carries the
            loss scale; "attention": logits of the module's attention, scaled and before the
            softmax.
        step: number of the step, from 1, as in ``amp.history``.
        absmax: largest magnitude; inf or NaN if there was one.
        headroom_bits: number of times that ``absmax`` can double within the format; inf if all
            values are 0; -inf or NaN if a value is inf or NaN.
        zeros: share of the elements that are 0; NaN for logits.
        subnormals: share of the elements below the smallest normal number (6e-5 in float16),
            without zeros. These have lost digits, and still smaller values became 0. NaN for
            logits.
        elements: number of elements; 0 for logits.
        dtype: narrowest format among the values; of logits that exist in no tensor, the format of
            queries and keys.
        steps_left: for a forward or a logit that grows, estimated number of steps until it leaves
            the format, by the trend of the last readings; None: no such trend, or not the module's
            largest head.
        head: number of the head; None: no attention, or all heads count as one.
        is_bound: whether ``absmax`` is only a bound of the logits: largest norm of a query, times
            that of a key, times the scale.
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
    head: int | None = None
    is_bound: bool = False


class MismatchRecord(NamedTuple):
    """A ``functional.Mismatch`` that has arrived.

    Attributes:
        step: number of the step that was next when it was logged, from 1, as in ``amp.history``.
        k1: mean of ``-log ratio``.
        k3: mean of ``ratio - 1 - log ratio``.
        outside: share of the ratios outside of the band.
        worst_ratio: ratio whose logarithm is furthest from 0.
    """

    step: int
    k1: float
    k3: float
    outside: float
    worst_ratio: float
