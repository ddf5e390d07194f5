"""Adam and AdamW."""

import torch
from torch import Tensor

from tritonamp.apex.amp_C._lists import GRADS, MOMENTS, PARAMS, SQUARES, Lists, checked, store, wide
from tritonamp.apex.amp_C._moments import adam_updates, corrections, decayed


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Do a step of Adam.

    Args:
        chunk_size: accepted and not needed.
        noop_flag: accepted and not needed: a step is not skipped here.
        tensor_lists: gradients, parameters, first moments, second moments.
        lr: the learning rate.
        beta1: the decay of the first moments.
        beta2: the decay of the second moments.
        eps: is added to the root of the second moments.
        step: counted from 1.
        mode: 0 adds weight decay to the gradients, 1 decouples it (AdamW).
        bias_correction: not 0: corrects the moments for their start at 0.
        weight_decay: the factor of the parameters that is added.
    """
    lists = checked("multi_tensor_adam", tensor_lists, GRADS, PARAMS, MOMENTS, SQUARES)
    if not len(lists[0]):
        return
    grads, params, moments, squares = map(wide, lists)
    if mode == 0:
        grads = decayed(grads, params, weight_decay)
    corrected = corrections(beta1, beta2, step, bias_correction)
    updates = adam_updates(grads, moments, squares, (beta1, beta2), 1 - beta1, corrected, eps)
    if mode == 1:
        updates = decayed(updates, params, weight_decay)
    torch._foreach_add_(params, updates, alpha=-lr)
    store(lists[1:], [params, moments, squares])
