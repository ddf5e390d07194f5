"""Logits that are computed only when an operation reads them; a fused loss does not."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tritonamp import functional
from tritonamp.policy import HALF_DTYPES


class LayerCall(NamedTuple):
    """The call of a linear layer whose result is half logits."""

    rows: Tensor  # [..., d], the input of the model's last layer
    weight: Tensor  # [v, d], of that layer
    bias: Tensor | None  # [v]
    dtype: torch.dtype  # half, to which the logits are rounded

    def logits(self) -> Tensor:
        """Return [..., v] in ``dtype``."""
        with torch.autocast(self.rows.device.type, enabled=False):
            head = functional.LinearHead(self.dtype, self.weight, self.bias)
            return head.logits(head.rows(self.rows))


class UnreadLogits(Tensor):
    """Logits with shape, dtype, device and autograd node, but without values until they are read.

    ``float`` and ``clone`` also return unread logits. Any other operation computes them, once.

    Attributes:
        call: the layer's call that computes the logits.
        computed: the computed logits; None until an operation reads them.
    """

    call: LayerCall
    computed: Tensor | None

    @classmethod
    def of(cls, call: LayerCall) -> "UnreadLogits":
        """Return the logits of ``call``."""
        unread: UnreadLogits = _Unread.apply(*call)
        unread.call = call
        return unread

    @classmethod
    def without_graph(cls, call: LayerCall, dtype: torch.dtype) -> "UnreadLogits":
        """Return the logits of ``call`` without an autograd node."""
        unread: Any = Tensor._make_wrapper_subclass(
            cls, (*call.rows.shape[:-1], len(call.weight)), dtype=dtype, device=call.rows.device
        )
        unread.call, unread.computed = call, None
        return unread

    # private: operations come by ``__torch_dispatch__`` alone (torch 2.11 to 2.15)
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        clones = func is torch.ops.aten.clone.default  # DDP does it to all that a model returns
        widens = func is torch.ops.aten._to_copy.default and kwargs == {"dtype": torch.float32}
        if (clones or widens) and args[0].computed is None:
            return cls.without_graph(args[0].call, kwargs.get("dtype", args[0].dtype))
        read = functools.partial(tree_map_only, cls, cls._compute)
        return func(*read(args), **read(kwargs))

    def _compute(self) -> Tensor:
        if self.computed is None:
            self.computed = self.call.logits().to(self.dtype)
        return self.computed


class _Unread(torch.autograd.Function):
    """``UnreadLogits`` of a call, and its gradients if they were read."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, bias)
        ctx.set_materialize_grads(False)
        ctx.dtype = dtype
        return UnreadLogits.without_graph(LayerCall(rows, weight, bias, dtype), dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads[0] is None:  # nothing has read them: DDP passes all outputs through one function
            return None, None, None, None
        given = ctx.saved_tensors
        rows, weight, bias = given
        with torch.autocast(rows.device.type, enabled=False):
            head = functional.LinearHead(ctx.dtype, weight, bias)
            lines = head.rows(rows).flatten(0, -2)
            found = head.gradients(grads[0].flatten(0, -2), lines, ctx.needs_input_grad[:3])
        of_given = (
            None if g is None else g.view(t.shape).to(t.dtype)
            for g, t in zip(found, given, strict=True)
        )
        return *of_given, None


@contextlib.contextmanager
def leaves_logits_unread(layer: nn.Linear) -> Iterator[None]:
    """Make ``layer`` return ``UnreadLogits`` inside the block, if logits are half and many.

    Few logits (``LinearHead.chunk_rows``) are computed at once, because they take less memory than
    the gradient of the weight, and the backward then need not compute them again.

    Args:
        layer: a linear layer with a plain weight, and without a forward set on the instance.
    """
    layer.forward = functools.partial(_forward_unread, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del layer.forward


def _forward_unread(layer: nn.Linear, input: Tensor) -> Tensor:
    kind = input.device.type
    casts = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if casts else input.dtype
    features = input.shape[-1]
    many = input.numel() > functional.LinearHead.chunk_rows(features) * features
    trains = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if many and dtype in HALF_DTYPES and trains:
        return UnreadLogits.of(LayerCall(input, layer.weight, layer.bias, dtype))
    return type(layer).forward(layer, input)
