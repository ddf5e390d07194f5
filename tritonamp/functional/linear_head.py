"""The last linear layer of a model: its logits, the products of their gradients, and its losses.

``RowsOfLayer`` computes losses of a layer's outputs, of which one chunk of rows exists at a time.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.functional.inputs import is_under_transforms
from tritonamp.functional.losses import LineLosses, Results, Tensors, differentiable
from tritonamp.policy import HALF_DTYPES

MIN_ROWS = 2048  # of a chunk


class LinearHead:
    """A linear layer whose products take half operands and have FP32 sums.

    On CUDA operands have ``dtype``. On a CPU half operands are widened because half products
    are slow there. Logits are rounded once, as on a Tensor Core.

    Args:
        dtype: dtype of logits and their gradients.
        weight: weight of the layer in any dtype, [v, d].
        bias: bias of the layer in any dtype, [v], or None.

    Attributes:
        dtype: the argument.
        wide: dtype of sums, FP32 or FP64.
        operand: dtype of the products' operands.
        weight, bias: the arguments in ``operand``.
    """

    def __init__(self, dtype: torch.dtype, weight: Tensor, bias: Tensor | None) -> None:
        self.dtype = dtype
        self.wide = torch.promote_types(dtype, torch.float32)
        self.operand = dtype if weight.is_cuda else self.wide
        self.weight = self.rows(weight)
        self.bias = None if bias is None else self.rows(bias)

    @staticmethod
    def chunk_rows(features: int) -> int:
        """Return the default number of rows per chunk.

        Half logits of 2 d rows take as much memory as the weight's FP32 gradient.
        """
        return max(MIN_ROWS, 2 * features)

    def rows(self, x: Tensor) -> Tensor:
        """Return rows of the layer's input as an operand."""
        return x.to(self.dtype).to(self.operand)

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits [..., v] of an operand [..., d], rounded to ``dtype``."""
        return torch.nn.functional.linear(rows, self.weight, self.bias).to(self.dtype)

    def gradients(self, dlogits: Tensor, rows: Tensor, needed: tuple[bool, ...]) -> Tensors:
        """Return the gradients of rows, weight and bias in ``wide``, None where not needed.

        Args:
            dlogits: gradients of the logits, [r, v].
            rows: the operand of the logits, [r, d].
            needed: needs_input_grad of rows, weight and bias.
        """
        dlogits = dlogits.to(self.operand)
        return (
            self._product(dlogits, self.weight) if needed[0] else None,
            self._product(dlogits.t(), rows) if needed[1] else None,
            dlogits.sum(0, dtype=self.wide) if needed[2] else None,
        )

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        if self.operand is self.wide:
            return a @ b
        return torch.mm(a, b, out_dtype=self.wide)  # only CUDA has that


class GradientSums:
    """The needed gradients of input, weight and bias, while chunks of rows are added.

    Sums of weight and bias stay in FP32 because half would lose small chunks.
    """

    def __init__(
        self, head: LinearHead, input: Tensor, dtype: torch.dtype, needed: tuple[bool, ...]
    ) -> None:
        self.head, self.needed = head, needed
        self.input = torch.empty_like(input, dtype=dtype) if needed[0] else None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def add(self, at: slice, rows: Tensor, dlogits: Tensor) -> None:
        """Add the gradients of the rows ``at``."""
        of_rows, of_weight, of_bias = self.head.gradients(dlogits, rows, self.needed)
        if self.input is not None and of_rows is not None:
            self.input[at] = of_rows
        if of_weight is not None:
            self.weight = of_weight if self.weight is None else self.weight.add_(of_weight)
        if of_bias is not None:
            self.bias = of_bias if self.bias is None else self.bias.add_(of_bias)

    def rounded(self, weight: Tensor, bias: Tensor | None) -> Tensors:
        """Return the gradients of input, weight and bias in the dtypes of these tensors."""
        return (
            self.input,
            None if self.weight is None else self.weight.to(weight.dtype),
            None if self.bias is None or bias is None else self.bias.to(bias.dtype),
        )


class RowsOfLayer(NamedTuple):
    """Losses of a linear layer's outputs, of which one chunk of rows exists at a time.

    Attributes:
        input: inputs of the layer, [..., d].
        weight: weight of the layer, [v, d].
        bias: bias of the layer, [v], or None.
        targets: int64 classes, [...].
        losses: the losses to compute.
        chunk_rows: rows per chunk, or None.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    losses: LineLosses
    chunk_rows: int | None

    @property
    def take_all_logits(self) -> bool:
        """Whether torch computes the loss: under transforms, on the meta device, of no rows."""
        return is_under_transforms() or self.input.is_meta or not self.targets.numel()

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of ``LossOfLinear``: with rows [r, d], targets [r] and defaults."""
        features = self.input.shape[-1]
        rows, targets = self.input.reshape(-1, features), self.targets.reshape(-1)
        dtype = dtype_of_logits(self.input, self.weight)
        chunk_rows = self.chunk_rows or LinearHead.chunk_rows(features)
        return rows, self.weight, self.bias, targets, dtype, self.losses, chunk_rows

    def results(self) -> Results:
        """Return the results of the losses, each [...]."""
        arguments = self.arguments()
        if self.take_all_logits:
            rows, weight, bias, targets, dtype, losses, _ = arguments
            head = LinearHead(dtype, weight, bias)
            found = losses.by_torch(head.logits(head.rows(rows)), targets)
        else:
            found = LossOfLinear.apply(*arguments)
        return tuple(result.view(self.targets.shape) for result in found)


class LossOfLinear(torch.autograd.Function):
    """Results of ``RowsOfLayer``; the backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        dtype: torch.dtype,
        losses: LineLosses,
        chunk_rows: int,
    ) -> Results:
        with torch.autocast(input.device.type, enabled=False):
            head, found, stats = LinearHead(dtype, weight, bias), [], []
            for at in chunks(len(targets), chunk_rows):
                # The logits get no name because it would keep them while the next ones are made.
                results, stat = losses.of(head.logits(head.rows(input[at])), targets[at])
                found.append(results)
                stats.append(stat)
        ctx.save_for_backward(input, weight, bias, targets, *stats)
        ctx.args = dtype, losses, chunk_rows
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensors:
        input, weight, bias, targets, *stats = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        dtype, losses, chunk_rows = ctx.args
        with torch.autocast(input.device.type, enabled=False):
            head = LinearHead(dtype, weight, bias)
            if torch.is_grad_enabled():  # for a gradient of the gradient
                results = losses.by_torch(head.logits(head.rows(input)), targets)
                found = differentiable(results, (input, weight, bias), needed, grads)
                return *found, *(None,) * 4
            sums = GradientSums(head, input, input.dtype, needed)
            for at, stat in zip(chunks(len(targets), chunk_rows), stats, strict=True):
                rows = head.rows(input[at])
                of_chunk = [grad[at] for grad in grads]
                sums.add(at, rows, losses.gradient(head.logits(rows), targets[at], of_chunk, stat))
        return *sums.rounded(weight, bias), *(None,) * 4


def dtype_of_logits(input: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of a linear layer's logits.

    It is half under autocast, and if one of input and weight is half and the other FP32.
    """
    kind, given = input.device.type, {input.dtype, weight.dtype}
    casts = not input.is_meta and torch.is_autocast_enabled(kind)
    if casts and torch.float64 not in given:
        return torch.get_autocast_dtype(kind)
    half = given.intersection(HALF_DTYPES)
    if len(half) == 1 and given <= half | {torch.float32}:
        return half.pop()
    return torch.promote_types(input.dtype, weight.dtype)


def chunks(count: int, rows: int) -> Iterator[slice]:
    return (slice(at, at + rows) for at in range(0, count, rows))


def check_layer(input: Tensor, weight: Tensor, bias: Tensor | None, chunk_rows: int | None) -> None:
    """Raise ValueError if a linear layer's arguments do not fit each other."""
    shapes = tuple(input.shape), tuple(weight.shape)
    if not input.dim() or weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
        raise ValueError(f"expected input [..., d] and weight [v, d], got {shapes[0]}, {shapes[1]}")
    if bias is not None and tuple(bias.shape) != shapes[1][:1]:
        raise ValueError(
            f"bias: expected shape {shapes[1][:1]}, weight's first, got {tuple(bias.shape)}"
        )
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows: expected 1 or more, or None, got {chunk_rows}")
