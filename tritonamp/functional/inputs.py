"""The choice between this package and torch, by the input."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tritonamp.kernels._by_length import asked_backend
from tritonamp.kernels._dynamo import constant_to_dynamo
from tritonamp.kernels._implementations import MIN_NUMEL
from tritonamp.policy import HALF_DTYPES

HAS_NO_MEMORY = "has_no_memory"
"""Attribute of tensor classes that only torch's operations can read."""

Call = tuple[tuple[Any, ...], Callable[..., Any] | None]
"""The last argument of a Function: arguments of its operation that are no tensors, and the function
from ``TraceableOp.prepared`` that computes the forward from the tensors. None: the Function calls
the operation. One argument, because autograd takes 0.2 us for each.
"""


class _InForce:
    """The backend of the enabled forward that this thread is in.

    ``casts`` knows it. It sets ``ask`` when it is imported, because this package cannot import it.

    Attributes:
        ask: function that returns the backend, or None outside of enabled forwards.
    """

    ask: Callable[[], str | None] = staticmethod(lambda: None)


in_force = _InForce()


@constant_to_dynamo
def backend_in_force() -> str:
    """Return the backend for a call without one.

    It is "auto", or the batch-invariant backend of the enabled forward that this thread is in.
    """
    backend = in_force.ask()
    return "auto" if backend is None or asked_backend(backend) is None else backend


def is_batch_invariant() -> bool:
    """Return whether this thread is in an enabled forward with ``batch_invariant``."""
    return backend_in_force() != "auto"


def takes(input: Any, wide: bool = False) -> bool:
    """Return whether ``input`` has a dtype for this package, memory, and no torch.func around it.

    The dtypes are float16 and bfloat16. If rows have the same bits in every batch, FP32 is one,
    too, because torch's kernels on a GPU depend on the number of rows; with ``wide`` it is always
    one.
    """
    if not isinstance(input, Tensor):
        return False
    is_wide = input.dtype is torch.float32 and (wide or is_batch_invariant())
    if input.dtype not in HALF_DTYPES and not is_wide:
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

    It is 0 under autocast, because torch's result would be FP32 there, and where rows have the same
    bits in every batch.
    """
    return 0 if torch.is_autocast_enabled("cuda") or is_batch_invariant() else MIN_NUMEL
