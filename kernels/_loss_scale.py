"""The loss scale: its state, the rule of its movement, and one movement."""

from typing import NamedTuple

import torch
from torch import Tensor

from tritonamp.kernels.device import tl, triton


class ScaleRule(NamedTuple):
    """Movement of a loss scale. A fixed scale is ``min_scale == max_scale``.

    - Loss non-finite, an outlier, a veto, or huge gradients: nothing moves.
    - Gradients non-finite though the loss is finite: the growth count restarts. At the
      ``hysteresis``-th time without a clean step in between, the scale is multiplied by
      ``backoff_factor``, never below ``min_scale``.
    - Clean: after ``growth_interval`` clean steps in a row, or earlier if ``headroom`` allows it,
      the scale is multiplied by ``growth_factor``, never above ``max_scale``.

    With a positive ``headroom``, the scale also grows at each clean step while the largest scaled
    gradient would stay within ``headroom``, and the scale below its ceiling. An overflow after a
    clean step sets the ceiling; the ceiling is lifted when a ``growth_interval`` is over.
    """

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int
    min_scale: float
    max_scale: float
    headroom: float = 0.0


class ScaleState(NamedTuple):
    """A loss scale and its memory, as 0-d tensors.

    Attributes:
        scale: float32.
        growth_tracker: int32, number of clean steps in a row.
        hysteresis_tracker: int32, number of overflows that are left before the scale backs off.
        ceiling: float32, highest scale that ``headroom`` lets grow.
    """

    scale: Tensor
    growth_tracker: Tensor
    hysteresis_tracker: Tensor
    ceiling: Tensor


@triton.jit
def next_scale(
    scale_ptr, growth_ptr, hysteresis_ptr, ceiling_ptr, found_inf, fault, largest,
    growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale, headroom,
):  # fmt: skip
    # All threads load, one stores: formally a race. A thread of a late warp may load new
    # values, but stores nothing itself. The thread that stores has loaded the old ones before.
    scale, tracker, patience = tl.load(scale_ptr), tl.load(growth_ptr), tl.load(hysteresis_ptr)
    ceiling = tl.load(ceiling_ptr)
    overflow = (found_inf != 0.0) & (fault == 0.0)
    clean = (found_inf == 0.0) & (fault == 0.0)
    lower = tl.maximum(scale * backoff_factor, min_scale)
    higher = tl.minimum(scale * growth_factor, max_scale)
    # A fault of the forward moves nothing, because a lower scale would not
    # help, and would sink for ever.
    # overflow: use up one unit of patience, back off when there is none left
    patience -= overflow.to(tl.int32)
    back_off = overflow & (patience <= 0)
    ceiling = tl.where(overflow & (tracker > 0), lower, ceiling)
    # clean: count, grow after growth_interval in a row, or where there is room
    tracker = tl.where(overflow, 0, tracker + clean.to(tl.int32))
    due = clean & (tracker >= growth_interval)
    grow = due | (clean & (largest * higher <= headroom) & (headroom > 0.0) & (higher <= ceiling))
    tl.store(scale_ptr, tl.where(back_off, lower, tl.where(grow, higher, scale)))
    tl.store(growth_ptr, tl.where(due, 0, tracker))
    tl.store(hysteresis_ptr, tl.where(clean, hysteresis, tl.maximum(patience, 0)))
    tl.store(ceiling_ptr, tl.where(due, max_scale, ceiling))


def move_scale(
    state: ScaleState, rule: ScaleRule, found_inf: Tensor, loss_nonfinite: Tensor, largest: Tensor
) -> None:
    scale, growth_tracker, hysteresis_tracker, ceiling = state
    fault = loss_nonfinite != 0  # of the forward, which a lower scale cannot help
    overflow = (found_inf != 0) & ~fault
    clean = ~fault & ~overflow
    lower = (scale * rule.backoff_factor).clamp(min=rule.min_scale)
    higher = (scale * rule.growth_factor).clamp(max=rule.max_scale)

    # overflow: use up one unit of patience, back off when there is none left
    patience = hysteresis_tracker - overflow.int()
    back_off = overflow & (patience <= 0)
    ceiling.copy_(torch.where(overflow & (growth_tracker > 0), lower, ceiling))
    # clean: count, grow after growth_interval in a row, or where there is room
    tracker = (growth_tracker + clean) * ~overflow
    due = clean & (tracker >= rule.growth_interval)
    grow = due
    if rule.headroom > 0:
        grow = due | (clean & (largest * higher <= rule.headroom) & (higher <= ceiling))

    scale.copy_(torch.where(back_off, lower, torch.where(grow, higher, scale)))
    growth_tracker.copy_(tracker * ~due)
    hysteresis_tracker.copy_(
        torch.where(clean, torch.full_like(patience, rule.hysteresis), patience.clamp(min=0))
    )
    ceiling.copy_(torch.where(due, torch.full_like(ceiling, rule.max_scale), ceiling))


def numbers_of(rule: ScaleRule) -> tuple[float, ...]:
    """Return the rule's numbers for a kernel, which distinguishes integers and floats by type."""
    growth, backoff, interval, hysteresis, *limits = map(float, rule)
    return growth, backoff, int(interval), int(hysteresis), *limits
