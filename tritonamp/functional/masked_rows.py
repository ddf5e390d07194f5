"""Differentiable softmax of scaled and masked attention scores."""

from typing import Any

import torch
from torch import Tensor

from tritonamp.functional.inputs import Call, backend_in_force, is_under_transforms
from tritonamp.kernels import masked_softmax as _masked_softmax
from tritonamp.kernels import masked_softmax_backward as _masked_softmax_backward
from tritonamp.policy import HALF_DTYPES

INF = float("inf")
_ZERO = 5  # place of ``zero`` among the arguments of the operation
MASK_DTYPES = {torch.bool, *HALF_DTYPES, torch.float32, torch.float64}


class MaskedSoftmax(torch.autograd.Function):
    """Masked softmax whose only saved tensor is its output, in the output's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor | None, call: Call) -> Tensor:
        args, compute = call
        y = compute(x, mask) if compute else _masked_softmax.masked_softmax(x, mask, *args)
        # separate operations pass no gradient to scores that a boolean mask replaces, though their
        # probability is not 0 where all scores of a row are replaced
        replaces = mask is not None and mask.dtype is torch.bool and not args[_ZERO]
        ctx.save_for_backward(y, mask if replaces else None)
        ctx.args = args, x.dtype
        ctx.mask = None if mask is None else (mask.shape, mask.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        y, replaced = ctx.saved_tensors
        (scale, causal, _, keep, *_, backend), dtype = ctx.args
        # A gradient of the gradient needs torch's operations.
        backend = "eager" if torch.is_grad_enabled() else backend
        gradient = _masked_softmax_backward.masked_softmax_backward
        if not ctx.needs_input_grad[1]:
            dx = gradient(grads[0], y, scale, causal, dtype, backend)
            if replaced is not None:
                dx = dx.masked_fill(~replaced if keep else replaced, 0.0)
            return dx, None, None
        # a learned bias: the sum over all scores that share an element has to be FP32
        of_scores = gradient(grads[0], y, 1.0, causal, torch.float32, backend)
        shape, mask_dtype = ctx.mask
        of_mask = of_scores.sum_to_size(shape).to(mask_dtype)
        return (of_scores * scale).to(dtype), of_mask, None


def masked_softmax(
    x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, causal: bool = False
) -> Tensor:
    """Return softmax over the last dimension of ``x * scale``, in which masked columns are 0.

    Half scores are computed in FP32, in one pass, and rounded once. A row without a column that
    counts is 0, and so is its gradient. NaN and infinities of ``x`` in columns that count make the
    same rows NaN as in torch.

    Args:
        x: scores, floating; [..., queries, keys] if ``causal``, else of any shape.
        mask: a mask that broadcasts to ``x``: bool, where True keeps a column, or floating, which
            is added in FP32 and may require a gradient. None: all columns count.
        scale: factor of the scores.
        causal: whether query i of Q sees only the keys j of K with j <= i + K - Q.

    Returns:
        Probabilities in the dtype and shape of ``x``.

    Raises:
        TypeError: a wrong dtype, or a ``scale`` that is no number.
        ValueError: a mask that does not broadcast to ``x`` or is on another device, or a causal
            softmax of fewer than two dimensions.
    """
    return softmax_of_scores(x, mask, scale, causal)


def softmax_of_scores(
    x: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool = False,
    dtype: torch.dtype | None = None,
    keep: bool = True,
    fill: float = -INF,
    zero: bool = True,
    rounds: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Return ``masked_softmax`` with further options. It raises the same errors.

    torch computes float64, and everything under transforms of torch.func.

    Args:
        x: scores, floating.
        mask: bool or floating, broadcasts to ``x``; None: all columns count.
        scale: factor of the scores.
        causal: whether query i of Q sees only the keys j of K with j <= i + K - Q.
        dtype: dtype of the result, float16, bfloat16 or float32; None: dtype of ``x``.
        keep: value of a boolean mask in columns that count.
        fill: score of columns that a boolean mask excludes.
        zero: whether a row without a column that counts is 0; else it is torch's result.
        rounds: whether scores are rounded to the dtype of ``x`` after each step.
        backend: "auto", "triton" or "eager"; None: that of the forward in force.
    """
    _check(x, mask, scale, causal)
    args = float(scale), causal, dtype or x.dtype, keep, fill, zero, rounds
    # torch 2.11 compiles gradients of the Function wrongly where no cast is in it
    is_traced = x.dtype is torch.float32 and torch.compiler.is_compiling()
    if x.dtype not in (*HALF_DTYPES, torch.float32) or is_traced or is_under_transforms():
        return _masked_softmax.masked_softmax_torch(x, mask, *args)
    backend = backend or backend_in_force()
    result: Tensor = MaskedSoftmax.apply(x, mask, ((*args, backend), None))
    return result


def _check(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> None:
    for name, value in (("x", x), ("mask", mask)):
        if not isinstance(value, Tensor) and not (name == "mask" and value is None):
            raise TypeError(
                f"{name}: expected a tensor, got {type(value).__name__}; the softmax is along the "
                "last dimension"
            )
    if not x.is_floating_point():
        raise TypeError(f"x: expected floating scores, got {x.dtype}")
    if not isinstance(scale, int | float):
        raise TypeError(
            f"scale: expected a number, got {type(scale).__name__}: pass float(scale), or x * "
            "scale as scores to train it"
        )
    shape = tuple(x.shape)
    if causal and x.dim() < 2:
        raise ValueError(f"x: a causal softmax expects [..., queries, keys], got shape {shape}")
    if mask is None:
        return
    if mask.dtype not in MASK_DTYPES:
        raise TypeError(
            "mask: expected bool (True: keep) or floating numbers to add, half, float32 or "
            f"float64, got {mask.dtype}: pass mask != 0 to keep those columns, or mask.float() to "
            "add the numbers"
        )
    if mask.device != x.device:
        raise ValueError(f"mask: expected the scores' device {x.device}, got {mask.device}")
    last = zip(reversed(mask.shape), reversed(shape), strict=False)
    if mask.dim() > x.dim() or any(size not in (1, whole) for size, whole in last):
        raise ValueError(
            f"mask: expected a shape that broadcasts to the scores' {shape}, got "
            f"{tuple(mask.shape)}"
        )
