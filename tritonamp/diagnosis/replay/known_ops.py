"""Known facts of torch's ops by their names, and of their results."""

import math
import re
from typing import Any

import torch
from torch import Tensor

from tritonamp.watched.ops import OpCall, float64_copy

ON_PURPOSE = {"nan_to_num", "where", "masked_fill", "isfinite"}
"""Ops that replace values. The replaced values do not count as lost."""
DIVISORS = {
    **dict.fromkeys("reciprocal rsqrt pow log log2 log10 logit".split(), 0),
    **dict.fromkeys("div divide true_divide xlogy".split(), 1),
    "addcdiv": 2,
}
"""The number of the argument that must not be zero, by op."""

FAMILIES = {
    "matmul": """mm bmm addmm addbmm baddbmm mv addmv addr dot vdot inner outer matmul linear
        bilinear einsum tensordot linalg_multi_dot linalg_vecdot chain_matmul convolution conv1d
        conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc addmm_activation
        scaled_dot_product_attention lstm gru rnn_tanh rnn_relu""",
    "square": "pow square var std var_mean std_mean norm linalg_vector_norm mse_loss cdist dist",
    "reduction": """sum mean cumsum prod cumprod nansum trace logcumsumexp add_reduce nll_loss
        cross_entropy_loss""",
    "exp": "exp exp2 expm1 sinh cosh softplus logsumexp logaddexp",
    "softmax": "softmax log_softmax safe_softmax scaled_dot_product_attention cross_entropy_loss",
    "divide": "div divide true_divide reciprocal rsqrt addcdiv pow",
    "product": "mul multiply",
    "average": """mean nanmean var std var_mean std_mean nll_loss nll_loss_nd nll_loss2d
        nll_loss_forward nll_loss2d_forward cross_entropy_loss mse_loss layer_norm rms_norm
        group_norm batch_norm weight_norm weight_norm_interface""",
    "log": "log log2 log10 log1p xlogy logit atanh arctanh erfinv",
    "root": """sqrt acos asin acosh arccos arcsin lgamma norm linalg_vector_norm std
        dist cdist""",
    "cast": "to_copy copy to",
}
"""Names of ops that fail in the same ways."""


def family(op: str) -> set[str]:
    """Return the families that an op's name belongs to: "_softmax.int" is a "softmax"."""
    name = op.split(".")[0].strip("_").removeprefix("native_")
    return {key for key, names in FAMILIES.items() if name in names.split()}


def is_product(op: str) -> bool:
    """Return whether an op is a product that ``Policy.fp32_results`` gives FP32 results."""
    return "matmul" in family(op) and not re.search("attention|lstm|gru|rnn|bilinear", op)


def is_softmax(op: str) -> bool:
    """Return whether an op computes a softmax, which may be 0 where its logarithm is finite."""
    return "softmax" in op and "log" not in op and "backward" not in op


def keeps_probabilities(op: str) -> bool:
    """Return whether an op picks, shifts or divides probabilities, and makes no zeros itself."""
    names = """add sub rsub clamp clamp_min clamp_max index gather index_select masked_select
        masked_fill cat stack div"""
    return op in names.split()


def is_masked(call: OpCall) -> bool:
    """Return whether a call is a softmax with a row of nothing but -inf."""
    if "softmax" not in family(call.schema.name) and "attention" not in call.schema.name:
        return False
    dim = call.args[1] if "softmax" in call.schema.name else -1
    lines = [t for t in call.inputs() if t.dim() > 0 or dim in (0, -1)]
    return any(bool((t == -math.inf).all(dim).any()) for t in lines)


def are_same(args: tuple[Any, ...]) -> bool:
    """Return whether the first two arguments are equal tensors, whose product is a square."""
    first, second = args[:2]
    are_tensors = isinstance(first, Tensor) and isinstance(second, Tensor)
    return are_tensors and first.dtype is second.dtype and torch.equal(first, second)


def differ(result: Tensor, exact: Tensor) -> bool:
    """Return whether a result differs by more than 1 % anywhere from that of ``in_float64``.

    Differences below FP32's smallest normal number do not count.
    """
    off = (float64_copy(result) - exact).abs()
    return bool((off > 0.01 * exact.abs() + 2.0**-126).any())
