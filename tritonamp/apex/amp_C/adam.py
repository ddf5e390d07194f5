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
    """Do a step of Adam on gradients, parameters, first moments, second moments."""
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
