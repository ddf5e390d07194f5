"""The user's hooks of a step, and torch's profiler, around steps and skips of ours."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from tritonamp.diagnosis.scaled_gradients import before_step


def run_with_hooks(step: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
    """Run ``step`` inside the user's hooks and torch's profiler, if there are any.

    Undocumented or private, and the same from torch 2.11 to 2.15: torch's wrapper, which costs a
    twentieth of a step, and the places where torch keeps hooks.
    """
    seen = (
        torch._C._autograd._profiler_enabled(),
        any(hook is not before_step for hook in _global_optimizer_pre_hooks.values()),
        _global_optimizer_post_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    )
    if any(seen):
        step = Optimizer.profile_hook_step(step)
    step(optimizer)


def owner_of_hooks(optimizer: Any) -> Any:
    """Return the optimizer whose step runs hooks: the inner one of an optimizer around another."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
