"""Largest magnitude, bit by bit, and sum of squares, against FP64."""

import pytest
import torch
from torch import Tensor

from tritonamp.kernels.grad_stats import grad_stats

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(), (1,), (1023,), (1024,), (1025,), (3, 5, 7)]
INF, NAN = float("inf"), float("nan")
U = 2.0**-24  # half an ulp of 1 in FP32


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_fp64(device: torch.device, dtype: torch.dtype) -> None:
    """n positive terms in any order: n u, and 4 u for square, root, square again and the rounding to FP32."""
    grads = [torch.randn(shape, device=device).to(dtype) for shape in SHAPES]
    grads += [torch.randn(8, 6, device=device).to(dtype)[::2, 1:], torch.randn(5, 9, device=device).to(dtype).t()]
    grads += [torch.randn(3, 1, device=device).to(dtype).expand(3, 4), torch.zeros(7, dtype=dtype, device=device)]
    kept = [grad.clone() for grad in grads]
    amax, square_sum = grad_stats(grads, device)
    for result in (amax, square_sum):
        assert (result.dtype, result.shape, result.device.type) == (torch.float32, (len(grads),), device.type)
    for i, grad in enumerate(grads):
        exact = grad.double()
        assert amax[i] == exact.abs().max().float()
        torch.testing.assert_close(square_sum[i].double(), exact.square().sum(), rtol=(exact.numel() + 4) * U, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(grads, kept, strict=True))


def test_every_magnitude_of_half_is_exact(device: torch.device) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(2**15, dtype=torch.int16).view(dtype)
        finite = every[every.isfinite()].to(device)
        amax, _ = grad_stats(list((-finite[::7]).split(1)), device)
        assert torch.equal(amax.to(dtype), finite[::7])


@pytest.mark.parametrize("place", [0, 511, 1024])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", DTYPES)
def test_inf_and_nan_show_in_the_magnitude(device: torch.device, dtype: torch.dtype, bad: float, place: int) -> None:
    grads = [torch.ones(1025, dtype=dtype, device=device) for _ in range(3)]
    grads[1][place] = bad
    grads[1][(place + 1) % 1025] = torch.finfo(dtype).max
    amax, _ = grad_stats(grads, device)
    assert torch.isfinite(amax).tolist() == [True, False, True]
    assert amax[1].isnan() == (bad != bad)


def test_finite_gradients_whose_squares_overflow_stay_finite_in_the_magnitude(device: torch.device) -> None:
    """The sum of squares is no test of finiteness."""
    largest = torch.finfo(torch.bfloat16).max
    amax, square_sum = grad_stats([torch.full((3,), largest, dtype=torch.bfloat16, device=device)], device)
    assert (amax.item(), square_sum.item()) == (largest, INF)


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_tensors_count_as_zero(device: torch.device, dtype: torch.dtype) -> None:
    one = torch.full((1,), 3.0, dtype=dtype, device=device)
    amax, square_sum = grad_stats([one, one[:0], one.new_empty(0, 4), one], device)
    assert amax.tolist() == [3.0, 0.0, 0.0, 3.0]
    torch.testing.assert_close(square_sum, torch.tensor([9.0, 0.0, 0.0, 9.0], device=device), rtol=4 * U, atol=0)


def test_no_gradients_at_all(device: torch.device) -> None:
    for result in grad_stats([], device):
        assert (result.dtype, result.shape, result.device.type) == (torch.float32, (0,), device.type)


def test_dtypes_may_be_mixed(device: torch.device) -> None:
    grads: list[Tensor] = [torch.full((2,), float(i + 1), dtype=dtype, device=device) for i, dtype in enumerate(DTYPES)]
    amax, square_sum = grad_stats(grads, device)
    assert amax.tolist() == [1.0, 2.0, 3.0, 4.0]
    torch.testing.assert_close(square_sum, torch.tensor([2.0, 8.0, 18.0, 32.0], device=device), rtol=4 * U, atol=0)


def test_complex_gradients(device: torch.device) -> None:
    amax, square_sum = grad_stats([torch.tensor([3 - 4j, 1j], device=device)], device)
    torch.testing.assert_close(amax, torch.tensor([5.0], device=device), rtol=2 * U, atol=0)
    torch.testing.assert_close(square_sum, torch.tensor([26.0], device=device), rtol=6 * U, atol=0)


def test_no_graph_is_kept(device: torch.device) -> None:
    grad = torch.ones(3, device=device, requires_grad=True)
    assert not any(result.requires_grad for result in grad_stats([grad], device))
