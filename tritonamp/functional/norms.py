"""Differentiable norms of half inputs and of sums: FP32 arithmetic, weights half or FP32."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritonamp.functional.inputs import Call, backend_in_force, min_numel, takes
from tritonamp.kernels import add_norm as _add_norm
from tritonamp.kernels import norm as _norm
from tritonamp.kernels import norm_backward as _norm_backward
from tritonamp.policy import HALF_DTYPES

STORED = (*HALF_DTYPES, torch.float32)  # dtypes of weights and results that the kernels take
RMS_EPS = torch.finfo(torch.float32).eps  # as in torch, which computes half input in FP32


class Norm(torch.autograd.Function):
    """layer_norm or rms_norm that saves its half input and one or two FP32 numbers per line."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        call: Call,
    ) -> Tensor:
        args, compute = call
        y, stats = compute(x, weight, bias) if compute else _norm.norm(x, weight, bias, *args)
        ctx.save_for_backward(x, weight, bias, stats)
        ctx.args = args
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _gradients(ctx, grads[0], None, *ctx.needs_input_grad[1:3])
        return *gradients, None


class AddNorm(torch.autograd.Function):
    """A sum and its norm in one pass; the saved tensor is the sum, which is the norm's input."""

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
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a norm's input, weight and bias.

    Args:
        ctx: context of the Function.
        grad: incoming gradient of the norm.
        added: gradient to add to the input's, or None.
        dweight: whether the weight's gradient is needed.
        dbias: whether the bias's gradient is needed.
    """
    x, weight, bias, stats = ctx.saved_tensors
    n, eps, center, *_, backend = ctx.args
    if torch.is_grad_enabled():
        # A gradient of the gradient needs statistics that are functions of x.
        stats = _norm.norm_torch(x, None, None, n, eps, center, x.dtype)[1]
        backend = "eager"
    dx, sums = _norm_backward.norm_backward(
        grad, x, weight, stats, n, dweight, dbias, added, backend
    )
    return dx, *of_weights(sums, weight if dweight else None, bias if dbias else None)


def of_weights(
    sums: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weight and bias; None for a weight that is None.

    ``sums`` holds one FP32 row for each weight that is not None.
    """
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
    """Return ``torch.nn.functional.layer_norm``; half input is computed in FP32, rounded once.

    Args:
        input: any shape that ends in ``normalized_shape``.
        normalized_shape: shape of the last dimensions, which get mean 0 and variance 1.
        weight: factor in ``normalized_shape``, half or float32.
        bias: summand in ``normalized_shape``, half or float32.
        eps: summand of the variance.
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
    """Return ``torch.nn.functional.rms_norm``; half input is computed in FP32, rounded once.

    Args:
        input: any shape that ends in ``normalized_shape``.
        normalized_shape: shape of the last dimensions, which get mean square 1.
        weight: factor in ``normalized_shape``, half or float32.
        eps: summand of the mean square. None: float32's eps, as in torch.
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
    """Return layer_norm (``center``) or rms_norm of an input that ``is_ours`` accepts."""
    eps = RMS_EPS if eps is None else eps
    args = math.prod(shape), eps, center, dtype, backend_in_force()
    return Norm.apply(input, weight, bias, (args, None))


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Return ``input + residual`` and the ``layer_norm`` of this sum, from one pass.

    The bits are those of two calls because the norm takes the rounded sum. The backward adds the
    gradient of the sum in one pass, too.

    Args:
        input: any shape that ends in ``normalized_shape``.
        residual: summand, in the input's shape and dtype for one pass.
        normalized_shape: shape of the last dimensions, which get mean 0 and variance 1.
        weight: factor in ``normalized_shape``, half or float32.
        bias: summand in ``normalized_shape``, half or float32.
        eps: summand of the variance.
    """
    if not _is_our_sum(input, residual, normalized_shape, weight, bias):
        total = input + residual
        return total, layer_norm(total, normalized_shape, weight, bias, eps)
    n = math.prod(normalized_shape)
    return AddNorm.apply(input, residual, weight, bias, (n, eps, True, backend_in_force()))


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``input + residual`` and the ``rms_norm`` of this sum, from one pass.

    The bits are those of two calls because the norm takes the rounded sum. The backward adds the
    gradient of the sum in one pass, too.

    Args:
        input: any shape that ends in ``normalized_shape``.
        residual: summand, in the input's shape and dtype for one pass.
        normalized_shape: shape of the last dimensions, which get mean square 1.
        weight: factor in ``normalized_shape``, half or float32.
        eps: summand of the mean square. None: float32's eps, as in torch.
    """
    if not _is_our_sum(input, residual, normalized_shape, weight):
        total = input + residual
        return total, rms_norm(total, normalized_shape, weight, eps)
    args = math.prod(normalized_shape), RMS_EPS if eps is None else eps, False, backend_in_force()
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
    input: Tensor,
    normalized_shape: Sequence[int],
    *weights: Tensor | None,
    least: int,
    wide: bool = False,
) -> bool:
    """Return whether this package computes the norm; if not, torch computes or refuses it.

    Args:
        input: the input.
        normalized_shape: shape of the last dimensions.
        *weights: weights; None for a weight that the norm lacks.
        least: least number of elements on a GPU, except with weights in another dtype than the
            input, which torch's kernels refuse.
        wide: whether FP32 inputs are this package's, too.
    """
    if not takes(input, wide) or is_traceable_wrapper_subclass(
        input
    ):  # torch shards DTensors' norms
        return False
    if not isinstance(normalized_shape, Sequence):
        return False
    shape = tuple(normalized_shape)
    if not shape or 0 in shape or tuple(input.shape[-len(shape) :]) != shape:
        return False
    return fit(input, shape, weights, least)


def fit(
    input: Tensor, shape: tuple[int, ...], weights: Iterable[Tensor | None], least: int
) -> bool:
    """Return whether weights and the input's size fit a kernel.

    Args:
        input: the input.
        shape: expected shape of the weights.
        weights: the weights; None for a weight that the norm lacks.
        least: least number of elements on a GPU, if all dtypes are the same.
    """
    given = [w for w in weights if w is not None]
    if any(tuple(w.shape) != shape or w.device != input.device for w in given):
        return False
    if any(w.dtype not in STORED for w in given):
        return False
    mixed = any(w.dtype is not input.dtype for w in given)
    return mixed or not input.is_cuda or input.numel() >= least
