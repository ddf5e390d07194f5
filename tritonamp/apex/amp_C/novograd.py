"""NovoGrad."""

import torch
from torch import Tensor

from tritonamp.apex.amp_C._lists import GRADS, MOMENTS, PARAMS, Lists, as_list, checked, store, wide
from tritonamp.apex.amp_C._moments import corrections, decayed


@torch.no_grad()
def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: Lists,
    grad_norms: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    norm_type: int,
) -> None:
    """Do a step of NovoGrad on lists of gradients, parameters and first moments.

    ``grad_norms``, float32 of shape (n,), has the running norm of each gradient instead of second
    moments, and is updated in place. ``norm_type`` is 2, or 0 for the largest absolute value.
    ``mode`` 0 normalises and decays inside the first moment, 1 outside.
    """
    lists = checked("multi_tensor_novograd", tensor_lists, GRADS, PARAMS, MOMENTS)
    if not len(lists[0]):
        return
    grads, params, moments = map(wide, lists)
    norms = torch.stack(torch._foreach_norm(grads, 2 if norm_type == 2 else float("inf")))
    if norm_type == 2:
        grad_norms.copy_((beta2 * grad_norms**2 + (1 - beta2) * norms**2).sqrt())
    else:
        grad_norms.copy_(beta2 * grad_norms + (1 - beta2) * norms)
    correction1, correction2 = corrections(beta1, beta2, step, bias_correction)
    denoms = (grad_norms / correction2**0.5 + eps).unbind()
    if mode == 0:
        grads = decayed(as_list(torch._foreach_div(grads, denoms)), params, weight_decay)
    torch._foreach_mul_(moments, beta1)
    torch._foreach_add_(moments, grads, alpha=1 - beta1 if grad_averaging else 1)
    updates = as_list(torch._foreach_div(moments, correction1))
    if mode == 1:
        updates = decayed(as_list(torch._foreach_div(updates, denoms)), params, weight_decay)
    torch._foreach_add_(params, updates, alpha=-lr)
    store(lists[1:], [params, moments])
