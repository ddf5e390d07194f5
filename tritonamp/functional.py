"""Differentiable softmax, log_softmax and sum: half storage, FP32 arithmetic.

The signatures are those of ``torch.nn.functional`` and ``torch``. On float16 and bfloat16 the arithmetic is FP32 and
each result is rounded once; every other dtype is handed to torch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels import reduce as _reduce
from tritonamp.kernels import softmax as _softmax

__all__ = ["log_softmax", "softmax", "sum"]

_HALF = (torch.float16, torch.bfloat16)


class _Softmax(torch.autograd.Function):
    """softmax whose only saved tensor is its output, in the output's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        y = _softmax.softmax(x, dim, dtype)
        ctx.save_for_backward(y)
        ctx.dim, ctx.dtype = dim, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        return _softmax.softmax_backward(grads[0], y, ctx.dim, ctx.dtype), None, None


class _LogSoftmax(torch.autograd.Function):
    """log_softmax whose only saved tensor is its output, in the output's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        y = _softmax.log_softmax(x, dim, dtype)
        ctx.save_for_backward(y)
        ctx.dim, ctx.dtype = dim, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        return _softmax.log_softmax_backward(grads[0], y, ctx.dim, ctx.dtype), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> Tensor:
        ctx.shape, ctx.dims, ctx.keepdim, ctx.dtype = x.shape, dims, keepdim, x.dtype
        return _reduce.sum(x, dims, keepdim, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grads[0]
        rank = len(ctx.shape)
        if rank and not ctx.keepdim:
            for d in sorted(d % rank for d in ctx.dims):  # of all dims: expand alone broadcasts the scalar
                grad = grad.unsqueeze(d)
        return grad.to(ctx.dtype).expand(ctx.shape), None, None, None


def softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    """``torch.nn.functional.softmax``; on half input computed in FP32, result in ``dtype`` or the input's dtype.

    Args:
        input: any shape.
        dim: the dimension that sums to one; None as in torch (deprecated there).
        dtype: of the result, taken from the FP32 values.
    """
    if not _takes(input, dtype):
        return torch.nn.functional.softmax(input, dim, _stacklevel + 1, dtype)
    if dim is None:
        dim = torch.nn.functional._get_softmax_dim("softmax", input.dim(), _stacklevel)  # type: ignore[attr-defined]
    return _Softmax.apply(input, dim, dtype or input.dtype)


def log_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    """``torch.nn.functional.log_softmax``; on half input computed in FP32, result in ``dtype`` or the input's dtype."""
    if not _takes(input, dtype):
        return torch.nn.functional.log_softmax(input, dim, _stacklevel + 1, dtype)
    if dim is None:
        dim = torch.nn.functional._get_softmax_dim("log_softmax", input.dim(), _stacklevel)  # type: ignore[attr-defined]
    return _LogSoftmax.apply(input, dim, dtype or input.dtype)


def sum(
    input: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """``torch.sum``; on half input accumulated in FP32, result rounded once to ``dtype`` or the input's dtype.

    Args:
        input: any shape.
        dim: one or several dimensions; None or an empty sequence sums over all of them.
    """
    if not _takes(input, dtype):
        return torch.sum(input, dim, keepdim, dtype=dtype)  # type: ignore[arg-type]  # torch takes any sequence
    dims = () if dim is None else tuple(dim) if isinstance(dim, Sequence) else (dim,)
    return _Sum.apply(input, dims, keepdim, dtype or input.dtype)


def _takes(input: Tensor, dtype: torch.dtype | None) -> bool:
    if torch._C._are_functorch_transforms_active():
        return False  # inside a rule torch.func cannot see a Function
    return isinstance(input, Tensor) and input.dtype in _HALF and dtype in (None, torch.float32, *_HALF)
