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
    """Do a step of SGD on gradients, parameters, momentum buffers; or, on the device, none.

    A fourth list is of half copies, which receive the rounded parameters.

    Args:
        chunk_size: accepted and not needed.
        noop_flag: one element, not 0: every bit stays as it was; None: as 0.
        tensor_lists: three, or four.
        weight_decay: the factor of the parameters that is added.
        momentum: the decay of the buffers; 0 leaves them alone.
        dampening: gradients enter the buffers times ``1 - dampening``.
        lr: the learning rate.
        nesterov: steps by gradient plus ``momentum`` times buffer, not by the buffer.
        first_run: the buffers receive the gradients, undampened, whatever they hold.
        wd_after_momentum: adds the weight decay to the update, not to the gradient.
        scale: a factor on the gradients, which keep their values.
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
    """Return what is to be stored: the tensors as they are where the flag is not 0."""
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

    Arguments are those of ``multi_tensor_sgd``, but ``decays``: weight decay before and after the
    momentum; and ``rounded_to``: dtypes that the buffers are rounded to before the step uses them.
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
