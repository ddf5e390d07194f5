"""The sum of two tensors and its norm: the bits of the two operations one after the other."""

import pytest
import torch

from tests.kernels.conftest import assert_within, ulp
from tests.kernels.test_norm import (
    DTYPES,
    EPS,
    HALF,
    LONG,
    SHAPES,
    Shrink,
    each_kind,
    inputs,
)
from tritonamp.kernels.add_norm import add_norm
from tritonamp.kernels.norm import norm


@pytest.mark.parametrize("shape", (SHAPES | LONG).values(), ids=SHAPES | LONG)
@each_kind
def test_as_the_norm_of_the_sum(
    device: torch.device, backend: str, small_tiles: Shrink, center: bool, shape: tuple[int, ...]
) -> None:
    small_tiles(0)
    x, w, b, residual = inputs(shape, DTYPES[0], device)
    args = w, b if center else None, shape[-1], EPS, center
    total, y, stats = add_norm(x, residual, *args, backend)
    assert torch.equal(total, x + residual)
    for got, expected in zip((y, stats), norm(total, *args, HALF, backend), strict=True):
        assert torch.equal(got, expected)


def test_the_sum_is_rounded_before_its_norm(device: torch.device, backend: str) -> None:
    """2048 + 1 is 2048 in half; unrounded, the norm would see a line that is not flat."""
    x = torch.full((2, 8), 2048.0, dtype=HALF, device=device)
    residual = torch.zeros_like(x)
    residual[:, ::2] = 1.0
    total, y, _ = add_norm(x, residual, None, None, 8, EPS, True, backend)
    assert torch.equal(total, x)
    assert not y.any()


def test_bfloat16(device: torch.device, backend: str) -> None:
    """In the interpreter FP32 stands in for it, so that there the sum is not rounded before its
    norm. It is off by 2**-7 where it is below 8, its norm by less than four times as much.
    """
    _, w, b, residual = inputs((3, 257), DTYPES[1], device)
    x = torch.randn(3, 257, device=device).to(residual.dtype)
    total, y, _ = add_norm(x, residual, w, b, 257, EPS, True, backend)
    exact = x.double() + residual.double()
    assert_within(total, exact, ulp(exact, x.dtype) / 2)
    d = exact - exact.mean(1, keepdim=True)
    h = d / (d.square().mean(1, keepdim=True) + EPS).sqrt()
    expected = h * w.double() + b.double()
    assert_within(y, expected, torch.full_like(expected, 2.0**-5) + ulp(expected, x.dtype))
