"""Softmaxes and sigmoids of torch, as modules, whose half inputs give FP32 results."""

from collections.abc import Callable
from typing import Any

from torch import nn

from tritonamp.casts.enabled_module import Fp32Module
from tritonamp.casts.written import ops


class WideResult(Fp32Module):
    """A module that ``written.probabilities.last_of`` knows, with an FP32 result.

    Code takes its logarithm or divides by it, or a model returns it.
    """

    @staticmethod
    def _run(module: Any, forward: Callable[..., Any], bound: Any, args: Any, kwargs: Any) -> Any:
        """Run the forward. Arguments are those of ``enabled_forward``."""
        if isinstance(module, nn.Softmax) and len(args) == 1 and not kwargs:
            # half input is read as it is, and not copied to FP32
            return nn.functional.softmax(args[0], module.dim, 5, ops.wide(args[0]))
        kwargs = {name: ops.fp32(value) for name, value in kwargs.items()}
        return forward(*bound, *map(ops.fp32, args), **kwargs)
