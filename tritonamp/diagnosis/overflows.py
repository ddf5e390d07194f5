"""Gradients that are not finite although the loss is: is the scale too high, or does none help?"""

import math
from collections.abc import Sequence

from tritonamp.diagnosis.replay.faults import listed
from tritonamp.diagnosis.skips import MANY, Cause, Skip

_SUDDEN = 256  # factor by which gradients hardly grow from one step to the next
_NEAR = 16  # factor below the format's largest number from which on no other gradient overflows
_FIXED = (
    "The scale is fixed, so it cannot back off: give a lower loss_scale, or 'dynamic', which finds "
    "its level by itself."
)


def cause_of_overflow(skip: Skip, names: Sequence[str]) -> Cause:
    """Return the cause that the numbers of an overflow point to.

    Args:
        skip: skip as the device recorded it.
        names: names of the parameters whose gradients were not finite.
    """
    if skip.scale <= skip.lowest and not (skip.fixed and skip.scale <= 1.0):
        return Cause.EXHAUSTED
    if skip.has_gradient_in_loss and not skip.fixed:
        return Cause.SCALE  # the loss may depend on the scale
    if skip.scale <= 1.0:
        return Cause.BACKWARD  # nothing was scaled up
    return Cause.BACKWARD if _is_sudden(skip, names) or _is_stuck(skip) else Cause.SCALE


def _is_sudden(skip: Skip, names: Sequence[str]) -> bool:
    """Return whether there is a NaN after gradients far below the format's largest number.

    A loss that is large at this scale explains it: losses of a run may differ by factors.
    """
    if skip.loss is not None and not _fits(skip, skip.loss):
        return False
    far_below = 0.0 < skip.before * skip.scale * _SUDDEN < skip.limit
    return far_below and any(math.isnan(skip.amax[name]) for name in names)


def _is_stuck(skip: Skip) -> bool:
    """Return whether the same gradients were NaN at lower scales, and no large number explains it.

    A scale that is far too high also gives NaN, as inf - inf. But then another gradient is inf, or
    the scaled loss or another gradient is large.
    """
    earlier = skip.row[1 - MANY :]
    if not skip.is_one_of_many or not skip.nan or any(o.nan != skip.nan for o in earlier):
        return False
    if not skip.scale < earlier[-1].scale < earlier[0].scale:
        return False
    if skip.loss is not None:
        return _fits(skip, skip.loss)
    largest = max(filter(math.isfinite, skip.amax.values()), default=0.0)
    return 0.0 < largest * _NEAR <= skip.limit


def _fits(skip: Skip, loss: float) -> bool:
    """Return whether the format holds the loss, times the scale."""
    return skip.scale * max(1.0, abs(loss)) <= skip.limit


def why_overflow(skip: Skip, names: Sequence[str], cause: Cause) -> str:
    """Return the reason in words, and advice. Arguments are those of ``cause_of_overflow``."""
    kinds = ["NaN" if math.isnan(skip.amax[name]) else "inf" for name in names]
    count = f"{len(names)} parameter(s)"
    if not names:
        were = f"{skip.ranks or 'some parameters'} were not"
    elif len(set(kinds)) == 1:
        were = f"{count} were {kinds[0]}: {listed(names)}"
    else:
        pairs = zip(names, kinds, strict=True)
        were = f"{count} were not: {listed([f'{name} ({kind})' for name, kind in pairs])}"
    loss = "the loss was finite, but "
    if skip.has_gradient_in_loss:
        loss = "the loss contains the gradient of a scaled tensor, and "
    return (
        f"{loss}at loss scale {skip.scale:g} the gradients of {were}. {_about_scale(skip, cause)}"
    )


def _lowered(skip: Skip) -> str:
    if skip.hysteresis > len(skip.row) + 1:
        return f"The scale is lowered at overflow {skip.hysteresis} without a step between"
    return "The scale was lowered"


def _about_scale(skip: Skip, cause: Cause) -> str:
    """Return the part of the loss scale in the overflow, in words, and advice."""
    if cause is Cause.EXHAUSTED:
        return _FIXED if skip.fixed else cause.advice
    if cause is Cause.SCALE and skip.is_one_of_many:
        return f"{_lowered(skip)}. It was overflow {len(skip.row) + 1} in a row, at {skip.scales}."
    if cause is Cause.SCALE:
        return f"{_lowered(skip)}; {cause.advice}"
    if _is_stuck(skip):
        why = f"At {skip.scales} the same gradients were NaN, so a lower scale has not helped. "
    elif skip.scale <= 1.0 and skip.row and skip.row[0].scale > skip.scale:
        why = f"At {skip.scales} gradients were not finite, so a lower scale has not helped. "
    elif skip.scale <= 1.0:
        why = "Such a scale makes no gradient larger. "
    else:
        why = (
            f"In the last good step no gradient was above {skip.before:.2g}, far below "
            f"{skip.limit:g} at this scale, too. "
        )
    return why + cause.advice
