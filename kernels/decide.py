"""What a step does: skip or go, by how much to scale the gradients, and what the loss scale becomes."""

from typing import NamedTuple

import torch
from torch import Tensor


class ScaleRule(NamedTuple):
    """How a loss scale moves. A fixed scale is ``min_scale == max_scale``."""

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int
    min_scale: float
    max_scale: float


def decide_torch(
    amax: Tensor, square_sum: Tensor, loss_nonfinite: Tensor, scale: Tensor, max_norm: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    inv_scale = scale.double().reciprocal().float()
    norm = square_sum.double().sum().sqrt().float() * inv_scale
    grad_scale = inv_scale
    if max_norm is not None:
        grad_scale = inv_scale * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    # 1/scale can leave FP32, and a finite scaled gradient times it too: look at the unscaled value
    nonfinite = ~torch.isfinite(amax * inv_scale).all() | ~torch.isfinite(grad_scale)
    return torch.maximum(nonfinite.float(), loss_nonfinite), norm, grad_scale


def decide(
    amax: Tensor, square_sum: Tensor, loss_nonfinite: Tensor, scale: Tensor, max_norm: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Judges the gradients of one decision on the device.

    Args:
        amax, square_sum: results of grad_stats over all gradients that take part, shape (n,).
        loss_nonfinite: 0-d float32, 1 where the loss itself was inf or NaN.
        scale: 0-d float32, the loss scale that the backward used.
        max_norm: clip the unscaled gradients to this total 2-norm (``torch.nn.utils.clip_grad_norm_``), or None.

    Returns:
        found_inf (0-d, non-zero: skip), norm of the unscaled gradients (0-d), and the factor (0-d) that turns a
        scaled gradient into the one to step with: 1/scale, times the clip coefficient.
    """
    return decide_torch(amax, square_sum, loss_nonfinite, scale, max_norm)


def update_scale_torch(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    loss_nonfinite: Tensor,
    rule: ScaleRule,
) -> None:
    fault = loss_nonfinite != 0  # the forward's fault: a lower scale cannot help
    overflow = (found_inf != 0) & ~fault
    clean = ~fault & ~overflow

    # overflow: use up one unit of patience, back off when there is none left
    patience = hysteresis_tracker - overflow.int()
    back_off = overflow & (patience <= 0)
    # clean: count, grow after growth_interval in a row
    tracker = (growth_tracker + clean) * ~overflow
    grow = clean & (tracker >= rule.growth_interval)

    lower = (scale * rule.backoff_factor).clamp(min=rule.min_scale)
    higher = (scale * rule.growth_factor).clamp(max=rule.max_scale)
    scale.copy_(torch.where(back_off, lower, torch.where(grow, higher, scale)))
    growth_tracker.copy_(tracker * ~grow)
    hysteresis_tracker.copy_(torch.where(clean, torch.full_like(patience, rule.hysteresis), patience.clamp(min=0)))


def update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    loss_nonfinite: Tensor,
    rule: ScaleRule,
) -> None:
    """The loss-scale state machine, in place on the device. Its twin is the specification.

    - loss non-finite: nothing moves;
    - gradients non-finite though the loss is finite: the growth count restarts, and at the ``hysteresis``-th time
      without a clean step between, the scale is multiplied by ``backoff_factor``, never below ``min_scale``;
    - clean: after ``growth_interval`` in a row the scale is multiplied by ``growth_factor``, never above ``max_scale``.

    Args:
        scale, found_inf, loss_nonfinite: 0-d float32.
        growth_tracker, hysteresis_tracker: 0-d int32.
    """
    update_scale_torch(scale, growth_tracker, hysteresis_tracker, found_inf, loss_nonfinite, rule)
