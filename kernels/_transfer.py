"""Copies from one device to another; the host waits only where it is the one that reads."""

import torch
from torch import Tensor


def upload(values: Tensor, target: Tensor) -> None:
    """Copy a tensor on the CPU to one of the same shape and dtype on a device, without waiting.

    The pinned memory in between is torch's to reuse: it gives a piece to nobody else before the
    copy out of it is through, and what is pinned while a CUDA graph captures stays untouched as
    long as the graph lives (since torch 2.11).
    """
    if target.is_cuda:
        values = torch.empty_like(values, pin_memory=True).copy_(values)
    target.copy_(values, non_blocking=True)


def transfer(x: Tensor, device: torch.device) -> Tensor:
    """Return ``x`` on ``device``; the host waits where that is the CPU, and only there.

    Another GPU waits by itself. The CPU does not: it would read memory that the copy has not
    reached yet.
    """
    return x if x.device == device else x.to(device, non_blocking=device.type != "cpu")
