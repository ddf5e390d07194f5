"""Cross entropy of a linear layer's outputs, of which a part exists at a time.

Let r be rows, v classes, d features. Training takes 6 rvd FLOPs, as with all logits, which would
take 4 B (with torch's operations up to 12 B) for each of r * v; here it is 4 B for each of
chunk_rows * v. Gradients are made chunk by chunk in the forward, where the logits are.

Neither the loss scale nor any other factor is known there, yet no small gradient is lost: gradients
of logits are probabilities, at most 1, and a fixed power of two puts them where float16 is densest.
Their sums stay in FP32, 4 (r + v) d B until the backward, which multiplies by the incoming gradient
in FP32 and rounds once.

Losses that are not reduced get a factor for each row, of which no sum can be made before. They are
computed again in the backward: 8 rvd FLOPs, and two FP32 numbers a row are kept.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.functional import linear_head
from tritonamp.functional.linear_head import GradientSums, LinearHead, Results, Tensors
from tritonamp.functional.losses import REDUCTIONS, cross_entropy, reduced
from tritonamp.kernels.cross_entropy import cross_entropy as cross_entropy_of_lines
from tritonamp.kernels.cross_entropy_backward import cross_entropy_backward

LIFT = 2.0**15  # of float16: the largest factor of a gradient of 1 that it holds


class CrossEntropyRows(NamedTuple):
    """Cross entropies of rows: a ``RowLoss``."""

    ignore_index: int
    smoothing: float

    def of(self, logits: Tensor, targets: Tensor) -> tuple[Results, Tensor]:
        losses, stats = cross_entropy_of_lines(
            logits, targets, 1, *self, linear_head.backend_of(logits.dtype)
        )
        return (losses,), stats

    def gradient(
        self, logits: Tensor, targets: Tensor, grads: Sequence[Tensor], stats: Tensor
    ) -> Tensor:
        return cross_entropy_backward(
            logits, targets, grads[0], stats, 1, *self, linear_head.backend_of(logits.dtype)
        )

    def by_torch(self, logits: Tensor, targets: Tensor) -> Results:
        losses = cross_entropy(
            logits,
            targets,
            ignore_index=self.ignore_index,
            reduction="none",
            label_smoothing=self.smoothing,
        )
        return (losses,)


class ReducedLinearCrossEntropy(torch.autograd.Function):
    """The sum of the losses of rows, or their mean, with gradients that the forward makes."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        dtype: torch.dtype,
        rule: CrossEntropyRows,
        chunk_rows: int,
        reduction: str,
    ) -> Tensor:
        lift = LIFT if dtype is torch.float16 else 1.0
        with torch.autocast(input.device.type, enabled=False):
            head, losses = LinearHead.of(dtype, weight, bias), []
            sums = GradientSums(head, input, head.wide, ctx.needs_input_grad[:3])
            for at in linear_head.chunks(len(target), chunk_rows):
                rows = head.rows(input[at])
                logits = head.logits(rows)
                (loss,), stats = rule.of(logits, target[at])
                grad = torch.full_like(loss, lift)
                dlogits = rule.gradient(logits, target[at], [grad], stats)
                sums.add(at, rows, dlogits)
                losses.append(loss)
                del logits, dlogits  # before the next ones are made
            loss = reduced(torch.cat(losses), target, rule.ignore_index, reduction)
        # where no target counts the mean is NaN, and gradients are 0
        count = (target != rule.ignore_index).sum().clamp(min=1) if reduction == "mean" else 1
        ctx.save_for_backward(
            input, weight, bias, target, loss.new_ones(()) / (lift * count),
            sums.input, sums.weight, sums.bias,
        )  # fmt: skip
        ctx.args = dtype, rule
        ctx.reduction = reduction
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensors:
        input, weight, bias, target, share, *kept = ctx.saved_tensors
        inputs = input, weight, bias
        with torch.autocast(target.device.type, enabled=False):
            if torch.is_grad_enabled():  # it is differentiated again
                (losses,) = linear_head.all_at_once(input, weight, bias, target, *ctx.args)
                loss = reduced(losses, target, ctx.args[1].ignore_index, ctx.reduction)
                found = linear_head.differentiable([loss], inputs, ctx.needs_input_grad[:3], grads)
            else:
                factor = grads[0] * share
                found = tuple(
                    None if sums is None else _scaled(sums, factor, given.dtype)
                    for sums, given in zip(kept, inputs, strict=True)
                )
        return *found, *(None,) * 5


def _scaled(sums: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``sums * factor`` in ``dtype``, without an FP32 product on the way.

    Another backward of the same graph will ask for the sums again.
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
    """Return the cross entropy of ``linear(input, weight, bias)``, which exists in parts only.

    Under autocast and in an enabled forward logits are half, as those of a linear layer there; and
    so they are where the input or the weight is half, the other FP32. The loss is FP32, of FP64
    FP64. Gradients of weight and bias are added up in FP32 and rounded once. Those of a sum or mean
    are made in the forward, and kept in FP32 until the backward, 4 B for each element of input and
    weight; losses that are not reduced are computed again in the backward. A gradient of the
    gradient takes all logits at once, and so do transforms of torch.func.

    Args:
        input: [..., d], what the last linear layer of a model is given.
        weight: [v, d], of that layer.
        target: int64 classes, [...].
        bias: [v], or None.
        ignore_index: a target that does not count.
        reduction: "none", "mean" over the targets that count, or "sum".
        label_smoothing: share of the target's probability that is spread over all classes.
        chunk_rows: rows of logits that exist at a time, with their gradients. None: 2048, or 2 d
            where that is more: half logits then take as much memory as the weight's FP32 gradient
            does.

    Raises:
        ValueError: shapes, the reduction or ``chunk_rows`` are no such.
        IndexError: a target is no class; on CUDA it is a failed assertion on the device.
    """
    linear_head.check_layer(input, weight, bias, chunk_rows)
    _check(target, tuple(input.shape[:-1]), reduction, label_smoothing)
    rows, targets = input.reshape(-1, input.shape[-1]), target.reshape(-1)
    dtype = linear_head.dtype_of_logits(input, weight)
    rule = CrossEntropyRows(ignore_index, float(label_smoothing))
    chunk_rows = chunk_rows or LinearHead.chunk_rows(input.shape[-1])
    args = rows, weight, bias, targets, dtype, rule, chunk_rows
    trains = any(t is not None and t.requires_grad for t in (rows, weight, bias))
    makes_gradients = reduction != "none" and trains and torch.is_grad_enabled()
    if makes_gradients and not linear_head.takes_all_logits(rows, targets):
        loss: Tensor = ReducedLinearCrossEntropy.apply(*args, reduction)
        return loss
    (losses,) = linear_head.results_of_linear(*args)
    return reduced(losses.view(target.shape), target, ignore_index, reduction)


def _check(target: Tensor, rows: tuple[int, ...], reduction: str, label_smoothing: float) -> None:
    """Raise ValueError about what is wrong with the arguments."""
    if tuple(target.shape) != rows or target.dtype is not torch.int64:
        raise ValueError(
            f"target: expected int64 classes of shape {rows}, one for each row of input, got "
            f"{target.dtype} of shape {tuple(target.shape)}"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: expected 'none', 'mean' or 'sum', got {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing: expected 0 to 1, got {label_smoothing}")
