"""Arithmetic that the updates by moments share."""

import torch
from torch import Tensor

from tritonamp.apex.amp_C._lists import as_list


def corrections(beta1: float, beta2: float, step: int, bias_correction: int) -> tuple[float, float]:
    """Return what the moments are divided by after ``step`` steps; 1 without the correction."""
    return (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)


def adam_updates(
    grads: list[Tensor],
    moments: list[Tensor],
    squares: list[Tensor],
    betas: tuple[float, float],
    weight1: float,
    corrected: tuple[float, float],
    eps: float,
) -> list[Tensor]:
    """Move both moments of Adam in place, and return first moment over root of the second.

    Gradients enter the first moments times ``weight1``; both moments are divided by ``corrected``,
    as ``corrections`` returns it. All tensors are wide.
    """
    torch._foreach_mul_(moments, betas[0])
    torch._foreach_add_(moments, grads, alpha=weight1)
    torch._foreach_mul_(squares, betas[1])
    torch._foreach_addcmul_(squares, grads, grads, 1 - betas[1])
    updates = as_list(torch._foreach_div(moments, corrected[0]))
    torch._foreach_div_(updates, root(squares, corrected[1], eps))
    return updates


def root(squares: list[Tensor], correction: float, eps: float) -> list[Tensor]:
    """Return the root of ``squares / correction``, plus ``eps``."""
    roots = as_list(torch._foreach_div(squares, correction))
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, eps)
    return roots


def decayed(updates: list[Tensor], params: list[Tensor], weight_decay: float) -> list[Tensor]:
    """Return updates, or gradients, with ``weight_decay`` times the parameters added."""
    if weight_decay == 0:
        return updates
    return as_list(torch._foreach_add(updates, params, alpha=weight_decay))
