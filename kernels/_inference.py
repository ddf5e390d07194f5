"""Functions that create persistent tensors, called in ``torch.inference_mode``."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tritonamp.kernels._dynamo import never_alone

F = TypeVar("F", bound=Callable[..., Any])


def leaves_inference_mode(function: F) -> F:
    """Run ``function`` outside of inference mode, without gradients, if it is called inside.

    It is for functions that create persistent tensors, because a tensor that was created in
    inference mode can later be neither written to outside of it nor part of a graph.
    """

    def outside(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        # no_grad, because inference_mode(False) alone turns the recording of gradients on
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    # the wrapper has a frame of its own, which torch.compile would otherwise trace
    never_alone(outside)
    wrapped: Any = functools.update_wrapper(outside, function)
    return wrapped
