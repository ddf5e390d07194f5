"""The rule of AdamW and Adam. A step moves 28 B/param with FP32 masters and half copies.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), and Kingma and Ba,
"Adam" (2015), in the order of operations of ``torch.optim.AdamW``.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.kernels._cpu_steps import adamw_on_cpu, corrected_rates
from tritonamp.kernels._shipped import Shipped
from tritonamp.kernels._state_formats import SIGNED, UNSIGNED
from tritonamp.kernels._update import Update
from tritonamp.kernels._update_samples import shipped_updates
from tritonamp.kernels.device import tl, triton


class AdamRule(NamedTuple):
    """Hyperparameters of one group, named as in ``torch.optim.AdamW``.

    ``decoupled_weight_decay`` is True for AdamW and False for Adam's L2 term.
    """

    lr: float | Tensor
    beta1: float | Tensor
    beta2: float | Tensor
    eps: float
    weight_decay: float
    decoupled_weight_decay: bool
    amsgrad: bool
    maximize: bool

    def numbers(self) -> Sequence[float | Tensor]:
        """Return the row of numbers that ``prepare`` reads."""
        signs = float(self.decoupled_weight_decay), -1.0 if self.maximize else 1.0
        return *self[:5], *signs


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


@triton.jit
def prepare(rule, step, grad_scale_ptr, rates, mask):
    """Store the rates of a step, computed in FP64 and rounded once."""
    lr = tl.load(rule, mask=mask)
    beta1, beta2 = tl.load(rule + 1, mask=mask), tl.load(rule + 2, mask=mask)
    eps, weight_decay = tl.load(rule + 3, mask=mask), tl.load(rule + 4, mask=mask)
    decoupled, sign = tl.load(rule + 5, mask=mask), tl.load(rule + 6, mask=mask)
    # in FP64, because for beta2 = 0.999 FP32 would lose ten bits of the first corrections
    bias_correction1 = 1.0 - _power(beta1, step.to(tl.int32))
    bias_correction2 = 1.0 - _power(beta2, step.to(tl.int32))
    # the sign for maximize is part of the factor, so that elements need no further multiplication
    tl.store(rates, tl.load(grad_scale_ptr) * sign.to(tl.float32), mask=mask)
    decay = tl.where(decoupled != 0.0, 1.0 - lr * weight_decay, 1.0)
    l2 = tl.where(decoupled != 0.0, 0.0, weight_decay)
    tl.store(rates + 1, decay.to(tl.float32), mask=mask)
    tl.store(rates + 2, l2.to(tl.float32), mask=mask)
    # 1 - beta is rounded once from FP64: the difference of FP32 values would lose digits near 1
    tl.store(rates + 3, (1.0 - beta1).to(tl.float32), mask=mask)
    tl.store(rates + 4, beta2.to(tl.float32), mask=mask)
    tl.store(rates + 5, (1.0 - beta2).to(tl.float32), mask=mask)
    tl.store(rates + 6, tl.sqrt(bias_correction2).to(tl.float32), mask=mask)
    tl.store(rates + 7, eps.to(tl.float32), mask=mask)
    tl.store(rates + 8, (-lr / bias_correction1).to(tl.float32), mask=mask)


@triton.jit
def load_rule(rates, grad_scale_ptr):
    """Return the factor on gradients and the other rates of a tensor."""
    return tl.load(rates), (
        tl.load(rates + 1), tl.load(rates + 2), tl.load(rates + 3), tl.load(rates + 4),
        tl.load(rates + 5), tl.load(rates + 6), tl.load(rates + 7), tl.load(rates + 8),
    )  # fmt: skip


@triton.jit
def update(
    p, grad, m, v, v_max, rates, FIRST: tl.constexpr, SECOND: tl.constexpr, AMSGRAD: tl.constexpr
):
    """Return p, m, v and v_max after a step.

    Each sum with a product is written as an fma. Otherwise the compiler would decide where to fuse
    by the surrounding code, and elements of a tail would be rounded unlike those of a tile.
    """
    decay, l2, weight1, beta2, weight2, correction, eps, rate = rates
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
    return tl.fma(p, decay, tl.div_rn(rate * m, denom)), m, v, v_max


def update_twin(
    p: Tensor, grad: Tensor, m: Tensor, v: Tensor, v_max: Tensor | None, rule: Any, step: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return what ``update`` returns."""
    # weight decay
    if rule.weight_decay != 0 and rule.decoupled_weight_decay:
        p = p * (1 - rule.lr * rule.weight_decay)
    elif rule.weight_decay != 0:
        grad = grad + rule.weight_decay * p
    # moments
    weight1, beta1 = 1 - rule.beta1, rule.beta1
    m = m.lerp(grad, weight1.to(m) if isinstance(beta1, Tensor) else weight1)
    # The product of gradients is rounded before the sum, so that runs that resume from older
    # checkpoints keep their bits.
    v = v * rule.beta2 + grad * (1 - rule.beta2) * grad
    v_max = v_max if v_max is None else torch.maximum(v_max, v)
    # update
    rate, correction = corrected_rates(rule, step, p.dtype)
    denom = (v if v_max is None else v_max).sqrt() / correction + rule.eps
    return p + rate * m / denom, m, v, v_max


_RULE = AdamRule(0.01, 0.9, 0.99, 1e-8, 0.01, True, False, False)
_RULES = _RULE, _RULE._replace(amsgrad=True)

ADAMW = adamw = Update(
    "adamw",
    AdamRule,
    {"exp_avgs": SIGNED, "exp_avg_sqs": UNSIGNED, "max_exp_avg_sqs": UNSIGNED},
    load_rule,
    update,
    update_twin,
    rules=_RULES,
    optional={"max_exp_avg_sqs": "amsgrad"},
    counts_steps=True,
    prepare=prepare,
    prepared=9,
    on_cpu=adamw_on_cpu,
)


def shipped() -> Iterator[Shipped]:
    """Yield calls in all formats."""
    yield from shipped_updates(ADAMW, _RULES)
