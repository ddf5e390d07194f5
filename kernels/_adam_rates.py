"""The arithmetic of an Adam step, and the numbers that all elements of a tensor share."""

from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels.device import tl, triton

RATES = 10
"""Number of FP32 values that adam_rates_kernel writes for each tensor."""


@triton.jit
def _power(base, exponent):
    """Raise ``base`` to an int32 ``exponent`` by squaring, with at most 48 roundings."""
    result = tl.full(exponent.shape, 1.0, tl.float64)
    # 25 bits hold any count of steps, because an FP32 count is exact up to 2**24
    for _ in range(25):
        result = tl.where(exponent % 2 == 1, result * base, result)
        base *= base
        exponent //= 2
    return result


@triton.jit(do_not_specialize=("rows",))
def adam_rates_kernel(
    steps_ptr, number_ptr, groups_ptr, rules_ptr, grad_scale_ptr, found_inf_ptr, rates_ptr,
    lost_ptr, rows,
    LOST: tl.constexpr, RATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the steps and compute the rates in FP64, rounded once. A thread handles one tensor."""
    # Any flag but 0 skips, because GradScaler adds up the flags of devices, and gets 2. A skipped
    # step is not counted, as in torch.
    if tl.load(found_inf_ptr) != 0.0:
        return
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    step_ptr = tl.load(steps_ptr + row, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    number = tl.load(number_ptr + row, mask=mask, other=0)
    rule = rules_ptr + 7 * tl.load(groups_ptr + number, mask=mask, other=0)
    lr = tl.load(rule, mask=mask)
    beta1, beta2 = tl.load(rule + 1, mask=mask), tl.load(rule + 2, mask=mask)
    eps, weight_decay = tl.load(rule + 3, mask=mask), tl.load(rule + 4, mask=mask)
    decoupled, sign = tl.load(rule + 5, mask=mask), tl.load(rule + 6, mask=mask)
    step = tl.load(step_ptr, mask=mask, other=0.0) + 1.0
    tl.store(step_ptr, step, mask=mask)
    # in FP64, because for beta2 = 0.999 FP32 would lose ten bits of the first corrections
    bias_correction1 = 1.0 - _power(beta1, step.to(tl.int32))
    bias_correction2 = 1.0 - _power(beta2, step.to(tl.int32))
    # zeros, to which the chunks of adamw_kernel, which is launched next, add their counts
    if LOST:
        tl.store(lost_ptr + 2 * number, 0, mask=mask)
        tl.store(lost_ptr + 2 * number + 1, 0, mask=mask)
    rates = rates_ptr + number * RATES
    # the sign for maximize is part of the factor, so that elements need no further multiplication
    factor = tl.load(grad_scale_ptr) * sign.to(tl.float32)
    tl.store(rates, factor, mask=mask)
    tl.store(
        rates + 1,
        tl.where(decoupled != 0.0, 1.0 - lr * weight_decay, 1.0).to(tl.float32),
        mask=mask,
    )
    tl.store(rates + 2, tl.where(decoupled != 0.0, 0.0, weight_decay).to(tl.float32), mask=mask)
    # 1 - beta is rounded once from FP64: the difference of FP32 values would lose digits near 1
    tl.store(rates + 3, (1.0 - beta1).to(tl.float32), mask=mask)
    tl.store(rates + 4, beta2.to(tl.float32), mask=mask)
    tl.store(rates + 5, (1.0 - beta2).to(tl.float32), mask=mask)
    tl.store(rates + 6, tl.sqrt(bias_correction2).to(tl.float32), mask=mask)
    tl.store(rates + 7, eps.to(tl.float32), mask=mask)
    tl.store(rates + 8, (-lr / bias_correction1).to(tl.float32), mask=mask)
    tl.store(rates + 9, step, mask=mask)


@triton.jit
def load_rates(rates_ptr):
    """Return a tensor's rates without the step count.

    They are loaded once, because the compiler cannot know that stores leave them unchanged.
    """
    return (
        tl.load(rates_ptr), tl.load(rates_ptr + 1), tl.load(rates_ptr + 2), tl.load(rates_ptr + 3),
        tl.load(rates_ptr + 4), tl.load(rates_ptr + 5), tl.load(rates_ptr + 6),
        tl.load(rates_ptr + 7), tl.load(rates_ptr + 8),
    )  # fmt: skip


@triton.jit
def adam_update(p, grad, m, v, v_max, rates, AMSGRAD: tl.constexpr):
    """Return p, m, v and v_max after a step, and which parameters move.

    Each sum with a product is written as an fma. Otherwise the compiler would decide where to fuse
    by the surrounding code, and elements of a tail would be rounded unlike those of a tile.
    """
    factor, decay, l2, weight1, beta2, weight2, correction, eps, rate = rates
    # unscale and clip
    grad *= factor
    # weight decay
    # torch leaves the term out if weight decay is 0, and 0 * p is NaN for an infinite p
    grad = tl.where(l2 == 0.0, grad, tl.fma(l2, p, grad))
    # moments; torch.lerp starts from the end that is nearer, so both of its forms are here
    apart = grad - m
    m = tl.where(weight1 < 0.5, tl.fma(weight1, apart, m), tl.fma(weight1 - 1.0, apart, grad))
    v = tl.fma(v, beta2, weight2 * grad * grad)
    # maximum drops a NaN by default, and torch.maximum keeps it
    v_max = tl.maximum(v_max, v, propagate_nan=tl.PropagateNan.ALL) if AMSGRAD else v
    # update, with correctly rounded root and quotient: Triton's `/` and tl.sqrt are approximations
    denom = tl.div_rn(tl.sqrt_rn(v_max), correction) + eps
    step = tl.div_rn(rate * m, denom)
    moves = (step != 0.0) | (p * decay != p)
    return tl.fma(p, decay, step), m, v, v_max, moves


def adam_update_twin(
    p: Tensor, grad: Tensor, m: Tensor, v: Tensor, v_max: Tensor, rule: Any, step: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what ``adam_update`` returns, for a gradient that is unscaled and clipped already."""
    # weight decay
    if rule.weight_decay != 0 and rule.decoupled_weight_decay:
        p = p * (1 - rule.lr * rule.weight_decay)
    elif rule.weight_decay != 0:
        grad = grad + rule.weight_decay * p
    # moments
    weight1, beta1 = 1 - rule.beta1, rule.beta1
    m = m.lerp(grad, weight1.to(m) if isinstance(beta1, Tensor) else weight1)
    # the product of gradients is rounded before the sum, as it was in runs of older checkpoints
    v = v * rule.beta2 + grad * (1 - rule.beta2) * grad
    v_max = torch.maximum(v_max, v) if rule.amsgrad else v
    # update
    rate, correction = corrected_rates(rule, step, p.dtype)
    return p, m, v, v_max, rate * m / (v_max.sqrt() / correction + rule.eps)


def corrected_rates(rule: Any, step: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the corrected -lr and the root of the second correction, computed in FP64."""
    bias_correction1 = 1 - rule.beta1 ** step.double()
    bias_correction2 = 1 - rule.beta2 ** step.double()
    return (-(rule.lr / bias_correction1)).to(dtype), bias_correction2.sqrt().to(dtype)
