"""Copies from one device to another; the host waits only where it is the one that reads."""

import ctypes

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


def in_main_memory(flag: Tensor | None) -> float | None:
    """Return the value of a 0-d tensor on the CPU; None: it is elsewhere, or has no memory.

    It is read past torch, so it costs no op, and nobody takes it for a wait.
    """
    plain = type(flag) is Tensor and flag.device.type == "cpu" and flag.dtype is torch.float32
    if flag is None or not plain or torch.compiler.is_compiling():
        return None
    return ctypes.c_float.from_address(flag.data_ptr()).value
