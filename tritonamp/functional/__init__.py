"""Differentiable functions of half tensors: half storage, FP32 arithmetic.

The signatures are those of ``torch.nn.functional`` and ``torch``. On float16 and bfloat16 the
arithmetic is FP32 and each result is rounded once; every other dtype is handed to torch, and so are
inputs on a GPU that are too small to gain by a kernel: torch's own do the same there.
"""

from tritonamp.functional.rows import log_softmax as log_softmax
from tritonamp.functional.rows import softmax as softmax
from tritonamp.functional.rows import sum as sum

__all__ = [
    "log_softmax",
    "softmax",
    "sum",
]
