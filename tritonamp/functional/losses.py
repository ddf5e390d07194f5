"""Differentiable cross entropy: half logits, FP32 arithmetic and loss."""

from typing import Any

import torch
from torch import Tensor

from tritonamp.functional.inputs import is_half
from tritonamp.kernels import cross_entropy as _cross_entropy
from tritonamp.kernels import cross_entropy_backward as _backward
from tritonamp.policy import HALF_DTYPES

REDUCTIONS = "none", "mean", "sum"  # by their numbers in aten::cross_entropy_loss


class CrossEntropy(torch.autograd.Function):
    """Losses of lines of logits, of which the logits and two FP32 numbers a line are saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, args: tuple[Any, ...]) -> Tensor:
        losses, stats = _cross_entropy.cross_entropy(x, target, *args)
        ctx.save_for_backward(x, target, stats)
        ctx.args = args
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, target, stats = ctx.saved_tensors
        if torch.is_grad_enabled():  # it is differentiated again
            *args, _ = ctx.args
            losses, _ = _cross_entropy.cross_entropy_torch(x, target, *args)
            (dx,) = torch.autograd.grad(losses, x, grads[0], create_graph=True)
        else:
            dx = _backward.cross_entropy_backward(x, target, grads[0], stats, *ctx.args)
        return dx, None, None


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return ``torch.nn.functional.cross_entropy``, of half input computed in FP32: an FP32 loss.

    The gradient takes the incoming one, and with it the loss scale, in FP32, and is rounded once.
    How many targets count is summed up on the device. Lines whose target is ignored have gradient 0
    whatever is in them. Class weights and probabilities as targets are torch's, in FP32.

    Args:
        input: logits [classes], [N, classes] or [N, classes, d1, ...].
        target: int64 classes [], [N] or [N, d1, ...]; else as in torch.
        weight: of the classes.
        size_average: deprecated in torch, as there.
        ignore_index: a target that does not count.
        reduce: deprecated in torch, as there.
        reduction: "none", "mean" over the targets that count, or "sum".
        label_smoothing: share of the target's probability that is spread over all classes.

    Raises:
        IndexError: a target is no class; on CUDA it is a failed assertion on the device.
    """
    if size_average is not None or reduce is not None:
        # private (torch 2.11 to 2.15): what torch.nn.functional.cross_entropy makes of them
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce)
    if uses_triton("auto", input, target, weight, label_smoothing) and reduction in REDUCTIONS:
        return fused(input, target, ignore_index, reduction, label_smoothing, "auto")
    if isinstance(input, Tensor) and input.dtype in HALF_DTYPES:
        weight = weight.float() if weight is not None and weight.dtype in HALF_DTYPES else weight
        target = target.float() if target.dtype in HALF_DTYPES else target
        input = input.float()
    return torch.nn.functional.cross_entropy(
        input,
        target,
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def uses_triton(
    backend: str, input: Tensor, target: Tensor, weight: Tensor | None, smoothing: float
) -> bool:
    """Tell whether the kernels compute the loss; else torch does in FP32, or refuses."""
    if not is_half(input) or weight is not None:
        return False
    if not isinstance(target, Tensor) or target.dtype is not torch.int64:
        return False
    if not input.dim() or target.device != input.device or not 0 <= smoothing <= 1:
        return False
    dim = _class_dim(input)
    if target.shape != input.shape[:dim] + input.shape[dim + 1 :] or not input.numel():
        return False
    return _cross_entropy.CROSS_ENTROPY.uses_triton(backend, input)


def fused(
    input: Tensor, target: Tensor, ignore_index: int, reduction: str, smoothing: float, backend: str
) -> Tensor:
    """Return the loss of logits for which ``uses_triton`` is true."""
    args = _class_dim(input), ignore_index, float(smoothing), backend
    if input.requires_grad and torch.is_grad_enabled():
        losses = CrossEntropy.apply(input, target, args)
    else:
        losses, _ = _cross_entropy.cross_entropy(input, target, *args)
    return reduced(losses, target, ignore_index, reduction)


def reduced(losses: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Return ``losses``, or their sum, or that over the number of targets that count."""
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / (target != ignore_index).sum() if reduction == "mean" else total


def _class_dim(input: Tensor) -> int:
    return min(1, input.dim() - 1)
