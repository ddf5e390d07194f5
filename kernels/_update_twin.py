"""Masters of an update, loaded and stored in torch with the bits of ``_update_kernel``."""

import torch
from torch import Tensor

from tritonamp.kernels._memory_order import in_memory_of, in_order_of_memory
from tritonamp.kernels._packed_masters import join_master, split_master
from tritonamp.kernels._update_lists import PendingWrites


def load_master(param: Tensor, remainder: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the values to step on, in the shape of ``param``."""
    if remainder is None or remainder is param:  # an FP32 parameter is its own master
        return param.to(dtype)
    flat = join_master(in_order_of_memory(param), remainder[: param.numel()])
    return in_memory_of(param, flat)


def put_master(
    results: PendingWrites,
    param: Tensor,
    remainder: Tensor | None,
    copy: Tensor,
    p: Tensor,
    overflow: Tensor,
) -> Tensor:
    """Plan to write stepped-on values and their copy; return the model's new values.

    Args:
        results: planned writes, to which these are added.
        param: stepped-on tensor of the call.
        remainder: 16 more bits of ``param``; None or ``param`` itself: there are none.
        copy: half copy of ``param``; ``param`` itself: there is none.
        p: new values, FP32 or FP64.
        overflow: flag to set if a finite value becomes inf in half.
    """
    if remainder is not None and remainder is not param:
        half, rest = split_master(in_order_of_memory(p, like=param), param.dtype)
        results.put(remainder[: param.numel()], rest)
        # The first write only sets the flag. The second one stays, because it is later: it writes
        # ``half``, whose ties of bfloat16 are rounded away from 0.
        results.put_copy(param, p, overflow)
        results.put(param, in_memory_of(param, half))
        return in_memory_of(param, half)
    results.put(param, p)
    if copy is not param:
        results.put_copy(copy, p, overflow)
    return p.to(copy.dtype)
