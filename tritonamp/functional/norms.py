"""Differentiable norms, also of a sum: half storage, FP32 arithmetic, weights half or FP32."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritonamp.functional.inputs import Compute, is_half, min_numel
from tritonamp.kernels import add_norm as _add_norm
from tritonamp.kernels import norm as _norm
from tritonamp.kernels import norm_backward as _norm_backward
from tritonamp.kernels._implementations import MIN_NUMEL
from tritonamp.policy import HALF_DTYPES

RMS_EPS = torch.finfo(torch.float32).eps  # torch's, of half input, too: it computes in FP32

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Norm(torch.autograd.Function):
    """layer_norm or rms_norm that saves its half input, and two FP32 numbers of each line."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        args: tuple[Any, ...],
        compute: Compute = None,
    ) -> Tensor:
        y, stats = compute(x, weight, bias) if compute else _norm.norm(x, weight, bias, *args)
        ctx.save_for_backward(x, weight, bias, stats)
        n, eps, center, _, backend = args
        ctx.args = n, eps, center, backend
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _gradients(ctx, grads[0], None, *ctx.needs_input_grad[1:3])
        return *gradients, None, None


class AddNorm(torch.autograd.Function):
    """A sum and its norm, from one pass; the sum is saved in the place of the norm's input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        args: tuple[Any, ...],
    ) -> tuple[Tensor, Tensor]:
        total, y, stats = _add_norm.add_norm(x, residual, weight, bias, *args)
        ctx.save_for_backward(total, weight, bias, stats)
        ctx.set_materialize_grads(False)
        ctx.args = args
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        of_total, of_y = grads
        dx, dw, db = of_total, None, None
        if of_y is not None:
            dx, dw, db = _gradients(ctx, of_y, of_total, *ctx.needs_input_grad[2:4])
        return dx, dx, dw, db, None


def _gradients(
    ctx: Any, grad: Tensor, added: Tensor | None, dweight: bool, dbias: bool
) -> Gradients:
    """Return the gradients of a norm's input, with ``added``, of its weight and of its bias."""
    x, weight, bias, stats = ctx.saved_tensors
    n, eps, center, backend = ctx.args
    if torch.is_grad_enabled():  # it is differentiated again: stats, too, are functions of x
        stats = _norm.norm_torch(x, None, None, n, eps, center, x.dtype)[1]
        backend = "eager"
    dx, sums = _norm_backward.norm_backward(
        grad, x, weight, stats, n, dweight, dbias, added, backend
    )
    return dx, *of_weights(sums, weight if dweight else None, bias if dbias else None)


def of_weights(
    sums: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of those that are given, from FP32 [given, elements]."""
    dw = None if weight is None else sums[0].to(weight.dtype).view(weight.shape)
    db = None if bias is None else sums[-1].to(bias.dtype).view(bias.shape)
    return dw, db


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
        weight: of that shape, half or float32.
        bias: as ``weight``.
        eps: added to the variance.
    """
    if not is_ours(input, normalized_shape, weight, bias, least=min_numel()):
        return torch.nn.functional.layer_norm(input, normalized_shape, weight, bias, eps)
    return norm(input, normalized_shape, weight, bias, eps, True, input.dtype)


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
        weight: of that shape, half or float32.
        eps: added to the mean square; None: that of float32, as in torch.
    """
    if not is_ours(input, normalized_shape, weight, least=min_numel()):
        return torch.nn.functional.rms_norm(input, normalized_shape, weight, eps)
    return norm(input, normalized_shape, weight, None, eps, False, input.dtype)


def norm(
    input: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    center: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Return layer_norm (``center``) or rms_norm of what ``is_ours`` accepts, in ``dtype``."""
    eps = RMS_EPS if eps is None else eps
    return Norm.apply(input, weight, bias, (math.prod(shape), eps, center, dtype, "auto"))


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Return ``input + residual``, and ``layer_norm`` of it, in this order, from one pass.

    The norm is of the sum as it is rounded: the bits are those of the two calls. In backward the
    gradient of the sum is added in the same pass, too.

    Args:
        input: any shape that ends in ``normalized_shape``.
        residual: of the same shape and dtype for one pass; else what torch can add.
        normalized_shape: as of ``layer_norm``.
        weight: as of ``layer_norm``.
        bias: as of ``layer_norm``.
        eps: as of ``layer_norm``.
    """
    if not _is_our_sum(input, residual, normalized_shape, weight, bias):
        total = input + residual
        return total, layer_norm(total, normalized_shape, weight, bias, eps)
    n = math.prod(normalized_shape)
    return AddNorm.apply(input, residual, weight, bias, (n, eps, True, "auto"))


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``input + residual``, and ``rms_norm`` of it, in this order, from one pass.

    The norm is of the sum as it is rounded: the bits are those of the two calls. In backward the
    gradient of the sum is added in the same pass, too.

    Args:
        input: any shape that ends in ``normalized_shape``.
        residual: of the same shape and dtype for one pass; else what torch can add.
        normalized_shape: as of ``rms_norm``.
        weight: as of ``rms_norm``.
        eps: as of ``rms_norm``.
    """
    if not _is_our_sum(input, residual, normalized_shape, weight):
        total = input + residual
        return total, rms_norm(total, normalized_shape, weight, eps)
    args = math.prod(normalized_shape), RMS_EPS if eps is None else eps, False, "auto"
    return AddNorm.apply(input, residual, weight, None, args)


def _is_our_sum(
    input: Tensor, residual: Tensor, shape: Sequence[int], *weights: Tensor | None
) -> bool:
    return (
        residual is not input  # torch 2.11 compiles gradients of such a Function wrongly
        and is_ours(input, shape, *weights, least=min_numel())
        and is_ours(residual, shape, *weights, least=0)
        and (residual.shape, residual.dtype) == (input.shape, input.dtype)
        and residual.device == input.device
    )


def is_ours(
    input: Tensor, normalized_shape: Sequence[int], *weights: Tensor | None, least: int = MIN_NUMEL
) -> bool:
    """Return whether this package computes the norm; else torch does, or refuses.

    On a GPU from ``least`` elements on, and what torch's kernels cannot: weights of other dtypes.
    """
    if not is_half(input) or is_traceable_wrapper_subclass(input):  # torch shards DTensors' norms
        return False
    if not isinstance(normalized_shape, Sequence):
        return False
    shape, given = tuple(normalized_shape), [w for w in weights if w is not None]
    if not shape or 0 in shape or tuple(input.shape[-len(shape) :]) != shape:
        return False
    return fit(input, shape, given, least)


def fit(input: Tensor, shape: tuple[int, ...], weights: list[Tensor], least: int) -> bool:
    """Return whether the weights have this shape, dtypes for a kernel, and the input the size."""
    if any(tuple(w.shape) != shape or w.device != input.device for w in weights):
        return False
    if any(w.dtype not in (*HALF_DTYPES, torch.float32) for w in weights):
        return False
    mixed = any(w.dtype is not input.dtype for w in weights)
    return mixed or not input.is_cuda or input.numel() >= least
