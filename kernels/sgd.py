"""The rule of SGD with momentum. A step moves 20 B/param with FP32 masters and half copies.

Source: Sutskever et al., "On the importance of initialization and momentum in deep learning"
(2013), in the form and the order of operations of ``torch.optim.SGD``.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.kernels._cpu_steps import sgd_on_cpu
from tritonamp.kernels._shipped import Shipped
from tritonamp.kernels._state_formats import SIGNED
from tritonamp.kernels._update import Update
from tritonamp.kernels._update_samples import shipped_updates
from tritonamp.kernels.device import tl, triton


class SGDRule(NamedTuple):
    """Hyperparameters of one group, named as in ``torch.optim.SGD``."""

    lr: float | Tensor
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool

    def numbers(self) -> Sequence[float | Tensor]:
        """Return the row of numbers that ``load_rule`` reads."""
        sign = -1.0 if self.maximize else 1.0
        return *self[:4], float(self.nesterov), sign


@triton.jit
def load_rule(rule_ptr, grad_scale_ptr):
    """Return the factor on gradients and the multipliers of a step."""
    rule = (
        tl.load(rule_ptr).to(tl.float32), tl.load(rule_ptr + 1).to(tl.float32),
        tl.load(rule_ptr + 2).to(tl.float32), tl.load(rule_ptr + 3).to(tl.float32),
        tl.load(rule_ptr + 4).to(tl.float32),
    )  # fmt: skip
    return tl.load(grad_scale_ptr) * tl.load(rule_ptr + 5).to(tl.float32), rule


@triton.jit
def update(
    p, grad, buffer, b, c, rule, MOMENTUM: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr
):
    """Return the parameter and the momentum buffer after a step.

    Each sum with a product is an fma, for the reason that the update of ``adamw`` gives.
    """
    lr, momentum, dampening, weight_decay, nesterov = rule
    # weight decay, left out if it is 0, as in torch: 0 * p is NaN for an infinite p
    grad = tl.where(weight_decay == 0.0, grad, tl.fma(weight_decay, p, grad))
    # momentum
    if MOMENTUM:
        buffer = tl.fma(buffer, momentum, (1.0 - dampening) * grad)
        # nesterov is a number instead of a constant, so that one build serves all groups of a
        # launch
        grad = tl.where(nesterov != 0.0, tl.fma(momentum, buffer, grad), buffer)
    # update
    return tl.fma(-lr, grad, p), buffer, b, c


def update_twin(
    p: Tensor, grad: Tensor, buffer: Tensor | None, rule: Any, step: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the parameter and the momentum buffer that ``update`` returns."""
    # weight decay
    if rule.weight_decay != 0:
        grad = torch.add(grad, p, alpha=rule.weight_decay)
    # momentum
    if buffer is not None:
        buffer = torch.add(buffer * rule.momentum, grad, alpha=1 - rule.dampening)
        grad = torch.add(grad, buffer, alpha=rule.momentum) if rule.nesterov else buffer
    # update
    if isinstance(rule.lr, Tensor) and rule.lr.device.type != "cpu":  # reading it would wait
        return p - rule.lr.to(p) * grad, buffer
    return torch.add(p, grad, alpha=-float(rule.lr)), buffer


_RULE = SGDRule(0.01, 0.9, 0.0, 0.01, True, False)
_RULES = _RULE, _RULE._replace(momentum=0.0, nesterov=False)

# The buffer of a first step is zeros, and the caller passes dampening 0 for it, as torch does.
SGD = sgd = Update(
    "sgd",
    SGDRule,
    {"momentum_buffers": SIGNED},
    load_rule,
    update,
    update_twin,
    rules=_RULES,
    optional={"momentum_buffers": "momentum"},
    max_registers=64,  # without a limit, ptxas takes 48 on sm_100 and spills
    on_cpu=sgd_on_cpu,
)


def shipped() -> Iterator[Shipped]:
    """Yield calls in all formats."""
    yield from shipped_updates(SGD, _RULES)
