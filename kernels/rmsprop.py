"""The rule of RMSprop, with momentum and centered, in the order of ``torch.optim.RMSprop``.

Source: Tieleman and Hinton, "Lecture 6.5 - rmsprop" (2012). A step without momentum, not centered,
moves 20 B/param with FP32 masters and half copies.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.kernels._shipped import Shipped
from tritonamp.kernels._state_formats import SIGNED, UNSIGNED
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
        tl.load(rule_ptr).to(tl.float32), alpha.to(tl.float32), (1.0 - alpha).to(tl.float32),
        tl.load(rule_ptr + 2).to(tl.float32), tl.load(rule_ptr + 3).to(tl.float32),
        tl.load(rule_ptr + 4).to(tl.float32),
    )  # fmt: skip
    return tl.load(grad_scale_ptr) * tl.load(rule_ptr + 5).to(tl.float32), rule


@triton.jit
def update(
    p, grad, v, buffer, mean, rule,
    FIRST: tl.constexpr, MOMENTUM: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """Return the parameter, the mean square, the momentum buffer and the mean after a step."""
    lr, alpha, weight1, eps, weight_decay, momentum = rule
    # weight decay, left out if it is 0, as in torch: 0 * p is NaN for an infinite p
    grad = tl.where(weight_decay == 0.0, grad, tl.fma(weight_decay, p, grad))
    # moments; torch.lerp starts from the end that is nearer
    v = tl.fma(v, alpha, weight1 * grad * grad)
    variance = v
    if CENTERED:
        apart = grad - mean
        near = tl.fma(weight1 - 1.0, apart, grad)
        mean = tl.where(weight1 < 0.5, tl.fma(weight1, apart, mean), near)
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
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
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
    direction = grad / (variance.sqrt() + rule.eps)
    if buffer is not None:
        direction = buffer = buffer * rule.momentum + direction
    return p - rule.lr * direction, v, buffer, mean


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
    # the variance, a difference of two moments, could be far below 0
    needs_fp32=("grad_avgs",),
    counts_steps=True,
)


def shipped() -> Iterator[Shipped]:
    """Yield calls in all formats."""
    yield from shipped_updates(RMSPROP, _RULES, registers=72)
