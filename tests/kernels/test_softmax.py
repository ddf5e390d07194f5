"""softmax and log_softmax, forward and backward, against FP64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tritonamp.kernels.softmax import log_softmax, log_softmax_backward, softmax, softmax_backward

HALVES = [torch.float16, torch.bfloat16]
LAYOUTS: dict[str, tuple[tuple[int, ...], int]] = {
    "one": ((4, 1), 1),
    "two": ((3, 2), -1),
    "odd": ((5, 311), 1),
    "block": ((2, 1024), 1),
    "over": ((2, 1025), 1),
    "columns": ((33, 7), 0),
    "middle": ((3, 65, 2), 1),
    "vector": ((9,), 0),
    "0-d": ((), 0),
    "no rows": ((0, 5), 1),
    "no columns": ((5, 0), 1),
}
INF, NAN = float("inf"), float("nan")
U = 2.0**-24  # half an ulp of 1 in FP32

each_layout = pytest.mark.parametrize("layout", LAYOUTS)
each_half = pytest.mark.parametrize("half", HALVES, ids=str)
each_op = pytest.mark.parametrize("op", ["softmax", "log_softmax"])
OPS: dict[str, Callable[..., Tensor]] = {"softmax": softmax, "log_softmax": log_softmax}


def ulp(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance of ``dtype``'s values around each FP64 value; in the subnormal range that of the smallest."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(exact.abs().clamp(min=info.tiny)).exponent
    return torch.ldexp(torch.full_like(exact, info.eps), exponent - 1)


def assert_within(actual: Tensor, exact: Tensor, bound: Tensor) -> None:
    assert actual.shape == exact.shape
    error = (actual.double() - exact).abs()
    assert (error <= bound).all(), f"{(error / bound).max()} times the bound"


def inputs(layout: str, dtype: torch.dtype, spread: float, device: torch.device) -> tuple[Tensor, int]:
    shape, dim = LAYOUTS[layout]
    return (torch.randn(shape, device=device) * spread).to(dtype), dim


# forward


def fp32_error(op: str, x: Tensor, dim: int, exact: Tensor) -> Tensor:
    """With d = max - x: exp(-d) is off by (d + 2) u relatively, their sum of n by n more, the quotient by 1; the
    logarithm turns what is relative into absolute, and there d itself is rounded twice."""
    if not x.numel():
        return torch.zeros_like(exact)
    d = x.double().amax(dim, keepdim=True) - x.double()
    n = x.shape[dim] if x.dim() else 1
    relative = (d + d.amax(dim, keepdim=True) + n + 5) * U
    return relative if op == "log_softmax" else relative * exact


@each_half
@each_layout
@each_op
@pytest.mark.parametrize("spread", [0.1, 3.0, 100.0])
def test_half_results(device: torch.device, op: str, layout: str, half: torch.dtype, spread: float) -> None:
    """softmax: one ulp, the numerics contract. log_softmax near 0 has FP32's absolute error instead."""
    x, dim = inputs(layout, half, spread, device)
    exact = getattr(torch, op)(x.double(), dim)
    result = OPS[op](x, dim, half)
    assert result.dtype is half
    one = ulp(exact, half)
    assert_within(result, exact, one if op == "softmax" else one / 2 + fp32_error(op, x, dim, exact))


@each_layout
@each_op
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_fp32_results_carry_fp32_errors_only(device: torch.device, op: str, layout: str, dtype: torch.dtype) -> None:
    x, dim = inputs(layout, dtype, 3.0, device)
    exact = getattr(torch, op)(x.double(), dim)
    result = OPS[op](x, dim, torch.float32)
    assert result.dtype is torch.float32
    assert_within(result, exact, fp32_error(op, x, dim, exact))


@each_half
@each_op
def test_strides_do_not_matter(device: torch.device, op: str, half: torch.dtype) -> None:
    x = torch.randn(6, 8, 10, device=device).to(half)
    for view in (x.transpose(0, 2), x[::2, 1:, ::3], x[:1].expand(6, 8, 10), x.permute(2, 0, 1)):
        for dim in range(3):
            expected = OPS[op](view.contiguous(), dim, half)
            assert_within(OPS[op](view, dim, half), expected.double(), ulp(expected.double(), half))


SPECIAL = {
    "all -inf": [-INF, -INF, -INF],
    "one -inf": [0.0, -INF, 1.0],
    "one left": [-INF, -INF, 1.0],
    "+inf": [INF, 0.0, 1.0],
    "both": [INF, -INF, 0.0],
    "NaN": [NAN, 0.0, -INF],
    "largest": [65504.0, 65504.0, 65504.0],
    "extremes": [65504.0, -65504.0, 65504.0],
    "near": [65504.0, 65472.0, 0.0],
}


@each_half
@each_op
@pytest.mark.parametrize("row", SPECIAL)
def test_special_rows_are_torchs_and_leave_others_alone(
    device: torch.device, op: str, half: torch.dtype, row: str
) -> None:
    x = torch.tensor([[1.0, 2.0, 3.0], SPECIAL[row], [1.0, 2.0, 3.0]], device=device).to(half)
    exact = getattr(torch, op)(x.double(), 1)
    result = OPS[op](x, 1, half)
    torch.testing.assert_close(result.isnan(), exact.isnan())
    keep = ~exact.isnan() & ~exact.isinf()
    torch.testing.assert_close(result[exact.isinf()].double(), exact[exact.isinf()])
    # -131008 is beyond fp16: the nearest there is -inf, never the largest finite number
    exact = exact.to(half).double() if half is torch.float16 else exact
    assert torch.equal(result.isinf(), exact.isinf())
    keep &= ~exact.isinf()
    assert_within(result[keep], exact[keep], ulp(exact[keep], half))


def test_rows_longer_than_half_can_count(device: torch.device) -> None:
    """70000 equal values: the denominator 70000 is beyond fp16."""
    y = softmax(torch.zeros(70_000, dtype=torch.float16, device=device), 0, torch.float16)
    assert torch.equal(y, torch.full_like(y, 1 / 70_000))


# backward


@each_half
@each_layout
@pytest.mark.parametrize("grad_dtype", [None, torch.float32], ids=str)
def test_softmax_backward(device: torch.device, layout: str, half: torch.dtype, grad_dtype: torch.dtype | None) -> None:
    """From the y it is given: half an ulp for the result, n + 5 FP32 roundings of y (|grad| + sum |grad y|)."""
    x, dim = inputs(layout, half, 2.0, device)
    grad = torch.randn(x.shape, device=device).to(grad_dtype or half)
    y = torch.softmax(x.float(), dim).to(half)
    g, wide = grad.double(), y.double()
    exact = wide * (g - (g * wide).sum(dim, keepdim=True))
    mass = wide * (g.abs() + (g * wide).abs().sum(dim, keepdim=True))
    n = x.shape[dim] if x.dim() else 1
    result = softmax_backward(grad, y, dim, half)
    assert result.dtype is half
    assert_within(result, exact, ulp(exact, half) / 2 + (n + 5) * U * mass)


@each_half
@each_layout
@pytest.mark.parametrize("y_dtype", [None, torch.float32], ids=str)
def test_log_softmax_backward(
    device: torch.device, layout: str, half: torch.dtype, y_dtype: torch.dtype | None
) -> None:
    """Half an ulp for the result, n + 5 FP32 roundings of |grad| + exp(y) sum |grad|."""
    x, dim = inputs(layout, half, 2.0, device)
    y = torch.log_softmax(x.float(), dim).to(y_dtype or half)
    grad = torch.randn(x.shape, device=device).to(y.dtype)
    g, wide = grad.double(), y.double()
    exact = g - wide.exp() * g.sum(dim, keepdim=True)
    mass = g.abs() + wide.exp() * g.abs().sum(dim, keepdim=True)
    n = x.shape[dim] if x.dim() else 1
    result = log_softmax_backward(grad, y, dim, half)
    assert result.dtype is half
    assert_within(result, exact, ulp(exact, half) / 2 + (n + 5) * U * mass)


@pytest.mark.parametrize("backward", [softmax_backward, log_softmax_backward])
def test_backward_is_wide_enough_for_scaled_gradients(
    device: torch.device, backward: Callable[[Tensor, Tensor, int, torch.dtype], Tensor]
) -> None:
    """1024 gradients of 60000 cancel exactly; their sum, 6e7, is beyond fp16."""
    grad = torch.full((1024,), 60_000.0, dtype=torch.float16, device=device)
    y = torch.full((1024,), 2.0**-10, dtype=torch.float16, device=device)
    if backward is log_softmax_backward:
        y = y.float().log()
    # log(2**-10) in FP32 is off by up to 4 u, and 60000 is about 2**16
    assert backward(grad, y, 0, torch.float32).abs().max() <= 2**16 * (4 + 1) * U


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("backward", [softmax_backward, log_softmax_backward])
def test_backward_never_hides_a_bad_gradient(
    device: torch.device, backward: Callable[[Tensor, Tensor, int, torch.dtype], Tensor], bad: float
) -> None:
    grad = torch.zeros(2, 5, dtype=torch.float16, device=device)
    grad[0, 3] = bad
    y = torch.full((2, 5), 0.2, dtype=torch.float16, device=device)
    result = backward(grad, y if backward is softmax_backward else y.log(), 1, torch.float16)
    assert torch.equal(result.isfinite().all(1), torch.tensor([False, True], device=device))
