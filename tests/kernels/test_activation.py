"""Activations and gated activations against float64: every half value, awkward shapes, strides."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import U, numpy_warns, ulp
from tritonamp.kernels import _elements
from tritonamp.kernels.activation import KINDS, activation

pytestmark = numpy_warns

HALF, BF16 = torch.float16, torch.bfloat16
OTHERS = {"quick gelu": ("sigmoid", 1.702, 0.0), "steep": ("sigmoid", 3.0, 0.5)}
ACTIVATIONS = KINDS | OTHERS

each_activation = pytest.mark.parametrize("act", ACTIVATIONS.values(), ids=ACTIVATIONS)
each_dtype = pytest.mark.parametrize("dtype", [HALF, BF16])
each_backend = pytest.mark.parametrize("backend", ["triton", "eager"])


def every_value(dtype: torch.dtype) -> Tensor:
    """All finite values of a half format."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    return x[x.isfinite()]


def exact(x: Tensor, kind: str, a: float, b: float) -> Tensor:
    """The activation in float64, by its definition."""
    x = x.double()
    if kind == "sigmoid":
        return x * torch.sigmoid(a * x + b * x**3 if b else a * x)
    return x * torch.special.ndtr(x) if kind == "erf" else torch.relu(x) ** 2


def bound(result: Tensor, x: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Half an ulp, and the roundings of FP32 before it: a few of the result; for erf of 1 + erf,
    which cancels below 0. Results below FP32's range are 0.
    """
    cancelled = 8 * U * x.double().abs() if kind == "erf" else 0
    return 0.51 * ulp(result, dtype) + cancelled + 2.0**-120


@each_backend
@each_dtype
@each_activation
def test_every_value(
    triton_device: torch.device, act: tuple[str, float, float], dtype: torch.dtype, backend: str
) -> None:
    x = every_value(dtype)
    y = activation(x.to(triton_device), None, *act, backend).cpu()
    expected = exact(x, *act)
    fits = expected.to(dtype).isfinite()
    assert torch.equal(y.isfinite(), fits) and y.dtype is dtype
    error = (y.double() - expected).abs()[fits]
    assert (error <= bound(expected, x, act[0], dtype)[fits]).all()


@each_backend
@each_dtype
@each_activation
def test_with_a_gate(
    triton_device: torch.device, act: tuple[str, float, float], dtype: torch.dtype, backend: str
) -> None:
    """One rounding: an activation that was rounded first would be off by an ulp in places."""
    torch.manual_seed(0)
    x, gate = 3 * torch.randn(2, 5000).to(dtype)
    y = activation(x.to(triton_device), gate.to(triton_device), *act, backend).cpu()
    expected = exact(x, *act) * gate.double()
    limit = bound(expected, x * gate, act[0], dtype)
    assert ((y.double() - expected).abs() <= limit).all()


SHAPES = [(), (1,), (7,), (1023,), (1024,), (1025,), (3, 4097), (2, 8, 520), (0,), (3, 0)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_shapes(triton_device: torch.device, shape: tuple[int, ...], gated: bool) -> None:
    x, gate = torch.randn(2, *shape, device=triton_device).half().unbind()
    given = (x, gate if gated else None, *KINDS["silu"])
    kernel, twin = activation(*given, "triton"), activation(*given, "eager")
    assert kernel.shape == shape and kernel.is_contiguous()
    torch.testing.assert_close(kernel, twin, rtol=2.0**-10, atol=2.0**-24)


def halves(x: Tensor) -> Any:
    return x.chunk(2, -1)


def columns(x: Tensor) -> Any:
    return x.mT.contiguous().mT.chunk(2, -1)


def other_strides(x: Tensor) -> Any:
    a, b = x.chunk(2, -1)
    return a, b.contiguous()


def expanded(x: Tensor) -> Any:
    a, b = x.chunk(2, -1)
    return a, b[:1].expand_as(b)


def every_other(x: Tensor) -> Any:
    return x[..., ::2], x[..., 1::2]


@pytest.mark.parametrize("cut", [halves, columns, other_strides, expanded, every_other])
@pytest.mark.parametrize("n", [600, 1024, 1001, 256, 130, 24])
def test_strides(triton_device: torch.device, cut: Any, n: int) -> None:
    x, gate = cut(torch.randn(6, 2 * n, device=triton_device).half())
    given = KINDS["gelu tanh"]
    result = activation(x, gate, *given, "triton")
    assert torch.equal(result, activation(x.clone(), gate.clone(), *given, "triton"))
    torch.testing.assert_close(
        result, activation(x, gate, *given, "eager"), rtol=2.0**-10, atol=2.0**-24
    )


def test_halves_of_a_tensor_are_not_copied() -> None:
    x, gate = torch.randn(4, 2048).half().chunk(2, -1)
    rows, given = _elements.rows_of(x, gate)
    assert [t.data_ptr() for t in given] == [x.data_ptr(), gate.data_ptr()]
    assert rows == _elements.Rows((4, 1, 1), (1024, 1, 2048, 2048), True, 8, 1024, 4)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@each_activation
def test_values_that_are_not_finite(
    triton_device: torch.device, act: tuple[str, float, float], value: float
) -> None:
    """As torch has them: -inf times a factor of 0 is NaN; relu gives 0."""
    x = torch.tensor([1.0, value], device=triton_device).half()
    expected = exact(x, *act).half()
    for backend in ("triton", "eager"):
        result = activation(x, None, *act, backend)
        torch.testing.assert_close(result, expected, rtol=2.0**-10, atol=0, equal_nan=True)
