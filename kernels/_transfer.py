"""Copies between devices. The host waits only if it is the one that reads the result."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

_KNOWN = Tensor, "cpu", torch.float32


def upload(values: Tensor, target: Tensor) -> None:
    """Copy a CPU tensor to one of the same shape and dtype on a device, without waiting.

    torch reuses the pinned memory in between only after the copy out of it is done. Memory that is
    pinned during the capture of a CUDA graph stays untouched while the graph lives (since torch
    2.11).
    """
    if target.is_cuda:
        # A copy out of pageable memory makes the host wait, and is refused while a graph is
        # captured.
        values = torch.empty_like(values, pin_memory=True).copy_(values)
    target.copy_(values, non_blocking=target.is_cuda)


def transfer(x: Tensor, device: torch.device) -> Tensor:
    """Return ``x`` on ``device``; the host waits only if ``device`` is the CPU."""
    # Another GPU waits for the copy by itself. The CPU does not: without the wait it would read
    # memory that the copy has not reached. Other accelerators may read ours too late.
    return x if x.device == device else x.to(device, non_blocking=device.type == "cuda")


def in_main_memory(flag: Tensor | None) -> float | None:
    """Return the value of a 0-d FP32 tensor on the CPU, or None for any other argument.

    The value is read from memory without an op of torch, so it costs little and counts as no wait.
    """
    if flag is None:
        return None
    known = all_in_main_memory([flag])
    return None if known is None else known[0]


def all_in_main_memory(flags: Sequence[Tensor]) -> list[float] | None:
    """Return the values of 0-d FP32 tensors on the CPU, or None if any tensor is another one."""
    # a subclass or a fake tensor may have no memory at its address
    kinds = {(type(flag), flag.device.type, flag.dtype) for flag in flags}
    if kinds != {_KNOWN} or torch.compiler.is_compiling():
        return None
    return [ctypes.c_float.from_address(flag.data_ptr()).value for flag in flags]
