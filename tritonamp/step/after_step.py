"""Functions of the user that run after each step, taken or skipped."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tritonamp.fp32_values import Fp32Values
from tritonamp.kernels.device import is_capturing


def check_function(function: Any) -> None:
    """Raise ValueError if ``function`` cannot be called with one tensor."""
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:  # no function, or one with other arguments
        raise ValueError(
            "function: expected a function of one tensor (taken), got "
            f"{getattr(function, '__qualname__', type(function).__name__)}: {error}"
        ) from error
    except ValueError:
        pass  # code in C need not tell its arguments


Hook = tuple[Callable[[Tensor], Any], Sequence[Optimizer]]


class AfterStep:
    """The functions of ``Amp.after_step``, in the order in which they were added.

    ::

        the step is done, or was skipped -> each function, with the flag ``taken``
                                         -> half tensors follow the FP32 values

    Args:
        fp32_values: FP32 values of the models' half tensors.

    Attributes:
        hooks: function and its optimizers, by number of the handle.
    """

    def __init__(self, fp32_values: Fp32Values) -> None:
        # ordered, because a handle refers to the dictionary weakly, which a plain one forbids
        self.hooks: OrderedDict[int, Hook] = OrderedDict()
        self._fp32_values = fp32_values

    def add(
        self, function: Callable[[Tensor], Any], optimizers: Sequence[Optimizer]
    ) -> RemovableHandle:
        """Call a function after each step of some optimizers, until the handle is removed.

        Args:
            function: function of a 0-d bool tensor.
            optimizers: enabled optimizers.
        """
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = function, optimizers
        return handle

    def check_capture(self, params: Sequence[Tensor]) -> None:
        """Raise RuntimeError if a CUDA graph captures a step after which functions would run."""
        if any(is_capturing(device) for device in {param.device for param in params}):
            raise RuntimeError(
                "amp.after_step: expected no function while a CUDA graph captures "
                f"optimizer.step(), got {len(self.hooks)}: replays run no Python, so call remove() "
                "of the handle, and call the function after each replay"
            )

    @torch.no_grad()
    def run(self, optimizer: Optimizer, found_inf: Tensor) -> None:
        """Call the functions of an optimizer, whose step is done.

        Half tensors get the FP32 values that the functions wrote, also after an exception.

        Args:
            optimizer: the optimizer.
            found_inf: 0-d flag, not 0 if the step was skipped.
        """
        # a list, because a function may remove its own handle
        functions = [f for f, optimizers in list(self.hooks.values()) if optimizer in optimizers]
        if not functions:
            return
        taken = found_inf == 0
        try:
            for function in functions:
                function(taken)
        finally:
            # Now and not in the next forward, because a compiled forward or a CUDA graph would
            # not do it.
            self._fp32_values.push()
            # lent FP32 tensors would take memory until the next step
            self._fp32_values.note_step()
