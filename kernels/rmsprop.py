"""The rule of RMSprop. A step moves 20 B/param with FP32 masters and half copies.

With momentum or centered it moves 28, with both 36.

Source: Tieleman and Hinton, "Lecture 6.5 - rmsprop" (2012), and Graves, "Generating Sequences With
Recurrent Neural Networks" (2013), in the order of operations of ``torch.optim.RMSprop``.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.kernels._shipped import Shipped
from tritonamp.kernels._small_state import SIGNED, UNSIGNED
from tritonamp.kernels._update import Update
from tritonamp.kernels._update_samples import shipped_updates
from tritonamp.kernels.device import tl, triton


class RMSpropRule(NamedTuple):
    """Hyperparameters of one group, named as in ``torch.optim.RMSprop``."""

    lr: float | Tensor
    alpha: float
    eps: float
    weight_decay: float
    momentum: float
    centered: bool
    maximize: bool

    def numbers(self) -> Sequence[float | Tensor]:
        """Return the row of numbers that ``load_rule`` reads."""
        return *self[:5], -1.0 if self.maximize else 1.0


@triton.jit
def load_rule(rule_ptr, grad_scale_ptr):
    """Return the factor on gradients and the multipliers of a step."""
    alpha = tl.load(rule_ptr + 1)
    rule = (
        tl.load(rule_ptr).to(tl.float32), alpha.to(tl.float32),
        # the difference in FP64, because FP32 would lose digits of 1 - alpha
        (1.0 - alpha).to(tl.float32),
        tl.load(rule_ptr + 2).to(tl.float32), tl.load(rule_ptr + 3).to(tl.float32),
        tl.load(rule_ptr + 4).to(tl.float32),
    )  # fmt: skip
    return tl.load(grad_scale_ptr) * tl.load(rule_ptr + 5).to(tl.float32), rule


@triton.jit
def update(
    p, grad, v, buffer, mean, rule,
    FIRST: tl.constexpr, MOMENTUM: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """Return the parameter, the squares, the momentum buffer and the mean after a step.

    Each sum with a product is an fma, for the reason that the update of ``adamw`` gives.
    """
    lr, alpha, weight, eps, weight_decay, momentum = rule
    # weight decay, left out if it is 0, as in torch: 0 * p is NaN for an infinite p
    grad = tl.where(weight_decay == 0.0, grad, tl.fma(weight_decay, p, grad))
    # moments
    v = tl.fma(v, alpha, weight * grad * grad)
    variance = v
    if CENTERED:
        mean = tl.fma(weight, grad - mean, mean)
        variance = tl.fma(-mean, mean, v)
    # update, with correctly rounded root and quotient
    step = tl.div_rn(grad, tl.sqrt_rn(variance) + eps)
    if MOMENTUM:
        buffer = tl.fma(buffer, momentum, step)
        step = buffer
    return tl.fma(-lr, step, p), v, buffer, mean


def update_twin(
    p: Tensor,
    grad: Tensor,
    v: Tensor,
    buffer: Tensor | None,
    mean: Tensor | None,
    rule: Any,
    step: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return what ``update`` returns."""
    # weight decay
    if rule.weight_decay != 0:
        grad = torch.add(grad, p, alpha=rule.weight_decay)
    # moments
    v = (v * rule.alpha).addcmul(grad, grad, value=1 - rule.alpha)
    variance = v
    if mean is not None:
        mean = mean.lerp(grad, 1 - rule.alpha)
        variance = v.addcmul(mean, mean, value=-1)
    # update
    quotient = grad / (variance.sqrt() + rule.eps)
    if buffer is not None:
        buffer = quotient = buffer * rule.momentum + quotient
    return p - rule.lr * quotient, v, buffer, mean


_RULE = RMSpropRule(0.01, 0.99, 1e-8, 0.01, 0.0, False, False)
_RULES = _RULE, _RULE._replace(momentum=0.9), _RULE._replace(momentum=0.9, centered=True)

RMSPROP = rmsprop = Update(
    "rmsprop",
    RMSpropRule,
    {"square_avgs": UNSIGNED, "momentum_buffers": SIGNED, "grad_avgs": SIGNED},
    load_rule,
    update,
    update_twin,
    rules=_RULES,
    optional={"momentum_buffers": "momentum", "grad_avgs": "centered"},
    counts_steps=True,
)


def shipped() -> Iterator[Shipped]:
    """Yield calls in all formats."""
    yield from shipped_updates(RMSPROP, _RULES)
