"""The last linear layer of a model: logits, the products of their gradients, and losses by chunks.

A loss of rows of logits is a ``RowLoss``; ``LossOfLinear`` computes it of a layer's outputs, of
which one chunk of rows exists at a time.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tritonamp.functional.inputs import is_under_transforms
from tritonamp.policy import HALF_DTYPES

MIN_ROWS = 2048
Results = tuple[Tensor, ...]
Tensors = tuple[Tensor | None, ...]


class LinearHead(NamedTuple):
    """A linear layer as its products are computed: from half operands, with FP32 sums.

    On CUDA operands are of ``dtype``. On a CPU, where torch's half products are slow, half ones are
    widened, and logits are rounded once: what a Tensor Core does.

    Attributes:
        dtype: of logits and their gradients.
        wide: dtype of sums: FP32, of FP64 FP64.
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
    def of(cls, dtype: torch.dtype, weight: Tensor, bias: Tensor | None) -> "LinearHead":
        """Return the layer of a weight and a bias of any dtypes, with logits in ``dtype``."""
        wide = torch.promote_types(dtype, torch.float32)
        operand = dtype if weight.is_cuda else wide
        rounded = (None if t is None else t.to(dtype).to(operand) for t in (weight, bias))
        return cls(dtype, wide, operand, *rounded)  # type: ignore[arg-type]

    @staticmethod
    def chunk_rows(features: int) -> int:
        """Rows whose half logits take as much memory as the weight's FP32 gradient, or 2048."""
        return max(MIN_ROWS, 2 * features)

    def rows(self, x: Tensor) -> Tensor:
        """Return rows of the input as an operand."""
        return x.to(self.dtype).to(self.operand)

    def logits(self, rows: Tensor) -> Tensor:
        """Return [..., v] of the operand [..., d], rounded to ``dtype``."""
        return torch.nn.functional.linear(rows, self.weight, self.bias).to(self.dtype)

    def gradients(self, dlogits: Tensor, rows: Tensor, needed: tuple[bool, ...]) -> Tensors:
        """Return gradients of rows, weight and bias, in ``wide``; None for those not ``needed``.

        ``dlogits`` [r, v] are the gradients of logits, which were made of the operand rows [r, d].
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
    """Gradients of those of input, weight and bias that are needed, while chunks are added.

    Those of weight and bias are not rounded to half.
    """

    def __init__(
        self, head: LinearHead, input: Tensor, dtype: torch.dtype, needed: tuple[bool, ...]
    ) -> None:
        self.head, self.needed = head, needed
        self.input = torch.empty_like(input, dtype=dtype) if needed[0] else None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def add(self, at: slice, rows: Tensor, dlogits: Tensor) -> None:
        """Add the rows ``at``."""
        of_rows, of_weight, of_bias = self.head.gradients(dlogits, rows, self.needed)
        if self.input is not None and of_rows is not None:
            self.input[at] = of_rows
        if of_weight is not None:
            self.weight = of_weight if self.weight is None else self.weight.add_(of_weight)
        if of_bias is not None:
            self.bias = of_bias if self.bias is None else self.bias.add_(of_bias)

    def rounded(self, weight: Tensor, bias: Tensor | None) -> Tensors:
        """Return all three, in the dtypes of input, weight and bias."""
        return (
            self.input,
            None if self.weight is None else self.weight.to(weight.dtype),
            None if self.bias is None or bias is None else self.bias.to(bias.dtype),
        )


class RowLoss(Protocol):
    """Numbers computed of each row of logits [r, v] and its target."""

    def of(self, logits: Tensor, targets: Tensor) -> tuple[Results, Tensor]:
        """Return the results, each [r], and the statistics of rows that the gradient reads."""

    def gradient(
        self, logits: Tensor, targets: Tensor, grads: Sequence[Tensor], stats: Tensor
    ) -> Tensor:
        """Return the gradient of the logits for gradients of the results, each [r]."""

    def by_torch(self, logits: Tensor, targets: Tensor) -> Results:
        """Return the results by operations that may be differentiated any number of times."""


class LossOfLinear(torch.autograd.Function):
    """Results of a ``RowLoss``, each [r]; the backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        dtype: torch.dtype,
        loss: RowLoss,
        chunk_rows: int,
    ) -> Results:
        with torch.autocast(input.device.type, enabled=False):
            head, found, stats = LinearHead.of(dtype, weight, bias), [], []
            for at in chunks(len(targets), chunk_rows):
                # no name for the logits: it would keep them while the next ones are made
                results, stat = loss.of(head.logits(head.rows(input[at])), targets[at])
                found.append(results)
                stats.append(stat)
        ctx.save_for_backward(input, weight, bias, targets, *stats)
        ctx.args = dtype, loss, chunk_rows
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensors:
        input, weight, bias, targets, *stats = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        dtype, loss, chunk_rows = ctx.args
        with torch.autocast(input.device.type, enabled=False):
            if torch.is_grad_enabled():  # it is differentiated again
                results = all_at_once(input, weight, bias, targets, dtype, loss)
                found = differentiable(results, (input, weight, bias), needed, grads)
                return *found, *(None,) * 4
            head = LinearHead.of(dtype, weight, bias)
            sums = GradientSums(head, input, input.dtype, needed)
            for at, stat in zip(chunks(len(targets), chunk_rows), stats, strict=True):
                rows = head.rows(input[at])
                of_chunk = [grad[at] for grad in grads]
                sums.add(at, rows, loss.gradient(head.logits(rows), targets[at], of_chunk, stat))
        return *sums.rounded(weight, bias), *(None,) * 4


def results_of_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    dtype: torch.dtype,
    loss: RowLoss,
    chunk_rows: int,
) -> Results:
    """Return the results of ``loss`` by chunks of rows, or by torch where it has to see all."""
    if takes_all_logits(input, targets):
        return all_at_once(input, weight, bias, targets, dtype, loss)
    results: Results = LossOfLinear.apply(input, weight, bias, targets, dtype, loss, chunk_rows)
    return results


def takes_all_logits(input: Tensor, targets: Tensor) -> bool:
    """Return whether the loss is torch's own: under transforms, of no values, of no rows."""
    return is_under_transforms() or input.is_meta or not len(targets)


def all_at_once(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    dtype: torch.dtype,
    loss: RowLoss,
) -> Results:
    """Return the results of ``loss`` by torch's operations on all logits."""
    head = LinearHead.of(dtype, weight, bias)
    return loss.by_torch(head.logits(head.rows(input)), targets)


def dtype_of_logits(input: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of the logits of a linear layer: under autocast, and beside half, half."""
    kind, given = input.device.type, {input.dtype, weight.dtype}
    casts = not input.is_meta and torch.is_autocast_enabled(kind)
    if casts and torch.float64 not in given:
        return torch.get_autocast_dtype(kind)
    half = given.intersection(HALF_DTYPES)
    if len(half) == 1 and given <= half | {torch.float32}:
        return half.pop()
    return torch.promote_types(input.dtype, weight.dtype)


def backend_of(dtype: torch.dtype) -> str:
    """Return that of the loss: kernels compute in FP32."""
    return "eager" if dtype is torch.float64 else "auto"


def chunks(count: int, rows: int) -> Iterator[slice]:
    return (slice(at, at + rows) for at in range(0, count, rows))


def differentiable(
    results: Sequence[Tensor],
    inputs: Sequence[Tensor | None],
    needed: tuple[bool, ...],
    grads: Sequence[Tensor],
) -> Tensors:
    """Return the gradients of those inputs that are needed, which may be differentiated again."""
    tensors = [t for t, wanted in zip(inputs, needed, strict=True) if t is not None and wanted]
    found = iter(torch.autograd.grad(results, tensors, grads, create_graph=True))
    return tuple(next(found) if wanted else None for wanted in needed)


def check_layer(input: Tensor, weight: Tensor, bias: Tensor | None, chunk_rows: int | None) -> None:
    """Raise ValueError about what is wrong with a linear layer's arguments."""
    shapes = tuple(input.shape), tuple(weight.shape)
    if not input.dim() or weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
        raise ValueError(f"expected input [..., d] and weight [v, d], got {shapes[0]}, {shapes[1]}")
    if bias is not None and tuple(bias.shape) != shapes[1][:1]:
        raise ValueError(
            f"bias: expected shape {shapes[1][:1]}, weight's first, got {tuple(bias.shape)}"
        )
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows: expected 1 or more, or None, got {chunk_rows}")
