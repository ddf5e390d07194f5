"""Adagrad."""

import torch
from torch import Tensor

from tritonamp.apex.amp_C._lists import GRADS, PARAMS, Lists, as_list, checked, store, wide
from tritonamp.apex.amp_C._moments import decayed, root


@torch.no_grad()
def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: Lists,
    lr: float,
    eps: float,
    mode: int,
    weight_decay: float,
) -> None:
    """Do a step of Adagrad on lists of gradients, parameters and sums of squares.

    ``eps`` is added to the root of the sums.
    """
    lists = checked("multi_tensor_adagrad", tensor_lists, GRADS, PARAMS, "sums of squares")
    if not len(lists[0]):
        return
    grads, params, sums = map(wide, lists)
    if mode == 0:
        grads = decayed(grads, params, weight_decay)
    torch._foreach_addcmul_(sums, grads, grads)
    updates = as_list(torch._foreach_div(grads, root(sums, 1.0, eps)))
    if mode == 1:
        updates = decayed(updates, params, weight_decay)
    torch._foreach_add_(params, updates, alpha=-lr)
    store(lists[1:], [params, sums])
