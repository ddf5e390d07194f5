"""How far the log-probabilities of a training step are from those that the sampler returned.

The estimators are those of http://joschu.net/blog/kl-approx.html. Over tokens of the sampler,
``k1`` and ``k3`` both have the expected value ``KL(sampler, policy)``.
"""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

_DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64
_SERIES = [1 / math.factorial(n) for n in range(9, 1, -1)]
"""Coefficients of ``(exp(d) - 1 - d) / d**2``, highest power first.

At most 1/2 from 0, the terms that are left out change the result by less than 2**-28 of it.
"""


class Mismatch(NamedTuple):
    """Distance of two sets of log-probabilities, in 0-d FP32 tensors on their device.

    Attributes:
        k1: mean of ``-log ratio``.
        k3: mean of ``ratio - 1 - log ratio``. No token lowers it, so that it is 0 only if all
            ratios are 1.
        outside: share of the ratios outside of the band. A ratio that is NaN is outside.
        worst_ratio: the ratio that is furthest from 1 by its logarithm, so that 1/8 and 8 are
            equally far; of two such the larger one.
    """

    k1: Tensor
    k3: Tensor
    outside: Tensor
    worst_ratio: Tensor


def mismatch(
    log_probs: Tensor,
    sampler_log_probs: Tensor,
    mask: Tensor | None = None,
    *,
    band: Sequence[float] = (0.999, 1.002),
) -> Mismatch:
    """Return how far the ratios ``exp(log_probs - sampler_log_probs)`` are from 1.

    The host does not wait for the device, a CUDA graph can capture the call, and results have no
    gradient. The arithmetic is FP32; if an input is FP64, it is FP64.

    If no token counts, all results are NaN. If a token that counts has log-probability -inf on both
    sides, or NaN on one, its ratio is NaN, and so are all results except ``outside``. With -inf on
    one side only, the ratio is 0 or inf, ``k3`` is inf, and ``k1`` is inf or -inf; NaN if both
    occur.

    Args:
        log_probs: log-probabilities of the sampled tokens under the trained policy, of any shape,
            float16, bfloat16, float32 or float64.
        sampler_log_probs: log-probabilities of the same tokens as the sampler returned them, of the
            same shape, on the same device.
        mask: bool, of the same shape. Tokens where it is False do not count, whatever their values
            are. None: all tokens count.
        band: lowest and highest ratio inside of the band, ``0 <= lowest <= 1 <= highest``.

    Raises:
        ValueError: a type, dtype, shape or device is wrong, or the band is no such pair.
    """
    _check_log_probs(log_probs, sampler_log_probs)
    if mask is not None:
        _check_mask(mask, log_probs)
    lowest, highest = _checked_band(band)
    is_wide = torch.float64 in (log_probs.dtype, sampler_log_probs.dtype)
    dtype = torch.float64 if is_wide else torch.float32
    log_ratio = log_probs.detach().to(dtype) - sampler_log_probs.detach().to(dtype)
    if not log_ratio.numel():
        return Mismatch(*(log_ratio.new_full((), math.nan, dtype=torch.float32) for _ in range(4)))
    counted: Any = log_ratio.numel()
    if mask is not None:
        # masked tokens get the ratio 1, which adds 0 to each sum and is inside of every band
        log_ratio = log_ratio.masked_fill(~mask, 0.0)
        counted = mask.sum()
    ratio = log_ratio.exp()
    outside = ~((ratio >= lowest) & (ratio <= highest))  # NaN, too
    largest, smallest = log_ratio.amax(), log_ratio.amin()
    worst = torch.where(largest >= -smallest, largest, smallest).exp()
    if mask is not None:
        worst = worst.masked_fill(counted == 0, math.nan)
    k1 = -log_ratio.sum() / counted
    k3 = _above_line(log_ratio).sum() / counted
    share = outside.sum().to(dtype) / counted
    return Mismatch(k1.float(), k3.float(), share.float(), worst.float())


def _above_line(x: Tensor) -> Tensor:
    """Return ``exp(x) - 1 - x`` with a relative error of some ulps, near 0, too."""
    near = torch.full_like(x, _SERIES[0])
    for coefficient in _SERIES[1:]:
        near = near * x + coefficient
    # ``expm1(x) - x`` alone would lose half of the digits where x is 1e-4. The bound is for inf,
    # since inf - inf is NaN.
    far = torch.expm1(x) - x.clamp(max=torch.finfo(x.dtype).max)
    return torch.where(x.abs() <= 0.5, near * x * x, far)


def _check_log_probs(log_probs: Any, sampler_log_probs: Any) -> None:
    """Raise ValueError if these are not floating tensors of one shape on one device."""
    named = {"log_probs": log_probs, "sampler_log_probs": sampler_log_probs}
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name}: expected a Tensor, got {type(value).__name__}: call "
                "mismatch(log_probs, sampler_log_probs, mask)"
            )
        if value.dtype not in _DTYPES:
            raise ValueError(
                f"{name}: expected log-probabilities in float16, bfloat16, float32 or float64, got "
                f"{value.dtype}: give log-probabilities of tokens, not the tokens"
            )
    if sampler_log_probs.shape != log_probs.shape:
        raise ValueError(
            f"sampler_log_probs: expected the shape of log_probs, {tuple(log_probs.shape)}, got "
            f"{tuple(sampler_log_probs.shape)}: cut or pad both to the same tokens"
        )
    _check_device("sampler_log_probs", sampler_log_probs, log_probs)


def _check_mask(mask: Any, log_probs: Tensor) -> None:
    """Raise ValueError if ``mask`` is not bool, of the shape and on the device of ``log_probs``."""
    if not isinstance(mask, Tensor):
        raise ValueError(f"mask: expected a bool Tensor or None, got {type(mask).__name__}")
    if mask.dtype is not torch.bool:
        raise ValueError(
            f"mask: expected torch.bool, True where a token counts, got {mask.dtype}: "
            "give mask.bool()"
        )
    if mask.shape != log_probs.shape:
        raise ValueError(
            f"mask: expected the shape of log_probs, {tuple(log_probs.shape)}, got "
            f"{tuple(mask.shape)}: give mask.expand_as(log_probs), or cut it to the same tokens"
        )
    _check_device("mask", mask, log_probs)


def _check_device(name: str, value: Tensor, log_probs: Tensor) -> None:
    if value.device != log_probs.device:
        raise ValueError(
            f"{name}: expected a tensor on {log_probs.device}, where log_probs is, got one on "
            f"{value.device}: move it there first"
        )


def _checked_band(band: Any) -> tuple[float, float]:
    """Return the lowest and the highest ratio of the band.

    Raises:
        ValueError: ``band`` is not ``0 <= lowest <= 1 <= highest``.
    """
    pair = tuple(band) if isinstance(band, (tuple, list)) else ()
    if len(pair) == 2 and all(isinstance(x, Real) and not isinstance(x, bool) for x in pair):
        lowest, highest = map(float, pair)
        if 0 <= lowest <= 1 <= highest:
            return lowest, highest
    raise ValueError(
        "band: expected two numbers, 0 <= lowest <= 1 <= highest, such as (0.999, 1.002), got "
        f"{band!r}: they are bounds of exp(log_probs - sampler_log_probs), not of its logarithm"
    )
