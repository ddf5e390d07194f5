"""The last linear layer of a model: logits, and the products of their gradients."""

from typing import NamedTuple

import torch
from torch import Tensor

MIN_ROWS = 2048


class LinearHead(NamedTuple):
    """A linear layer as its products are computed: from half operands, with FP32 sums.

    On CUDA operands are of ``dtype``. On a CPU, where torch's half products are slow, half ones are
    widened, and logits are rounded once: what a Tensor Core does.

    Attributes:
        dtype: of logits and their gradients.
        wide: what is summed up in: FP32, of FP64 FP64.
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

    def gradients(
        self, dlogits: Tensor, rows: Tensor, needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of rows, weight and bias, in ``wide``; None for what is not needed.

        Args:
            dlogits: [r, v], the gradients of logits.
            rows: [r, d], the operand that the logits were made of.
            needed: which of the three.
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
    """Gradients of input, weight and bias while chunks of rows are added.

    Attributes:
        head: the layer.
        needed: which of the three.
        input: [r, d], or None.
        weight: [v, d], not rounded to half, or None.
        bias: [v], not rounded to half, or None.
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
        if self.input is not None:
            self.input[at] = of_rows
        self.weight = of_weight if self.weight is None else self.weight.add_(of_weight)
        self.bias = of_bias if self.bias is None else self.bias.add_(of_bias)
