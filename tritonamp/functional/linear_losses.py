"""Cross entropy of a linear layer's outputs, of which one chunk of rows exists at a time.

For r rows, v classes and d features training takes 6 rvd FLOPs, as many as with all logits. All
logits would take 4 rv B (with torch's operations up to 12 rv B); here they take 4 chunk_rows v B.
The forward computes the gradients chunk by chunk, while the logits of the chunk exist.

The forward does not know the loss scale, yet it loses no small gradient. A gradient of a logit is a
probability, at most 1, and a fixed power of two lifts it to where float16 is densest. The sums over
rows and classes stay in FP32 until the backward, 4 (r + v) d B. The backward multiplies them by the
incoming gradient in FP32 and rounds once.

Without a reduction each row has a factor of its own, so that the forward cannot sum up. The
backward then computes the logits again, 8 rvd FLOPs in all, and two FP32 numbers per row are kept.
"""

from typing import Any

import torch
from torch import Tensor

from tritonamp.functional.inputs import backend_in_force
from tritonamp.functional.linear_head import (
    GradientSums,
    LinearHead,
    RowsOfLayer,
    check_layer,
    chunks,
)
from tritonamp.functional.losses import (
    REDUCTIONS,
    LineLosses,
    Tensors,
    check_targets,
    differentiable,
    reduced,
)

LIFT = 2.0**15  # the largest power of two that is still finite in float16


class ReducedLinearCrossEntropy(torch.autograd.Function):
    """Sum or mean of the rows' losses; the forward computes the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        dtype: torch.dtype,
        rule: LineLosses,
        chunk_rows: int,
        reduction: str,
    ) -> Tensor:
        lift = LIFT if dtype is torch.float16 else 1.0
        with torch.autocast(input.device.type, enabled=False):
            head, losses = LinearHead(dtype, weight, bias), []
            sums = GradientSums(head, input, head.wide, ctx.needs_input_grad[:3])
            for at in chunks(len(target), chunk_rows):
                rows = head.rows(input[at])
                logits = head.logits(rows)
                (loss,), stats = rule.of(logits, target[at])
                grad = torch.full_like(loss, lift)
                dlogits = rule.gradient(logits, target[at], [grad], stats)
                sums.add(at, rows, dlogits)
                losses.append(loss)
                del logits, dlogits  # frees them before the next chunk
            loss = reduced(torch.cat(losses), target, rule.ignore_index, reduction)
        # If no target counts, the mean is NaN and gradients are 0.
        count = (target != rule.ignore_index).sum().clamp(min=1) if reduction == "mean" else 1
        ctx.save_for_backward(
            input, weight, bias, target, loss.new_ones(()) / (lift * count),
            sums.input, sums.weight, sums.bias,
        )  # fmt: skip
        ctx.args = dtype, rule, reduction
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensors:
        input, weight, bias, target, share, *kept = ctx.saved_tensors
        inputs = input, weight, bias
        with torch.autocast(target.device.type, enabled=False):
            if torch.is_grad_enabled():  # for a gradient of the gradient
                dtype, rule, reduction = ctx.args
                head = LinearHead(dtype, weight, bias)
                (losses,) = rule.by_torch(head.logits(head.rows(input)), target)
                loss = reduced(losses, target, rule.ignore_index, reduction)
                found = differentiable([loss], inputs, ctx.needs_input_grad[:3], grads)
            else:
                factor = grads[0] * share
                found = tuple(
                    None if sums is None else _scaled(sums, factor, given.dtype)
                    for sums, given in zip(kept, inputs, strict=True)
                )
        return *found, *(None,) * 5


def _scaled(sums: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``sums * factor`` in ``dtype``, without an FP32 tensor for the product.

    It is not computed in place because another backward of the same graph may follow.
    """
    return torch.mul(sums, factor, out=torch.empty_like(sums, dtype=dtype))


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk_rows: int | None = None,
) -> Tensor:
    """Return the cross entropy of ``linear(input, weight, bias)``, one chunk of rows at a time.

    Logits are half under autocast, in an enabled forward, and if one of input and weight is half
    and the other FP32. The loss is FP32 (from FP64: FP64). Gradients of weight and bias are added
    up in FP32 and rounded once. For a sum or mean the forward computes the gradients, and keeps
    them in FP32, 4 B per element of input and weight; without a reduction the backward computes the
    logits again. A gradient of the gradient and transforms of torch.func take all logits at once.

    Args:
        input: input of the model's last linear layer, [..., d].
        weight: weight of that layer, [v, d].
        target: int64 classes, [...].
        bias: bias of that layer, [v], or None.
        ignore_index: target that does not count.
        reduction: "none", "mean" over the targets that count, or "sum".
        label_smoothing: share of the target's probability that is spread over all classes.
        chunk_rows: number of rows whose logits exist at a time, with their gradients. None: 2048,
            or 2 d if that is more. Half logits of 2 d rows take as much memory as the weight's FP32
            gradient.

    Raises:
        ValueError: a shape, the targets' dtype, the reduction, ``label_smoothing`` or
            ``chunk_rows`` is wrong.
        IndexError: a target is no class; on CUDA it is a failed assertion on the device.
    """
    check_layer(input, weight, bias, chunk_rows)
    check_targets("target", target, tuple(input.shape[:-1]))
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: expected 'none', 'mean' or 'sum', got {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing: expected 0 to 1, got {label_smoothing}")
    smoothing, backend = float(label_smoothing), backend_in_force()
    losses = LineLosses(ignore_index=ignore_index, smoothing=smoothing, backend=backend)
    rows = RowsOfLayer(input, weight, bias, target, losses, chunk_rows)
    trains = any(t is not None and t.requires_grad for t in (input, weight, bias))
    makes_gradients = reduction != "none" and trains and torch.is_grad_enabled()
    if makes_gradients and not rows.take_all_logits:
        loss: Tensor = ReducedLinearCrossEntropy.apply(*rows.arguments(), reduction)
        return loss
    (found,) = rows.results()
    return reduced(found, target, ignore_index, reduction)
