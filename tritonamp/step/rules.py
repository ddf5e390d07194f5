"""The fused rule of an optimizer, if the optimizer has one."""

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from tritonamp.class_swap import base_class
from tritonamp.step.fused_rule import FusedRule
from tritonamp.step.muon import MUON
from tritonamp.step.rule_table import RULES

_USUAL_EPS = 1e-8


def rule_of(optimizer: Optimizer) -> FusedRule | None:
    """Return the fused rule of ``optimizer``; None: the optimizer runs its own step.

    A subclass of torch's optimizer that overrides ``step`` has no rule. A differentiable optimizer
    has none either.
    """
    # a differentiable step builds a graph through the update, which a kernel cannot
    return None if _is_differentiable(optimizer) else _rule_of_kind(optimizer)


def _is_differentiable(optimizer: Optimizer) -> bool:
    return bool(optimizer.defaults.get("differentiable", False))


def _rule_of_kind(optimizer: Optimizer) -> FusedRule | None:
    """Return the fused rule that ``optimizer`` has unless it is differentiable."""
    if keeps_fp32_state(optimizer):
        return optimizer.fused_rule  # type: ignore[attr-defined]
    # Rules are found by the step function, not by the class. A subclass that overrides ``step``
    # wants its own arithmetic, and one that does not override it is stepped as its base class is.
    # torch wraps ``step`` for the profiler.
    step = inspect.unwrap(_own_step(optimizer))
    rule = next((rule for rule in (*RULES, MUON) if rule.torch_step is step), None)
    return rule if rule is not None and rule.takes(optimizer) else None


def check_differentiable(
    optimizer: Optimizer, state: str, masters: str | None, offload: str | None = None
) -> None:
    """Raise ValueError if a differentiable optimizer is asked for work of a fused step.

    Other checks refuse kinds of optimizers without a fused step, differentiable or not.

    Args:
        optimizer: optimizer of any kind.
        state: wanted format of the state.
        masters: wanted form of the masters.
        offload: wanted ``Policy.offload``.
    """
    if not _is_differentiable(optimizer) or _rule_of_kind(optimizer) is None:
        return
    wanted = {"state": state, "masters": masters, "offload": offload}
    for name, value in wanted.items():
        if value not in (None, "fp32"):
            raise ValueError(
                f"{name}={value!r}: expected an optimizer with a fused step, got "
                f"{type(optimizer).__name__} with differentiable=True, which takes torch's step: "
                "leave differentiable out, or, for tensors that are no leaves and need it, leave "
                f"{name} out"
            )


def zero_eps(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> float | None:
    """Return the eps of a parameter group if a step in ``dtype`` rounds that eps to 0, else None.

    Optimizers with a fused rule compute in FP32, so their eps is never rounded.

    Args:
        optimizer: optimizer that holds the group.
        group: one of its parameter groups.
        dtype: dtype of the tensors that the optimizer steps on.
    """
    eps = group.get("eps")
    if not isinstance(eps, float) or eps == 0.0 or rule_of(optimizer) is not None:
        return None
    states = (optimizer.state[p] for p in group["params"] if p in optimizer.state)
    values = (v for state in states for v in state.values() if isinstance(v, torch.Tensor))
    if any(v.dtype is torch.float32 and v.dim() > 0 for v in values):
        # Adagrad makes its state when it is built, before the parameters become half: eps is added
        # to FP32 numbers there, and does not vanish.
        return None
    return eps if torch.tensor(eps, dtype=dtype) == 0 else None


def vanishing_eps(
    optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype
) -> float | None:
    """Return the eps of a parameter group if it is 0 or becomes 0 in a step, else None.

    Arguments are those of ``zero_eps``.
    """
    eps = group.get("eps")
    if isinstance(eps, float | int) and eps == 0:
        return 0.0
    return zero_eps(optimizer, group, dtype)


def least_eps(optimizer: Optimizer, dtype: torch.dtype) -> float:
    """Return an eps, 1e-8 or larger, that is not 0 in a step of ``optimizer`` in ``dtype``."""
    if rule_of(optimizer) is not None:
        return _USUAL_EPS
    normal = torch.finfo(dtype).smallest_normal
    return max(_USUAL_EPS, 10.0 ** math.ceil(math.log10(normal)))


def decay_of(optimizer: Optimizer, group: Mapping[str, Any]) -> float | None:
    """Return the weight decay of a parameter group if a step subtracts lr * decay * weight.

    None: there is no decay, or it is added to gradients that the step then normalises or sums up.
    """
    decay = group.get("weight_decay")
    is_plain = base_class(type(optimizer)) is torch.optim.SGD and not group.get("momentum")
    if not decay or not (is_plain or group.get("decoupled_weight_decay")):
        return None
    return float(decay)


def keeps_fp32_state(optimizer: Optimizer) -> bool:
    """Tell whether ``optimizer`` is of ``tritonamp.optim``, which keeps FP32 state."""
    return hasattr(_own_step(optimizer), "by_fused_rule")


def has_half_state(optimizer: Optimizer) -> bool:
    """Tell whether the own step of ``optimizer`` expects state in the dtype of the parameters."""
    # torch's optimizers make state in the dtype of the parameter. Those of other packages may keep
    # FP32 state of half parameters, and must get it back unrounded.
    module: str = inspect.unwrap(_own_step(optimizer)).__module__
    return module.startswith("torch.optim.") and not keeps_fp32_state(optimizer)


def _own_step(optimizer: Optimizer) -> Any:
    # Of the plain class: the ``step`` of an enabled optimizer is ``EnabledOptimizer.step``, which
    # would hide the step that the rule is found by.
    return base_class(type(optimizer)).step  # type: ignore[attr-defined]
