"""Differentiable activations and gated activations of half tensors."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tritonamp.functional.inputs import Call
from tritonamp.kernels import activation as _activation
from tritonamp.kernels import activation_backward as _activation_backward

_OF_TORCH: dict[tuple[str, float, float], Callable[[Tensor], Tensor]] = {
    _activation.KINDS["silu"]: functional.silu,
    _activation.KINDS["gelu"]: functional.gelu,
    _activation.KINDS["gelu tanh"]: functools.partial(functional.gelu, approximate="tanh"),
}


class Activation(torch.autograd.Function):
    """An activation, times a gate if there is one. Only its inputs are saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor | None, call: Call) -> Tensor:
        args, compute = call
        ctx.save_for_backward(x, gate)
        ctx.args = args
        return compute(x, gate) if compute else _activation.activation(x, gate, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate = ctx.saved_tensors
        kind, a, b, backend = ctx.args
        # A gradient of the gradient needs torch's operations.
        backend = "eager" if torch.is_grad_enabled() else backend
        dx, dgate = _activation_backward.activation_backward(grads[0], x, gate, kind, a, b, backend)
        return dx, None if gate is None else dgate, None


def activated(
    x: Tensor, gate: Tensor | None, kind: str, a: float, b: float, backend: str = "auto"
) -> Tensor:
    """Return an activation of a half tensor, times a gate, rounded once from FP32.

    There are no checks, because callers have made them.

    Args:
        x: any shape, float16 or bfloat16.
        gate: tensor of the shape and dtype of ``x``, or None.
        kind: kind of the activation, as in ``kernels.activation``.
        a: first coefficient of the activation.
        b: second coefficient of the activation.
        backend: "auto", "triton" or "eager".
    """
    if gate is None and (kind, a, b) in _OF_TORCH:  # one op of torch that also rounds once
        return _OF_TORCH[kind, a, b](x)
    return Activation.apply(x, gate, ((kind, a, b, backend), None))
