"""Calls in ``torch.inference_mode`` that leave something behind."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tritonamp.kernels._dynamo import never_alone

F = TypeVar("F", bound=Callable[..., Any])


def leaves_inference_mode(function: F) -> F:
    """Run ``function`` outside of inference mode, without gradients, if it is called inside.

    For functions that make tensors which last: a tensor made in inference mode could not be written
    to outside of it, nor be in a graph.
    """

    def outside(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    never_alone(outside)
    wrapped: Any = functools.update_wrapper(outside, function)
    return wrapped
