"""The fused rule of an optimizer, if it has one."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from tritonamp.class_swap import base_class
from tritonamp.step.adam import ADAM
from tritonamp.step.fused import FusedRule
from tritonamp.step.muon import MUON
from tritonamp.step.sgd import SGD

TORCH_RULES: tuple[FusedRule, ...] = (ADAM, SGD, MUON)
"""Rules of torch's own optimizers. Optimizers of ``tritonamp.optim`` name theirs."""


def rule_of(optimizer: Optimizer) -> FusedRule | None:
    """Return the fused rule of ``optimizer``; None: it runs its own step.

    A subclass with a ``step`` of its own has no rule, nor has a differentiable optimizer.
    """
    if optimizer.defaults.get("differentiable", False):
        return None
    if keeps_fp32_state(optimizer):
        return optimizer.fused_rule  # type: ignore[attr-defined]
    step = inspect.unwrap(_own_step(optimizer))  # torch puts a profiler around it
    rule = next((rule for rule in TORCH_RULES if rule.torch_step is step), None)
    return rule if rule is not None and rule.takes(optimizer) else None


def zero_eps(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> float | None:
    """Return the eps of a parameter group if a step in ``dtype`` rounds it to zero; else None.

    Optimizers that step in one pass compute in FP32.
    """
    eps = group.get("eps")
    if not isinstance(eps, float) or eps == 0.0 or rule_of(optimizer) is not None:
        return None
    states = (optimizer.state[p] for p in group["params"] if p in optimizer.state)
    values = (v for state in states for v in state.values() if isinstance(v, torch.Tensor))
    if any(v.dtype is torch.float32 and v.dim() > 0 for v in values):
        return None  # eps is added to FP32 state, as in Adagrad, which made the state before
    return eps if torch.tensor(eps, dtype=dtype) == 0 else None


def keeps_fp32_state(optimizer: Optimizer) -> bool:
    """Tell whether ``optimizer`` is of ``tritonamp.optim``: half parameters get FP32 state."""
    return hasattr(_own_step(optimizer), "by_fused_rule")


def has_half_state(optimizer: Optimizer) -> bool:
    """Tell whether the own step of ``optimizer`` takes state in the dtype of the parameters."""
    module: str = inspect.unwrap(_own_step(optimizer)).__module__
    return module.startswith("torch.optim.") and not keeps_fp32_state(optimizer)


def _own_step(optimizer: Optimizer) -> Any:
    # of its own class: enabled, ``step`` is that of ``EnabledOptimizer``
    return base_class(type(optimizer)).step  # type: ignore[attr-defined]
