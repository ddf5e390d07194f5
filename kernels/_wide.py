"""The widest floating dtype of a device, for numbers that FP32 would round too early."""

import torch
from torch import Tensor

_known: dict[torch.device, torch.dtype] = {}


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 for a device that lacks or may lack it, such as Apple's GPUs."""
    dtype = _known.get(device)
    if dtype is None:
        has_it = device.type in ("cpu", "cuda", "meta")
        if device.type == "xpu":
            has_it = torch.xpu.get_device_properties(device).has_fp64
        dtype = _known[device] = torch.float64 if has_it else torch.float32
    return dtype


def widened(x: Tensor) -> Tensor:
    """Return ``x`` in the ``wide_dtype`` of its device."""
    return x.to(wide_dtype(x.device))
