"""The rule of Lion. A step moves 20 B/param with FP32 masters and half copies.

Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), Algorithm 2::

    update = sign(beta1 * exp_avg + (1 - beta1) * grad)
    param  = param * (1 - lr * weight_decay) - lr * update
    exp_avg = beta2 * exp_avg + (1 - beta2) * grad
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tritonamp.kernels._cpu_steps import lion_on_cpu
from tritonamp.kernels._shipped import Shipped
from tritonamp.kernels._state_formats import SIGNED
from tritonamp.kernels._update import Update
from tritonamp.kernels._update_samples import shipped_updates
from tritonamp.kernels.device import tl, triton


class LionRule(NamedTuple):
    """Hyperparameters of one group."""

    lr: float | Tensor
    beta1: float | Tensor
    beta2: float | Tensor
    weight_decay: float
    maximize: bool

    def numbers(self) -> Sequence[float | Tensor]:
        """Return the row of numbers that ``load_rule`` reads."""
        return *self[:4], -1.0 if self.maximize else 1.0


@triton.jit
def load_rule(rule_ptr, grad_scale_ptr):
    """Return the factor on gradients and the multipliers of a step."""
    lr, beta1, beta2 = tl.load(rule_ptr), tl.load(rule_ptr + 1), tl.load(rule_ptr + 2)
    # differences in FP64, then one rounding: FP32 would lose digits of 1 - beta
    rule = (
        lr.to(tl.float32), (1.0 - lr * tl.load(rule_ptr + 3)).to(tl.float32),
        beta1.to(tl.float32), (1.0 - beta1).to(tl.float32),
        beta2.to(tl.float32), (1.0 - beta2).to(tl.float32),
    )  # fmt: skip
    return tl.load(grad_scale_ptr) * tl.load(rule_ptr + 4).to(tl.float32), rule


@triton.jit
def update(p, grad, m, b, c, rule, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr):
    """Return the parameter and the moment after a step.

    Each sum with a product is an fma, for the reason that the update of ``adamw`` gives.
    """
    lr, decay, beta1, weight1, beta2, weight2 = rule
    # update; comparisons, because torch.sign of NaN is 0
    x = tl.fma(beta1, m, weight1 * grad)
    sign = tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))
    # weight decay
    p = tl.fma(p, decay, -lr * sign)
    # moment
    return p, tl.fma(beta2, m, weight2 * grad), b, c


def update_twin(
    p: Tensor, grad: Tensor, m: Tensor, rule: Any, step: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the parameter and the moment that ``update`` returns."""
    # weight decay
    p = p * (1 - rule.lr * rule.weight_decay)
    # update
    x = m * rule.beta1 + grad * (1 - rule.beta1)
    p = p - x.sign() * rule.lr
    # moment
    return p, m * rule.beta2 + grad * (1 - rule.beta2)


_RULES = (LionRule(0.01, 0.9, 0.99, 0.01, False),)

# A moment in bfloat16 is rounded to the nearest, because a step changes it by more than a last bit.
LION = lion = Update(
    "lion",
    LionRule,
    {"exp_avgs": SIGNED},
    load_rule,
    update,
    update_twin,
    rules=_RULES,
    on_cpu=lion_on_cpu,
)


def shipped() -> Iterator[Shipped]:
    """Yield calls in all formats."""
    yield from shipped_updates(LION, _RULES)
