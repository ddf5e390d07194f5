"""Which inputs the functions here compute with, and which they hand to torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._implementations import MIN_NUMEL
from tritonamp.policy import HALF_DTYPES

Compute = Callable[..., Any] | None
"""What computes the forward of a Function from its tensors, by ``TraceableOp.prepared``; None: the
operation itself does, which the arguments are for.
"""


def is_half(input: Any) -> bool:
    """Return whether ``input`` is a half tensor, and nobody has to look into what computes on it.

    Under torch.func a Function would hide what torch has to see.
    """
    if not isinstance(input, Tensor) or input.dtype not in HALF_DTYPES:
        return False
    # private, nothing public asks it (torch 2.11 to 2.15)
    return not torch._C._are_functorch_transforms_active()


def min_numel() -> int:
    """Return from which size this package computes: 0 under autocast, where torch returns FP32."""
    return 0 if torch.is_autocast_enabled("cuda") else MIN_NUMEL
