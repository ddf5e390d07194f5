"""Modules of torch that compute a softmax or a sigmoid of half input, with an FP32 result."""

from collections.abc import Callable
from typing import Any

from torch import nn

from tritonamp.casts.enabled_module import Fp32Module
from tritonamp.casts.written import ops


class WideResult(Fp32Module):
    """A softmax or sigmoid module whose result is FP32.

    Code takes the logarithm of the result or divides by it, or a model returns it.
    """

    @staticmethod
    def _run(module: Any, forward: Callable[..., Any], bound: Any, args: Any, kwargs: Any) -> Any:
        """Run the forward. Arguments are those of ``enabled_forward``."""
        if isinstance(module, nn.Softmax) and len(args) == 1 and not kwargs:
            # the kernel reads half input, without a copy in FP32
            return nn.functional.softmax(args[0], module.dim, 5, ops.wide(args[0]))
        kwargs = {name: ops.fp32(value) for name, value in kwargs.items()}
        return forward(*bound, *map(ops.fp32, args), **kwargs)
