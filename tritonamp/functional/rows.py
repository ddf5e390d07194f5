"""Differentiable softmax, log_softmax and sum."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.functional.inputs import Call, backend_in_force, is_batch_invariant, min_numel, takes
from tritonamp.kernels import reduce as _reduce
from tritonamp.kernels import softmax as _softmax
from tritonamp.kernels import softmax_backward as _softmax_backward
from tritonamp.policy import HALF_DTYPES


class Softmax(torch.autograd.Function):
    """softmax or log_softmax whose only saved tensor is its output, in the output's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call) -> Tensor:
        args, compute = call
        y = compute(x) if compute else _softmax.softmax(x, *args)
        ctx.save_for_backward(y)
        ctx.args = args, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        (dim, _, log, backend), dtype = ctx.args
        # A gradient of the gradient needs torch's operations.
        backend = "eager" if torch.is_grad_enabled() else backend
        dx = _softmax_backward.softmax_backward(grads[0], y, dim, dtype, log, backend)
        return dx, None


class Sum(torch.autograd.Function):
    """sum that saves no tensor because its gradient is an expanded one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call) -> Tensor:
        args, compute = call
        ctx.args = args, x.shape, x.dtype
        return compute(x) if compute else _reduce.sum(x, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (dims, keepdim, *_), shape, dtype = ctx.args
        grad = grads[0]
        if shape and not keepdim:
            # The sum over all dimensions has no ``dims``, and expand broadcasts its scalar.
            for d in sorted(d % len(shape) for d in dims):
                grad = grad.unsqueeze(d)
        return grad.to(dtype).expand(shape), None


def softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    """Return ``torch.nn.functional.softmax``; half input is computed in FP32.

    Args:
        input: any shape.
        dim: dimension that sums to one. None is deprecated, as in torch.
        _stacklevel: stack level of the warning about ``dim=None``, as in torch.
        dtype: dtype of the result, rounded once from FP32. None: the input's.
    """
    if not is_ours(input, dtype, min_numel()):
        return torch.nn.functional.softmax(input, dim, _stacklevel + 1, dtype)
    if dim is None:
        dim = torch.nn.functional._get_softmax_dim("softmax", input.dim(), _stacklevel)  # type: ignore[attr-defined]
    return _along(input, dim, dtype or input.dtype, False)


def log_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    """Return ``torch.nn.functional.log_softmax``; half input is computed in FP32.

    Args:
        input: any shape.
        dim: dimension whose exponentials sum to one. None is deprecated, as in torch.
        _stacklevel: stack level of the warning about ``dim=None``, as in torch.
        dtype: dtype of the result, rounded once from FP32. None: the input's.
    """
    if not is_ours(input, dtype, min_numel()):
        return torch.nn.functional.log_softmax(input, dim, _stacklevel + 1, dtype)
    if dim is None:
        dim = torch.nn.functional._get_softmax_dim("log_softmax", input.dim(), _stacklevel)  # type: ignore[attr-defined]
    return _along(input, dim, dtype or input.dtype, True)


def _along(x: Tensor, dim: int, dtype: torch.dtype, log: bool) -> Tensor:
    """Return softmax or log_softmax of an input that ``is_ours`` accepts."""
    if lies_in_pieces(x, dim):
        return _along(x.movedim(dim, -1), -1, dtype, log).movedim(-1, dim)
    result: Tensor = Softmax.apply(x, ((dim, dtype, log, backend_in_force()), None))
    return result


def lies_in_pieces(x: Tensor, dim: int) -> bool:
    """Return whether lines along ``dim`` have to be moved to the last dimension.

    With ``batch_invariant`` they have, because tiles of columns depend on the number of columns.
    """
    if not isinstance(dim, int) or not is_batch_invariant():  # torch refuses another type
        return False
    return -x.dim() <= dim < x.dim() - 1 and dim != -1


def sum(
    input: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``torch.sum``; half input is accumulated in FP32 and rounded once.

    Args:
        input: any shape.
        dim: one or several dimensions. None or an empty sequence: all dimensions.
        keepdim: whether the summed dimensions stay, with size 1.
        dtype: dtype of the result. None: the input's.
    """
    if not is_ours(input, dtype, min_numel()):
        # torch takes any sequence
        return torch.sum(input, dim, keepdim, dtype=dtype)  # type: ignore[arg-type]
    dims = () if dim is None else tuple(dim) if isinstance(dim, Sequence) else (dim,)
    return Sum.apply(input, ((dims, keepdim, dtype or input.dtype, backend_in_force()), None))


def is_ours(input: Tensor, dtype: torch.dtype | None, min_numel: int) -> bool:
    """Return whether this package computes the result, and not torch.

    Args:
        input: the input.
        dtype: dtype of the result. None: the input's.
        min_numel: least number of elements on a GPU.
    """
    if not takes(input) or dtype not in (None, torch.float32, *HALF_DTYPES):
        return False
    is_large = not input.is_cuda or input.numel() >= min_numel
    return is_large or dtype not in (None, input.dtype, torch.float32)
