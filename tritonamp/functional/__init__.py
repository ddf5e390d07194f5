"""Differentiable functions of half tensors: half storage, FP32 arithmetic.

The signatures are those of ``torch.nn.functional`` and ``torch``. For float16 and bfloat16 the
arithmetic is FP32 and each result is rounded once. torch computes every other dtype, and small
inputs on a GPU, because a kernel gains nothing there.
"""

from tritonamp.functional.group_norms import group_norm
from tritonamp.functional.linear_head import LinearHead
from tritonamp.functional.linear_losses import linear_cross_entropy
from tritonamp.functional.losses import cross_entropy
from tritonamp.functional.masked_rows import masked_softmax
from tritonamp.functional.mismatches import Mismatch, mismatch
from tritonamp.functional.mixed_norms import mixed_layer_norm, mixed_rms_norm
from tritonamp.functional.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from tritonamp.functional.rows import log_softmax, softmax, sum
from tritonamp.functional.token_losses import linear_token_log_probs, token_log_probs

__all__ = [
    "LinearHead",
    "Mismatch",
    "add_layer_norm",
    "add_rms_norm",
    "cross_entropy",
    "group_norm",
    "layer_norm",
    "linear_cross_entropy",
    "linear_token_log_probs",
    "log_softmax",
    "masked_softmax",
    "mismatch",
    "mixed_layer_norm",
    "mixed_rms_norm",
    "rms_norm",
    "softmax",
    "sum",
    "token_log_probs",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
