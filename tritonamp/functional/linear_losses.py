"""Cross entropy of a linear layer's outputs, of which a part exists at a time.

Let r be rows, v classes, d features. With all logits, training takes 6 rvd FLOPs, and 4 B (with
torch's operations up to 12 B) for each of r * v logits. Here they are computed in the forward and
once more in the backward: 8 rvd FLOPs, and 4 B for each of chunk_rows * v.

The other way, gradients made chunk by chunk in the forward, saves those 2 rvd FLOPs, but knows
nothing of the loss scale or of a gradient for each row: rounded to half they would lose what the
scale is there to save, and in FP32 they take 4 (r + v) d B until the backward. What is kept here
are two FP32 numbers a row.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.functional.losses import REDUCTIONS, cross_entropy, reduced
from tritonamp.kernels.cross_entropy import cross_entropy as cross_entropy_of_lines
from tritonamp.kernels.cross_entropy_backward import cross_entropy_backward
from tritonamp.policy import HALF_DTYPES

MIN_ROWS = 2048


class _Layer(NamedTuple):
    """A linear layer, as its products are computed.

    On CUDA operands are of ``dtype``. On a CPU, where torch's half products are slow, half ones are
    widened, and so is the result, which is rounded once: what a Tensor Core does.

    Attributes:
        dtype: of logits and their gradients.
        wide: what is summed up over rows: FP32, of FP64 FP64.
        operand: that of products.
        weight: [v, d], an operand.
        bias: [v], an operand, or None.
    """

    dtype: torch.dtype
    wide: torch.dtype
    operand: torch.dtype
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, dtype: torch.dtype, weight: Tensor, bias: Tensor | None) -> "_Layer":
        wide = torch.promote_types(dtype, torch.float32)
        operand = dtype if weight.is_cuda else wide
        rounded = (None if t is None else t.to(dtype).to(operand) for t in (weight, bias))
        return cls(dtype, wide, operand, *rounded)  # type: ignore[arg-type]

    @property
    def backend(self) -> str:
        """That of the loss: kernels compute in FP32."""
        return "eager" if self.dtype is torch.float64 else "auto"

    def rows(self, x: Tensor) -> Tensor:
        """Return rows of the input as an operand."""
        return x.to(self.dtype).to(self.operand)

    def logits(self, rows: Tensor) -> Tensor:
        """Return [r, v], rounded to ``dtype``."""
        return torch.nn.functional.linear(rows, self.weight, self.bias).to(self.dtype)

    def product_over_rows(self, dlogits: Tensor, rows: Tensor) -> Tensor:
        """Return the gradient of the weight, [v, d], not rounded to half."""
        if self.operand is self.wide:
            return dlogits.t() @ rows
        return torch.mm(dlogits.t(), rows, out_dtype=self.wide)  # only CUDA has that


class LinearCrossEntropy(torch.autograd.Function):
    """Losses of rows, [r]."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        dtype: torch.dtype,
        ignore_index: int,
        smoothing: float,
        chunk_rows: int,
    ) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            layer, losses, stats = _Layer.of(dtype, weight, bias), [], []
            for at in _chunks(len(target), chunk_rows):
                # no name for the logits: it would keep them while the next ones are made
                loss, stat = cross_entropy_of_lines(
                    layer.logits(layer.rows(input[at])),
                    target[at],
                    1,
                    ignore_index,
                    smoothing,
                    layer.backend,
                )
                losses.append(loss)
                stats.append(stat)
        ctx.save_for_backward(input, weight, bias, target, *stats)
        ctx.args = dtype, ignore_index, smoothing, chunk_rows
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, target, *stats = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        with torch.autocast(input.device.type, enabled=False):
            if torch.is_grad_enabled():  # it is differentiated again
                losses = _all_at_once(input, weight, bias, target, *ctx.args[:3])
                tensors = [
                    t for t, wanted in zip((input, weight, bias), needed, strict=True) if wanted
                ]
                found = iter(torch.autograd.grad(losses, tensors, grads[0], create_graph=True))
                gradients = tuple(next(found) if wanted else None for wanted in needed)
            else:
                dtype, ignore_index, smoothing, chunk_rows = ctx.args
                sums = _Sums(_Layer.of(dtype, weight, bias), needed)
                for at, stat in zip(_chunks(len(target), chunk_rows), stats, strict=True):
                    sums.add(input[at], target[at], grads[0][at], stat, ignore_index, smoothing)
                gradients = sums.gradients(input, weight, bias)
        return *gradients, None, None, None, None, None


class _Sums:
    """Gradients of input, weight and bias while chunks of rows are added."""

    def __init__(self, layer: _Layer, needed: tuple[bool, ...]) -> None:
        self.layer, self.needed = layer, needed
        self.input: list[Tensor] = []
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def add(
        self,
        input: Tensor,
        target: Tensor,
        grad: Tensor,
        stats: Tensor,
        ignore_index: int,
        smoothing: float,
    ) -> None:
        """Add a chunk of rows; its logits exist while its gradients are made, and no longer."""
        layer, rows = self.layer, self.layer.rows(input)
        dlogits = cross_entropy_backward(
            layer.logits(rows), target, grad, stats, 1, ignore_index, smoothing, layer.backend
        ).to(layer.operand)
        if self.needed[0]:
            self.input.append((dlogits @ layer.weight).to(layer.dtype))
        if self.needed[1]:
            more = layer.product_over_rows(dlogits, rows)
            self.weight = more if self.weight is None else self.weight.add_(more)
        if self.needed[2]:
            more = dlogits.sum(0, dtype=layer.wide)
            self.bias = more if self.bias is None else self.bias.add_(more)

    def gradients(
        self, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return what was needed, in the dtypes of the tensors, rounded once."""
        return (
            torch.cat(self.input).to(input.dtype) if self.needed[0] else None,
            None if self.weight is None else self.weight.to(weight.dtype),
            None if self.bias is None or bias is None else self.bias.to(bias.dtype),
        )


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
    FP64. Gradients of weight and bias are added up in FP32 and rounded once. The backward computes
    the logits again. A gradient of the gradient takes all logits at once, and so do transforms of
    torch.func.

    Args:
        input: [..., d], what the last linear layer of a model is given.
        weight: [v, d], of that layer.
        target: int64 classes, [...].
        bias: [v], or None.
        ignore_index: a target that does not count.
        reduction: "none", "mean" over the targets that count, or "sum".
        label_smoothing: share of the target's probability that is spread over all classes.
        chunk_rows: rows of logits that exist at a time, in the backward with their gradients. None:
            2048, or 2 d where that is more: half logits then take as much memory as the weight's
            FP32 gradient does.

    Raises:
        ValueError: shapes, the reduction or ``chunk_rows`` are no such.
        IndexError: a target is no class; on CUDA it is a failed assertion on the device.
    """
    _check(input, weight, target, bias, reduction, label_smoothing, chunk_rows)
    rows, targets = input.reshape(-1, input.shape[-1]), target.reshape(-1)
    dtype = _dtype_of_logits(input, weight)
    args = rows, weight, bias, targets, dtype, ignore_index, float(label_smoothing)
    # private (torch 2.11 to 2.15), see inputs.is_half
    if torch._C._are_functorch_transforms_active() or input.is_meta or not len(targets):
        losses = _all_at_once(*args)
    else:
        losses = LinearCrossEntropy.apply(*args, chunk_rows or max(MIN_ROWS, 2 * input.shape[-1]))
    return reduced(losses.view(target.shape), target, ignore_index, reduction)


def _all_at_once(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    dtype: torch.dtype,
    ignore_index: int,
    smoothing: float,
) -> Tensor:
    """Return the losses of rows by torch's operations on all logits."""
    layer = _Layer.of(dtype, weight, bias)
    return cross_entropy(
        layer.logits(layer.rows(input)),
        target,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=smoothing,
    )


def _dtype_of_logits(input: Tensor, weight: Tensor) -> torch.dtype:
    kind, given = input.device.type, {input.dtype, weight.dtype}
    casts = not input.is_meta and torch.is_autocast_enabled(kind)
    if casts and torch.float64 not in given:
        return torch.get_autocast_dtype(kind)
    half = given.intersection(HALF_DTYPES)
    if len(half) == 1 and given <= half | {torch.float32}:
        return half.pop()
    return torch.promote_types(input.dtype, weight.dtype)


def _chunks(count: int, rows: int) -> Iterator[slice]:
    return (slice(at, at + rows) for at in range(0, count, rows))


def _check(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    reduction: str,
    label_smoothing: float,
    chunk_rows: int | None,
) -> None:
    """Say what is wrong with the arguments.

    Raises:
        ValueError: what was got, and what is expected.
    """
    shapes = tuple(input.shape), tuple(weight.shape), tuple(target.shape)
    if not input.dim() or weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
        raise ValueError(f"expected input [..., d] and weight [v, d], got {shapes[0]}, {shapes[1]}")
    if shapes[2] != shapes[0][:-1] or target.dtype is not torch.int64:
        raise ValueError(
            f"target: expected int64 classes of shape {shapes[0][:-1]}, one for each row of input, "
            f"got {target.dtype} of shape {shapes[2]}"
        )
    if bias is not None and tuple(bias.shape) != shapes[1][:1]:
        raise ValueError(
            f"bias: expected shape {shapes[1][:1]}, weight's first, got {tuple(bias.shape)}"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: expected 'none', 'mean' or 'sum', got {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing: expected 0 to 1, got {label_smoothing}")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows: expected 1 or more, or None, got {chunk_rows}")
