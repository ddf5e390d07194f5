"""Logits that are computed when something reads them, which a fused loss does not."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tritonamp.policy import HALF_DTYPES

MIN_ROWS = 2048


class Head(NamedTuple):
    """What half logits are made of.

    Attributes:
        rows: [..., d], what the model's last layer is given.
        weight: [v, d], of that layer.
        bias: [v], or None.
        dtype: half, to which the logits are rounded.
    """

    rows: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype

    @property
    def chunk_rows(self) -> int:
        """Rows whose half logits take as much memory as the weight's FP32 gradient, or 2048."""
        return max(MIN_ROWS, 2 * self.rows.shape[-1])

    def logits(self) -> Tensor:
        """Return [..., v] in ``dtype``."""
        with torch.autocast(self.rows.device.type, enabled=False):
            operands = [None if t is None else self.operand(t) for t in self[:3]]
            return nn.functional.linear(*operands).to(self.dtype)  # type: ignore[arg-type]

    def operand(self, tensor: Tensor) -> Tensor:
        """Round to ``dtype``; on a CPU, whose half products are slow, widen again."""
        half = tensor.to(self.dtype)
        return half if half.is_cuda else half.float()


class UnreadLogits(Tensor):
    """Logits of a layer that nobody has read: shape, dtype, device and a place in the graph.

    ``float`` and ``clone`` give others; any other operation computes them, once.

    Attributes:
        head: what they are made of.
        computed: they themselves, once they were read; else None.
    """

    head: Head
    computed: Tensor | None

    @classmethod
    def of(cls, head: Head, dtype: torch.dtype) -> "UnreadLogits":
        """Return the logits of ``head``, in ``dtype``."""
        unread: UnreadLogits = _Unread.apply(*head, dtype)
        unread.head = head
        return unread

    @classmethod
    def made(cls, head: Head, dtype: torch.dtype) -> "UnreadLogits":
        """Return the logits of ``head`` without a place in the graph."""
        unread: Any = Tensor._make_wrapper_subclass(
            cls, (*head.rows.shape[:-1], len(head.weight)), dtype=dtype, device=head.rows.device
        )
        unread.head, unread.computed = head, None
        return unread

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float and len(args) == 1 and not kwargs:
            func, args = Tensor.to, (*args, torch.float32)
        if func is Tensor.to and len(args) == 2 and args[1] is torch.float32 and not kwargs:
            unread = args[0]
            if unread.computed is None and unread.dtype is not torch.float32:
                return cls.of(unread.head, torch.float32)
        # private: the operation itself, which comes by ``__torch_dispatch__`` (torch 2.11 to 2.15)
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.clone.default and args[0].computed is None:
            return cls.made(args[0].head, args[0].dtype)  # DDP does it to all that a model returns
        read = functools.partial(tree_map_only, cls, cls._read)
        return func(*read(args), **read(kwargs or {}))

    def _read(self) -> Tensor:
        if self.computed is None:
            self.computed = self.head.logits().to(self.dtype)
        return self.computed


class _Unread(torch.autograd.Function):
    """``UnreadLogits`` of a head, and the gradients of the head where they were read."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        half: torch.dtype,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, bias)
        ctx.set_materialize_grads(False)
        ctx.half = half
        return UnreadLogits.made(Head(rows, weight, bias, half), dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads[0] is None:  # of what nobody has read: a function of many outputs, as DDP has
            return None, None, None, None, None
        rows, weight, bias = ctx.saved_tensors
        head = Head(rows, weight, bias, ctx.half)
        with torch.autocast(head.rows.device.type, enabled=False):
            grad = head.operand(grads[0])
            of_rows = of_weight = of_bias = None
            if ctx.needs_input_grad[0]:
                of_rows = (grad @ head.operand(weight)).to(rows.dtype)
            if ctx.needs_input_grad[1]:
                product = grad.flatten(0, -2).t() @ head.operand(rows).flatten(0, -2)
                of_weight = product.to(weight.dtype)
            if ctx.needs_input_grad[2]:
                of_bias = grad.flatten(0, -2).sum(0, dtype=torch.float32).to(bias.dtype)
        return of_rows, of_weight, of_bias, None, None


@contextlib.contextmanager
def leaves_logits_unread(layer: nn.Linear) -> Iterator[None]:
    """Have ``layer`` return ``UnreadLogits`` inside the block, where they are half and many.

    Few of them (``Head.chunk_rows``) are computed: they take less memory than the gradient of the
    weight, and are not computed again in the backward.

    Args:
        layer: with a plain weight, and no forward set on the instance.
    """
    layer.forward = functools.partial(_forward, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del layer.forward


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:
    kind = input.device.type
    casts = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if casts else input.dtype
    head = Head(input, layer.weight, layer.bias, dtype)
    many = input.numel() > head.chunk_rows * input.shape[-1]
    seen = torch.compiler.is_compiling() or not torch.is_grad_enabled()
    if many and dtype in HALF_DTYPES and not seen:
        return UnreadLogits.of(head, dtype)
    return type(layer).forward(layer, input)
