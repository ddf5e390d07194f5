"""Rounding error of half gradients that accumulate over many batches."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tritonamp.casts.model_dtypes import wanted_dtypes
from tritonamp.forecast.findings import Finding
from tritonamp.names import short
from tritonamp.policy import HALF_DTYPES, Policy

TOLERABLE = 0.005  # share of a gradient that its sum may lose
# Root mean square of what rounding to nearest moves a number by, in units of eps / 2 of it: of a
# step of at most eps / 2, uniform, over a mantissa that is uniform in its logarithm
_ROUNDING = math.sqrt(3 / (8 * math.log(2)) / 3)


def check_accumulation(steps: Any) -> None:
    """Raise ValueError unless ``steps`` is an int of 1 or more."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(
            "accumulation_steps: expected how many batches a step adds up, 1 or more, got "
            f"{steps!r}"
        )


def lost_share(dtype: torch.dtype, steps: int) -> float:
    """Return the root mean square error of a sum of gradients in ``dtype``, relative to the sum.

    Each of the n - 1 additions rounds once, and the squares of these errors add up. Gradients of
    batches are mostly noise, so the k-th partial sum is about sqrt(k / n) of the last one.
    """
    sums = sum(range(2, steps + 1)) / steps
    return _ROUNDING * torch.finfo(dtype).eps / 2 * math.sqrt(sums)


def added_up(model: nn.Module, policy: Policy, steps: int) -> Iterator[Finding]:
    """Yield advice if half gradients of ``steps`` batches lose more than ``TOLERABLE``."""
    if policy.grad_dtype is not None or steps < 2:
        return
    wanted = wanted_dtypes(model, policy)
    dtypes = [wanted.get(p, p.dtype) for p in model.parameters() if p.requires_grad]
    for dtype in HALF_DTYPES:
        lost = lost_share(dtype, steps)
        if dtype in dtypes and lost > TOLERABLE:
            half, where = short(dtype), type(model).__name__
            why = (
                f"{half} gradients of {steps} batches are added up in {half}: about {lost:.1%} of "
                "the sum is lost to rounding"
            )
            advice = "grad_dtype=torch.float32 adds them up in FP32, at two bytes a parameter more"
            yield Finding("accumulation", where, why, advice, problem=False)
