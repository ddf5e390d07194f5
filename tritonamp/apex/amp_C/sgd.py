"""SGD with momentum."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonamp.apex.amp_C._lists import GRADS, PARAMS, Lists, as_list, checked, store, wide


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: Lists,
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Do a step of SGD, or skip it on the device.

    Args:
        chunk_size: accepted and ignored.
        noop_flag: one element, not 0 to skip the step; None does not skip.
        tensor_lists: gradients, parameters, momentum buffers; optionally half copies, which receive
            the rounded parameters.
        weight_decay: factor of the parameters in the gradients or the update.
        momentum: decay of the buffers; 0 does not use them.
        dampening: 1 minus the factor of gradients in the buffers.
        lr: learning rate.
        nesterov: whether to step by gradient plus ``momentum`` times buffer, not by the buffer.
        first_run: whether the buffers are overwritten with the undampened gradients.
        wd_after_momentum: whether weight decay is added to the update, not to the gradient.
        scale: factor of the gradients, which keep their values.
    """
    names = GRADS, PARAMS, "momentum buffers"
    lists = checked("multi_tensor_sgd", tensor_lists, *names, optional="half copies")
    if not len(lists[0]):
        return
    grads, params, buffers = map(wide, lists[:3])
    if noop_flag is not None:  # the present values may have to stay
        params, buffers = ([t.clone() for t in tensors] for tensors in (params, buffers))
    if scale != 1:
        grads = as_list(torch._foreach_mul(grads, scale))
    decays = (0.0, weight_decay) if wd_after_momentum else (weight_decay, 0.0)
    sgd_step(grads, params, buffers, decays, momentum, dampening, lr, nesterov, first_run)
    results = [(lists[1], params)]
    if momentum != 0:
        results.append((lists[2], buffers))
    results += [(copies, params) for copies in lists[3:]]
    if noop_flag is not None:
        results = [(tensors, _unless(noop_flag, tensors, values)) for tensors, values in results]
    store(*zip(*results, strict=True))


def _unless(noop_flag: Tensor, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """Return the values to store: those of ``tensors`` if the flag is not 0."""
    skip = (noop_flag != 0).reshape(())
    return [torch.where(skip, t, v.to(t.dtype)) for t, v in zip(tensors, values, strict=True)]


def sgd_step(
    grads: list[Tensor],
    params: list[Tensor],
    buffers: list[Tensor],
    decays: tuple[float, float],
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    rounded_to: Sequence[torch.dtype] = (),
) -> None:
    """Do a step on wide tensors in place, in the order of operations of ``torch.optim.SGD``.

    The arguments are those of ``multi_tensor_sgd`` and these. ``decays`` has the weight decay
    before and after the momentum. ``rounded_to`` has dtypes to which the buffers are rounded before
    the step uses them.
    """
    before, after = decays
    if before != 0:
        grads = as_list(torch._foreach_add(grads, params, alpha=before))
    if momentum != 0:
        if first_run:
            torch._foreach_copy_(buffers, grads)
        else:
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, grads, alpha=1 - dampening)
        for buffer, dtype in zip(buffers, rounded_to, strict=False):
            buffer.copy_(buffer.to(dtype))
        grads = as_list(torch._foreach_add(grads, buffers, alpha=momentum)) if nesterov else buffers
    if after != 0:
        grads = as_list(torch._foreach_add(grads, params, alpha=after))
    torch._foreach_add_(params, grads, alpha=-lr)
