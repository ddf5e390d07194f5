"""Adam and AdamW."""

import torch
from torch import Tensor

from tritonamp.apex.amp_C._lists import GRADS, MOMENTS, PARAMS, SQUARES, Lists, checked, store, wide
from tritonamp.apex.amp_C._moments import adam_updates


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
    """Do a step of Adam on lists of gradients, parameters, first moments and second moments."""
    lists = checked("multi_tensor_adam", tensor_lists, GRADS, PARAMS, MOMENTS, SQUARES)
    if not len(lists[0]):
        return
    values = [*map(wide, lists)]
    updates = adam_updates(values, beta1, beta2, eps, step, bias_correction, weight_decay, mode)
    torch._foreach_add_(values[1], updates, alpha=-lr)
    store(lists[1:], values[1:])
