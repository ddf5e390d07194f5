"""A differentiable group_norm: half storage, FP32 arithmetic, weights half or FP32."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritonamp.functional.inputs import Call, backend_in_force, min_numel, takes
from tritonamp.functional.norms import fit, of_weights
from tritonamp.kernels import group_norm as _group_norm
from tritonamp.kernels import group_norm_backward as _group_norm_backward


class GroupNorm(torch.autograd.Function):
    """group_norm that saves its half input and two FP32 numbers per group of an image."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        call: Call,
    ) -> Tensor:
        (args, compute), given = call, (x, weight, bias)
        y, stats = compute(*given) if compute else _group_norm.group_norm(*given, *args)
        ctx.save_for_backward(x, weight, bias, stats)
        ctx.args = args
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, stats = ctx.saved_tensors
        groups, eps, backend = ctx.args
        _, dweight, dbias, *_ = ctx.needs_input_grad
        if torch.is_grad_enabled():
            # A gradient of the gradient needs statistics that are functions of x.
            stats, backend = _group_norm.statistics(x, groups, eps), "eager"
        dx, sums = _group_norm_backward.group_norm_backward(
            grads[0], x, weight, stats, groups, dweight, dbias, backend
        )
        wanted = weight if dweight else None, bias if dbias else None
        return dx, *of_weights(sums, *wanted), None


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Return ``torch.nn.functional.group_norm``; half input is computed in FP32, rounded once.

    Args:
        input: [N, C, ...], contiguous or channels last. The result has the same layout.
        num_groups: number of groups of channels.
        weight: factor [C], half or float32.
        bias: summand [C], half or float32.
        eps: summand of the variance.
    """
    if not is_ours(input, num_groups, weight, bias, least=min_numel()):
        return torch.nn.functional.group_norm(input, num_groups, weight, bias, eps)
    return GroupNorm.apply(input, weight, bias, ((num_groups, eps, backend_in_force()), None))


def is_ours(input: Tensor, num_groups: int, *weights: Tensor | None, least: int) -> bool:
    """Return whether this package computes the norm; if not, torch computes or refuses it.

    On a GPU ``least`` is the least number of elements, except with weights in another dtype than
    the input, which torch's kernels refuse.
    """
    if not takes(input) or is_traceable_wrapper_subclass(input):  # torch shards DTensors' norms
        return False
    if input.dim() < 2 or num_groups < 1 or input.shape[1] % num_groups:
        return False
    if 0 in input.shape[1:] or input.numel() == num_groups:  # one value is no statistic
        return False
    return fit(input, (input.shape[1],), weights, least)
