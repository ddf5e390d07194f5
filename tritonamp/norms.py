"""Differentiable layer_norm and rms_norm: half storage, FP32 arithmetic, weights half or FP32."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels import norm as _norm
from tritonamp.kernels import norm_backward as _norm_backward
from tritonamp.kernels._implementations import MIN_NUMEL

HALF = (torch.float16, torch.bfloat16)
RMS_EPS = torch.finfo(torch.float32).eps  # torch's, of half input, too: it computes in FP32


class Norm(torch.autograd.Function):
    """layer_norm or rms_norm that saves its half input, and two FP32 numbers of each line."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        n: int,
        eps: float,
        center: bool,
        backend: str,
    ) -> Tensor:
        y, stats = _norm.norm(x, weight, bias, n, eps, center, x.dtype, backend)
        ctx.save_for_backward(x, weight, bias, stats)
        ctx.args = n, eps, center, backend
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, stats = ctx.saved_tensors
        n, eps, center, backend = ctx.args
        if torch.is_grad_enabled():  # it is differentiated again
            y = _norm.norm_torch(x, weight, bias, n, eps, center, x.dtype)[0]
            given = [x, weight, bias]
            wanted = [t for t, needed in zip(given, ctx.needs_input_grad) if needed]
            found = iter(torch.autograd.grad(y, wanted, grads[0], create_graph=True))
            return *(next(found) if n else None for n in ctx.needs_input_grad[:3]), *[None] * 4
        _, dweight, dbias = ctx.needs_input_grad[:3]
        dx, sums = _norm_backward.norm_backward(
            grads[0], x, weight, stats, n, dweight, dbias, backend
        )
        rows = iter(sums)
        dw, db = (
            next(rows).to(t.dtype).view(t.shape) if needed else None
            for t, needed in ((weight, dweight), (bias, dbias))
        )
        return dx, dw, db, None, None, None, None


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Return ``torch.nn.functional.layer_norm``, of half input computed in FP32, rounded once.

    Args:
        input: any shape that ends in ``normalized_shape``.
        normalized_shape: of what has mean 0 and variance 1 before ``weight`` and ``bias``.
        weight: of that shape, of the input's dtype or float32.
        bias: as ``weight``.
        eps: added to the variance.
    """
    if not is_ours(input, normalized_shape, weight, bias):
        return torch.nn.functional.layer_norm(input, normalized_shape, weight, bias, eps)
    return Norm.apply(input, weight, bias, _count(normalized_shape), eps, True, "auto")


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Return ``torch.nn.functional.rms_norm``, of half input computed in FP32, rounded once.

    Args:
        input: any shape that ends in ``normalized_shape``.
        normalized_shape: of what has mean square 1 before ``weight``.
        weight: of that shape, of the input's dtype or float32.
        eps: added to the mean square; None: that of float32, as in torch.
    """
    if not is_ours(input, normalized_shape, weight):
        return torch.nn.functional.rms_norm(input, normalized_shape, weight, eps)
    eps = RMS_EPS if eps is None else eps
    return Norm.apply(input, weight, None, _count(normalized_shape), eps, False, "auto")


def is_ours(input: Tensor, normalized_shape: Sequence[int], *weights: Tensor | None) -> bool:
    """Return whether this package computes the norm; else torch does, or refuses."""
    if not isinstance(input, Tensor) or input.dtype not in HALF:
        return False
    # as in functional.is_ours (torch 2.11 to 2.15)
    if torch._C._are_functorch_transforms_active():
        return False
    shape, given = tuple(normalized_shape), [w for w in weights if w is not None]
    if not shape or tuple(input.shape[-len(shape) :]) != shape:
        return False
    if any(tuple(w.shape) != shape or w.dtype not in (*HALF, torch.float32) for w in given):
        return False
    # torch's own kernels take weights of the input's dtype alone
    mixed = any(w.dtype is not input.dtype for w in given)
    return mixed or not input.is_cuda or input.numel() >= MIN_NUMEL


def _count(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
