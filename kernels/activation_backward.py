"""Gradients of activations and of their gates, in FP32. 6 or 10 B/element."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._by_length import element_sigmoid
from tritonamp.kernels._elements import Rows, element_offsets, rows_of
from tritonamp.kernels._implementations import TraceableOp
from tritonamp.kernels._launch import Launch
from tritonamp.kernels._lines import cached_by_shape, dense
from tritonamp.kernels._shipped import Shipped
from tritonamp.kernels.activation import activated, samples, shipped_cases, sigmoid
from tritonamp.kernels.device import tl, triton


@triton.jit
def _derivative(x, KIND: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    if KIND == "sigmoid":
        s = sigmoid(x, A, B)
        slope = s * (1 - s)
        # 0 times an infinite x or square would be NaN
        x = tl.where(slope == 0, 0.0, x)
        return s + x * slope * (A + 3 * B * x * x)
    elif KIND == "erf":
        density = 0.3989422804014327 * tl.exp2(x * x * -0.7213475204444817)
        x_or_0 = tl.where(density == 0, 0.0, x)
        return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476) + x_or_0 * density
    else:
        return 2 * tl.where(x < 0, 0.0, x)


@triton.jit(do_not_specialize=("n", "blocks", "grad_stride", "x_stride", "gate_stride"))
def activation_backward_kernel(
    grad_ptr, x_ptr, gate_ptr, dx_ptr, dgate_ptr, n, blocks, grad_stride, x_stride, gate_stride,
    KIND: tl.constexpr, A: tl.constexpr, B: tl.constexpr, GATED: tl.constexpr,
    FULL: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute a part of one row."""
    row, offs, mask = element_offsets(n, blocks, FULL, VEC, BLOCK)
    grads, xs = row * (grad_stride // VEC * VEC) + offs, row * (x_stride // VEC * VEC) + offs
    results = row * (n // VEC * VEC) + offs
    grad = tl.load(grad_ptr + grads, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + xs, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        gates = gate_ptr + row * (gate_stride // VEC * VEC)
        gate = tl.load(gates + offs, mask=mask, other=0.0).to(tl.float32)
        dgate = grad * activated(x, KIND, A, B)
        tl.store(dgate_ptr + results, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
        grad *= gate
    dx = grad * _derivative(x, KIND, A, B)
    tl.store(dx_ptr + results, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@cached_by_shape
def _backward(
    rows: Rows, shape: tuple[int, ...], dtype: torch.dtype, gated: bool, *activation: Any
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function of the tensors that ``rows_of`` returns together with ``rows``."""
    constants = *activation, gated, rows.full, rows.vec, rows.block
    results = dense(shape, dtype), dense(shape if gated else (0,), dtype)
    kernel = activation_backward_kernel
    launch = Launch(kernel, rows.grid, rows.sizes, constants, rows.warps, results=results)

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        dx, dgate = launch(*tensors)
        return dx, dgate

    return run


def activation_backward_triton(
    grad: Tensor, x: Tensor, gate: Tensor | None, kind: str, a: float, b: float
) -> tuple[Tensor, Tensor]:
    # a grid of 0 programs is an invalid launch
    if not x.numel():
        return x.new_empty(x.shape), x.new_empty(0 if gate is None else x.shape)
    rows, tensors = rows_of(grad, x, x if gate is None else gate)
    return _backward(rows, x.shape, x.dtype, gate is not None, kind, a, b)(*tensors)


def activation_backward_torch(
    grad: Tensor, x: Tensor, gate: Tensor | None, kind: str, a: float, b: float
) -> tuple[Tensor, Tensor]:
    g, wide = grad.float(), x.float()
    if kind == "sigmoid":
        s = element_sigmoid(wide * (a + b * wide * wide if b else a))
        y, slope = wide * s, s * (1 - s)
        # 0 times an infinite x or square would be NaN
        finite = wide.masked_fill(slope == 0, 0)
        derivative = s + finite * slope * (a + 3 * b * finite * finite)
    elif kind == "erf":
        cdf = 0.5 + 0.5 * torch.erf(wide * 0.5**0.5)
        density = torch.exp(wide * wide * -0.5) / (2 * math.pi) ** 0.5
        y, derivative = wide * cdf, cdf + wide.masked_fill(density == 0, 0) * density
    else:
        positive = torch.relu(wide)
        y, derivative = positive.square(), 2 * positive
    if gate is None:
        return (g * derivative).to(x.dtype), x.new_empty(0)
    return (g * gate.float() * derivative).to(x.dtype), (g * y).to(x.dtype)


def activation_backward(
    grad: Tensor,
    x: Tensor,
    gate: Tensor | None,
    kind: str,
    a: float,
    b: float,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of ``activation`` in FP32, rounded once.

    Args:
        grad: gradient of the result, float16, bfloat16 or float32, of the shape of ``x``.
        x: float16, bfloat16 or float32, of any shape and strides.
        gate: tensor of the shape and dtype of ``x``; None: there was no product.
        kind: "sigmoid", "erf" or "square".
        a: coefficient of x in "sigmoid"; other kinds ignore it.
        b: coefficient of x**3 in "sigmoid"; other kinds ignore it.
        backend: "auto", "triton" or "eager".

    Returns:
        The gradients of ``x`` and of ``gate``, in the dtype of ``x``. Without a gate, the second is
        empty.
    """
    return ACTIVATION_BACKWARD(backend, grad, x, gate, kind, a, b)


ACTIVATION_BACKWARD = TraceableOp(
    activation_backward_triton,
    activation_backward_torch,
    samples(lambda x, gate, act: (x, x.neg(), gate, *act), 4, 2),
    left_to_inductor=True,
)


def shipped() -> Iterator[Shipped]:
    """Yield the calls whose builds are checked, for the forward's cases."""
    for name, x, gate, act in shipped_cases():
        args, exp2 = (x, x, gate, *act), {"square": 0, "sigmoid": 1, "erf": 2}[act[0]]
        yield Shipped(f"{name} backward", activation_backward_triton, args, 64, 60, exp2, 0)
