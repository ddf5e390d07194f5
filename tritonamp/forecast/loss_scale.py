"""Gradients in a half format, and the loss scale that fits them."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tritonamp.forecast.findings import CODE, LOSS, Finding
from tritonamp.forecast.recording import TensorRecord
from tritonamp.forecast.unrounded import rounds_to_inf, subnormal, vanishing
from tritonamp.names import short
from tritonamp.policy import Policy

MAX_SCALE, MIN_SCALE = 2.0**24, 2.0**-24  # of GradScaler
MARGIN = 4.0  # between the largest scale that fits this batch and the one recommended
LOW_SCALE = 2.0**8  # below, it takes more than a few skipped steps to come down to it
NOISE = 2.0**-16  # a sum this much smaller than its terms is what FP32 leaves of a zero
# share of a tensor that becomes zero: less is how a peaked softmax, or a closed gate, looks
GONE = 0.99


@dataclass(frozen=True)
class Outlook:
    """Overflow and underflow of a dry run's values in one half format.

    Attributes:
        stored: number of results of the forward that the policy stores in half.
        overflows: number of stored results that overflow.
        vanishing: share of nonzero stored values that become zero.
        subnormal: share of nonzero stored values that keep fewer bits.
        grad_vanishing: share of nonzero values of gradients that become zero at loss scale 1.
        max_scale: largest power of two at which no gradient overflows, at most 2^24.
        limited_by: parameter or module of the largest gradient, which would overflow next.
        scale: recommended loss scale, ``max_scale`` with a margin.
        scaled_vanishing: ``grad_vanishing`` at ``scale``.
        lost: parameters whose gradients are zero even at ``max_scale``.
    """

    stored: int
    overflows: int
    vanishing: float
    subnormal: float
    grad_vanishing: float
    max_scale: float
    limited_by: str
    scale: float
    scaled_vanishing: float
    lost: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether any loss scale works."""
        return self.max_scale >= MIN_SCALE and not self.lost

    @property
    def which_scale(self) -> str:
        """The recommended loss scale in words, or the reason why none fits."""
        largest = power(self.max_scale)
        if self.max_scale < MIN_SCALE:
            return f"no loss scale fits, the gradient in {self.limited_by} overflows at every one"
        if self.lost:
            return f"no loss scale fits, at {largest} the gradient of {self.lost[0]} is zero"
        limit = f" ({largest} is the largest, for {self.limited_by})" if self.limited_by else ""
        return f"loss scale {power(self.scale)} fits{limit}"

    def __str__(self) -> str:
        scaled = f", {self.scaled_vanishing:.2%} at {power(self.scale)}"
        return (
            f"{self.overflows} of {self.stored} results overflow, {self.vanishing:.2%} of their "
            f"values become zero, {self.subnormal:.2%} lose bits; {self.which_scale}, "
            f"{self.grad_vanishing:.2%} of gradient values become zero at loss scale 1"
            f"{scaled if self.fits and self.scale != 1 else ''}"
        )


def outlook(records: Sequence[TensorRecord], dtype: torch.dtype) -> Outlook:
    """Return the outlook of ``records`` with ``dtype`` as the half format."""
    stored = [r for r in records if r.half and not r.scaled]
    grads = [r for r in records if r.half and r.scaled]
    top = max(grads, key=lambda r: r.sizes.amax, default=None)
    max_scale = largest_scale(0.0 if top is None else top.sizes.amax, dtype)
    scale = max(max_scale / MARGIN, MIN_SCALE)
    if dtype is torch.bfloat16 and max_scale >= 1:
        scale = 1.0
    values = sum((record.sizes.exponents for record in stored), Counter())
    slopes = sum((record.sizes.exponents for record in grads), Counter())
    return Outlook(
        stored=len(stored),
        overflows=sum(r.sizes.overflows(dtype) and not r.excused for r in stored),
        vanishing=vanishing(values, dtype),
        subnormal=subnormal(values, dtype),
        grad_vanishing=vanishing(slopes, dtype),
        max_scale=max_scale,
        limited_by="" if top is None else top.parameter or top.module or LOSS,
        scale=scale,
        scaled_vanishing=vanishing(slopes, dtype, scale),
        lost=_lost(records, dtype, max_scale),
    )


def fitting_scale(policy: Policy, records: Sequence[TensorRecord]) -> float:
    """Return a policy's fixed loss scale, or the initial value of a dynamic one for ``records``."""
    if policy.loss_scale != "dynamic":
        return float(policy.loss_scale)
    seen = outlook(records, policy.dtype)
    return seen.scale if seen.fits and seen.limited_by else policy.init_scale


def largest_scale(amax: float, dtype: torch.dtype) -> float:
    """Return the largest loss scale, at most 2^24, at which ``amax`` does not overflow."""
    if amax == 0:
        return MAX_SCALE
    scale = 2.0 ** math.floor(math.log2(rounds_to_inf(dtype) / amax))
    return min(scale if amax * scale < rounds_to_inf(dtype) else scale / 2, MAX_SCALE)


def _lost(records: Iterable[TensorRecord], dtype: torch.dtype, scale: float) -> tuple[str, ...]:
    """Return the parameters whose gradients become zero in half at loss scale ``scale``."""
    return tuple(
        r.parameter
        for r in records
        if r.op == "gradient" and (r.half or any(s.half for s in r.sources))
        if vanishing(r.sizes.exponents, dtype, scale) > GONE and not _is_noise(r)
    )


def _is_noise(gradient: TensorRecord) -> bool:
    """Return whether a gradient is mere rounding, such as that of a key's bias in attention."""
    terms = [source.sizes.amax for made_by in gradient.sources for source in made_by.sources]
    limit = NOISE * math.prod(min(1.0, amax) for amax in terms)
    return bool(terms) and gradient.sizes.amax <= limit


def _low_scale(seen: Outlook, policy: Policy) -> Finding:
    skips = max(0, math.ceil(math.log2(policy.init_scale / seen.max_scale)))
    first = f": from {power(policy.init_scale)} the first {skips} steps are skipped" * (skips > 0)
    why = (
        f"the gradient in {seen.limited_by or LOSS} is so large that {power(seen.max_scale)} is "
        f"the largest loss scale that fits{first}"
    )
    advice = (
        f"forecast.policy and forecast.scaler() start at {power(seen.scale)} (tried: every "
        "gradient of this batch fits); a mean in place of a sum, and normalised inputs and "
        f"targets, leave room (not tried: {CODE})"
    )
    return Finding("loss scale", LOSS, why, advice, True, 0.7, untried="")


def power(scale: float) -> str:
    """Return a loss scale as a power of two: "2^12"."""
    return f"2^{math.log2(scale):.0f}" if scale != 1 else "1"


def loss_scale(records: Sequence[TensorRecord], policy: Policy) -> Iterator[Finding]:
    """Yield problems of the policy's loss scale, dynamic or fixed, with these gradients."""
    seen, half = outlook(records, policy.dtype), short(policy.dtype)
    if policy.loss_scale == "dynamic":
        if seen.fits:
            # where the forward overflows, large gradients are the least of it
            if policy.dtype is torch.float16 and seen.scale < LOW_SCALE and not seen.overflows:
                yield _low_scale(seen, policy)
            return
        limit = rounds_to_inf(policy.dtype) / (seen.max_scale * MARGIN)
        cures = tuple(
            sorted({r.module for r in records if r.half and r.scaled and r.sizes.amax >= limit})
        )
        yield Finding("loss scale", seen.limited_by, seen.which_scale, "", True, 1.2, cures)
        return
    fixed, advice = float(policy.loss_scale), f'loss_scale="dynamic" (tried: {seen.which_scale})'
    lost = _lost(records, policy.dtype, fixed)
    if fixed > seen.max_scale:
        why = f"at loss scale {fixed:g} the gradient of {seen.limited_by} overflows {half}"
        yield Finding("loss scale", seen.limited_by, why, advice, weight=1e4, untried="")
    if lost:
        why = f"at loss scale {fixed:g} the gradient of {len(lost)} parameters is zero in {half}"
        yield Finding("loss scale", lost[0], why, advice, weight=1e4, untried="")
