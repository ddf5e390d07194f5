"""Which inputs the functions here compute with, and which they hand to torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tritonamp.kernels._implementations import MIN_NUMEL
from tritonamp.policy import HALF_DTYPES

Compute = Callable[..., Any] | None
"""What computes the forward of a Function from its tensors, by ``TraceableOp.prepared``; None: the
operation itself does, which the arguments are for.
"""


def is_half(input: Any) -> bool:
    """Return whether ``input`` is a half tensor that torch.func does not transform."""
    return isinstance(input, Tensor) and input.dtype in HALF_DTYPES and not is_under_transforms()


def is_under_transforms() -> bool:
    """Return whether torch.func or forward-mode AD transforms what runs.

    A Function would hide it from torch.
    """
    # private, nothing public asks them (torch 2.11 to 2.15)
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def min_numel() -> int:
    """Return from which size this package computes: 0 under autocast, where torch returns FP32."""
    return 0 if torch.is_autocast_enabled("cuda") else MIN_NUMEL
