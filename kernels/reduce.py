"""sum with FP32 accumulation. 2 B/element."""

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_torch(x: Tensor, dim: Sequence[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    return torch.sum(x, tuple(dim), keepdim, dtype=torch.float32).to(dtype)


def sum(x: Tensor, dim: Sequence[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    """Sum over ``dim`` (an empty sequence: over all) accumulated in FP32, rounded once to ``dtype``.

    Args:
        x: float16, bfloat16 or float32, any shape and strides.
    """
    return sum_torch(x, dim, keepdim, dtype)
