"""The choice between this package and torch, by the input."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tritonamp.kernels._implementations import MIN_NUMEL
from tritonamp.policy import HALF_DTYPES

HAS_NO_MEMORY = "has_no_memory"
"""Attribute of tensor classes that only torch's operations can read."""

Call = tuple[tuple[Any, ...], Callable[..., Any] | None]
"""The last argument of a Function: arguments of its operation that are no tensors, and the function
from ``TraceableOp.prepared`` that computes the forward from the tensors. None: the Function calls
the operation. One argument, because autograd takes 0.2 us for each.
"""


def is_half(input: Any) -> bool:
    """Return whether ``input`` is a half tensor outside transforms of torch.func, with memory."""
    if not isinstance(input, Tensor) or input.dtype not in HALF_DTYPES:
        return False
    return not is_under_transforms() and not hasattr(type(input), HAS_NO_MEMORY)


def is_under_transforms() -> bool:
    """Return whether a transform of torch.func or forward-mode AD is active.

    Functions are not used then because a transform cannot look into them.
    """
    # private (torch 2.11 to 2.15): there is no public name for either question
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def min_numel() -> int:
    """Return the least number of elements for this package on a GPU.

    It is 0 under autocast, because torch's result would be FP32 there.
    """
    return 0 if torch.is_autocast_enabled("cuda") else MIN_NUMEL
