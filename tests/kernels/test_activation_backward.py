"""Gradients of activations and gates against float64."""

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import U, numpy_warns, ulp
from tests.kernels.test_activation import (
    ACTIVATIONS,
    each_activation,
    each_backend,
    each_dtype,
    every_value,
    exact,
)
from tritonamp.kernels.activation_backward import activation_backward

pytestmark = numpy_warns


def derivative(x: Tensor, act: tuple[str, float, float]) -> Tensor:
    """In float64, by autograd."""
    x = x.double().requires_grad_()
    return torch.autograd.grad(exact(x, *act).sum(), x)[0]


@each_backend
@each_dtype
@each_activation
def test_every_value(
    triton_device: torch.device, act: tuple[str, float, float], dtype: torch.dtype, backend: str
) -> None:
    x = every_value(dtype)
    x = x[x.abs() < 1e9]  # beyond, float64 has 0 * inf
    grad = torch.ones_like(x)
    dx, empty = activation_backward(
        grad.to(triton_device), x.to(triton_device), None, *act, backend
    )
    expected = derivative(x, act)
    fits = expected.to(dtype).isfinite()
    # the sum of two terms near 1 that may cancel, of some roundings each
    error = (dx.cpu().double() - expected).abs()
    assert (error <= 0.51 * ulp(expected, dtype) + 16 * U)[fits].all() and empty.numel() == 0


@each_activation
def test_the_largest_values_have_finite_gradients(
    triton_device: torch.device, act: tuple[str, float, float]
) -> None:
    """x**2 is inf in FP32 there, and slope 0."""
    x = torch.tensor([-3e38, -1e20, 1e20, 3e38], device=triton_device).bfloat16()
    for backend in ("triton", "eager"):
        dx, _ = activation_backward(torch.ones_like(x), x, None, *act, backend)
        expected = [0, 0, 2e20, 6e38] if act[0] == "square" else [0, 0, 1, 1]
        assert dx.tolist() == torch.tensor(expected).bfloat16().tolist()


@each_backend
@each_dtype
@each_activation
def test_with_a_gate_under_a_loss_scale(
    triton_device: torch.device, act: tuple[str, float, float], dtype: torch.dtype, backend: str
) -> None:
    torch.manual_seed(0)
    x, gate, grad = 2 * torch.randn(3, 4000).to(dtype)
    grad = grad * 2.0**-20 * 2**15
    given = [t.to(triton_device) for t in (grad, x, gate)]
    dx, dgate = activation_backward(*given, *act, backend)
    g, u = grad.double(), gate.double()
    for found, expected, terms in (
        (dx, g * u * derivative(x, act), (g * u).abs()),
        (dgate, g * exact(x, *act), (g * x.double()).abs()),
    ):
        error = (found.cpu().double() - expected).abs()
        assert found.dtype is dtype
        assert (error <= 0.51 * ulp(expected, dtype) + 32 * U * terms).all()


@pytest.mark.parametrize("shape", [(), (7,), (1025,), (3, 4097), (0,), (3, 0)], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_shapes(triton_device: torch.device, shape: tuple[int, ...], gated: bool) -> None:
    grad, x, gate = torch.randn(3, *shape, device=triton_device).half().unbind()
    given = (grad, x, gate if gated else None, *ACTIVATIONS["quick gelu"])
    kernels = activation_backward(*given, "triton")
    for kernel, twin in zip(kernels, activation_backward(*given, "eager"), strict=True):
        assert kernel.shape == twin.shape
        torch.testing.assert_close(kernel, twin, rtol=2.0**-10, atol=2.0**-20)
    assert kernels[1].shape == (shape if gated else (0,))


@pytest.mark.parametrize("n", [600, 1001, 24])
def test_strides(triton_device: torch.device, n: int) -> None:
    x, gate = torch.randn(6, 2 * n, device=triton_device).half().chunk(2, -1)
    grad = torch.randn(n, 6, device=triton_device).half().t()
    act = ACTIVATIONS["silu"]
    found = activation_backward(grad, x, gate, *act, "triton")
    plain = activation_backward(grad.clone(), x.clone(), gate.clone(), *act, "triton")
    assert all(map(torch.equal, found, plain))
