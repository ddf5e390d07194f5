"""softmax and log_softmax over one dimension: half storage, FP32 arithmetic. 4 B/element forward, 6 backward."""

import torch
from torch import Tensor


def softmax_torch(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.softmax(x.float(), dim).to(dtype)


def softmax(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """exp(x - max) / sum(exp(x - max)) along ``dim``, computed in FP32 and rounded once.

    Args:
        x: float16, bfloat16 or float32, any shape and strides.
        dtype: of the result.
    """
    return softmax_torch(x, dim, dtype)


def softmax_backward_torch(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    g, y = grad.float(), y.float()
    gy = g * y
    return (gy - y * gy.sum(dim, keepdim=True)).to(dtype)


def softmax_backward(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Gradient of softmax from its output: y * (grad - sum(grad * y)), in FP32, rounded once to ``dtype``."""
    return softmax_backward_torch(grad, y, dim, dtype)


def log_softmax_torch(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.log_softmax(x.float(), dim).to(dtype)


def log_softmax(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """x - max - log(sum(exp(x - max))) along ``dim``, computed in FP32 and rounded once."""
    return log_softmax_torch(x, dim, dtype)


def log_softmax_backward_torch(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    g = grad.float()
    return (g - y.float().exp() * g.sum(dim, keepdim=True)).to(dtype)


def log_softmax_backward(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Gradient of log_softmax from its output: grad - exp(y) * sum(grad), in FP32, rounded once to ``dtype``."""
    return log_softmax_backward_torch(grad, y, dim, dtype)
