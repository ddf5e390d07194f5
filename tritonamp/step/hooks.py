"""The user's step hooks and torch's profiler, for steps and skips that tritonamp runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

of_plain_steps: set[Callable[..., Any]] = set()
"""Global hooks of add-ons that look for plain optimizers, and see nothing in an enabled step."""


def run_with_hooks(step: Callable[..., None], optimizer: Optimizer, *given: Any) -> None:
    """Run ``step`` inside the user's hooks and torch's profiler, if there are any.

    Args:
        step: function that steps or skips.
        optimizer: optimizer whose hooks run; the first argument of ``step``.
        *given: further arguments of ``step``.
    """
    # torch's wrapper costs a twentieth of a step, so a step without hooks goes without it. The
    # wrapper and the places where torch keeps hooks are private or undocumented, and the same from
    # torch 2.11 to 2.15.
    if (
        torch._C._autograd._profiler_enabled()
        or not of_plain_steps.issuperset(_global_optimizer_pre_hooks.values())
        or _global_optimizer_post_hooks
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
    ):
        # the user's hooks are handed the arguments of the wrapped function
        Optimizer.profile_hook_step(lambda optimizer: step(optimizer, *given))(optimizer)
    else:
        step(optimizer, *given)


def owner_of_hooks(optimizer: Any) -> Any:
    """Return the optimizer whose ``step`` runs the hooks.

    That is the innermost optimizer where one optimizer wraps another.
    """
    # An optimizer around another one need not call ``Optimizer.__init__``. Such a wrapper has no
    # dictionaries of hooks, and the user's hooks are registered on the inner one.
    while not hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
