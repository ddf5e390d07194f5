"""LAMB, in one call and in two."""

import torch
from torch import Tensor

from tritonamp.apex.amp_C._lists import (
    GRADS,
    MOMENTS,
    PARAMS,
    SQUARES,
    Lists,
    as_list,
    checked,
    store,
    wide,
)
from tritonamp.apex.amp_C._moments import adam_updates

UPDATES = "updates"


@torch.no_grad()
def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float,
    use_nvlamb: bool | None = False,
) -> None:
    """Do a step of LAMB on lists of gradients, parameters, first moments and second moments."""
    lists = checked("multi_tensor_lamb", tensor_lists, GRADS, PARAMS, MOMENTS, SQUARES)
    if not len(lists[0]):
        return
    grads, params, moments, squares = map(wide, lists)
    values = [_clipped(grads, global_grad_norm, max_grad_norm), params, moments, squares]
    arguments = beta1, beta2, eps, step, bias_correction, weight_decay, mode, grad_averaging
    updates = adam_updates(values, *arguments)
    norms, update_norms = (torch.stack(torch._foreach_norm(xs)) for xs in (params, updates))
    _step(params, updates, norms, update_norms, lr, weight_decay, use_nvlamb)
    store(lists[1:], [params, moments, squares])


@torch.no_grad()
def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: Lists,
    per_tensor_decay: Tensor,
    step: int,
    beta1: float,
    beta2: float,
    eps: float,
    global_grad_norm: Tensor,
    max_global_grad_norm: float,
) -> None:
    """Update the moments of LAMB, and write the updates without the trust ratio.

    The lists are gradients, parameters, first moments, second moments and updates, of which the
    last three are written. ``step`` counts from 0. ``per_tensor_decay``, shape (n,), has the factor
    of each parameter in its update.
    """
    names = GRADS, PARAMS, MOMENTS, SQUARES, UPDATES
    lists = checked("multi_tensor_lamb_stage1_cuda", tensor_lists, *names)
    if not len(lists[0]):
        return
    grads, params, moments, squares = map(wide, lists[:4])
    values = [_clipped(grads, global_grad_norm, max_global_grad_norm), params, moments, squares]
    updates = adam_updates(values, beta1, beta2, eps, step + 1, bias_correction=1)
    decays = as_list(torch._foreach_mul(params, per_tensor_decay.unbind()))
    torch._foreach_add_(updates, decays)
    store(lists[2:], [moments, squares, updates])


@torch.no_grad()
def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: Lists,
    per_tensor_param_norm: Tensor,
    per_tensor_update_norm: Tensor,
    lr: float,
    weight_decay: float,
    use_nvlamb: bool | None = False,
) -> None:
    """Step by the updates that ``multi_tensor_lamb_stage1_cuda`` has written.

    The lists are parameters and updates. The trust ratio is ``per_tensor_param_norm`` over
    ``per_tensor_update_norm``, both of shape (n,). It is 1 if either is 0, or if there is neither
    ``weight_decay`` nor ``use_nvlamb``.
    """
    lists = checked("multi_tensor_lamb_stage2_cuda", tensor_lists, PARAMS, UPDATES)
    if not len(lists[0]):
        return
    params, updates = map(wide, lists)
    norms = per_tensor_param_norm, per_tensor_update_norm
    _step(params, updates, *norms, lr, weight_decay, use_nvlamb)
    store(lists[:1], [params])


def _clipped(grads: list[Tensor], norm: Tensor, max_norm: float) -> list[Tensor]:
    return as_list(torch._foreach_div(grads, (norm / max_norm).clamp(min=1).reshape(())))


def _step(
    params: list[Tensor],
    updates: list[Tensor],
    norms: Tensor,
    update_norms: Tensor,
    lr: float,
    weight_decay: float,
    use_nvlamb: bool | None,
) -> None:
    """Step by ``updates``, times the trust ratio where there is one."""
    if use_nvlamb or weight_decay != 0:
        both = (norms != 0) & (update_norms != 0)
        trust = torch.where(both, norms / update_norms, 1.0)
        updates = as_list(torch._foreach_mul(updates, trust.unbind()))
    torch._foreach_add_(params, updates, alpha=-lr)
