"""Arithmetic that the updates by moments share."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tritonamp.apex.amp_C._lists import as_list


def corrections(beta1: float, beta2: float, step: int, bias_correction: int) -> tuple[float, float]:
    """Return the divisors of the moments after ``step`` steps; 1 without the correction."""
    return (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)


def adam_updates(
    lists: Iterable[list[Tensor]],
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float = 0.0,
    mode: int = 0,
    grad_averaging: int = 1,
) -> list[Tensor]:
    """Move both moments of Adam in place; return first moment over root of the second, decayed.

    ``lists`` are wide gradients, parameters, first and second moments; the others are arguments of
    ``amp_C``.
    """
    grads, params, moments, squares = lists
    if mode == 0:
        grads = decayed(grads, params, weight_decay)
    torch._foreach_mul_(moments, beta1)
    torch._foreach_add_(moments, grads, alpha=1 - beta1 if grad_averaging else 1.0)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
    correction1, correction2 = corrections(beta1, beta2, step, bias_correction)
    updates = as_list(torch._foreach_div(moments, correction1))
    torch._foreach_div_(updates, root(squares, correction2, eps))
    return decayed(updates, params, weight_decay) if mode == 1 else updates


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
