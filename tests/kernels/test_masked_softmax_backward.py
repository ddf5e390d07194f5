"""Gradients of masked softmax, kernel and twin against FP64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Shrink, assert_rounded, backward_and_error, numpy_warns
from tests.kernels.test_masked_softmax import BF16, HALF, SHAPES, WIDE, Shape
from tritonamp.kernels.masked_softmax_backward import masked_softmax_backward

pytestmark = numpy_warns

INF, NAN = float("inf"), float("nan")

each_causal = pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])


def made(
    shape: Shape, causal: bool, device: torch.device, dtype: torch.dtype = HALF
) -> tuple[Tensor, Tensor]:
    """A gradient and an output, in memory from ``empty_like``, which may be guarded."""
    x = torch.randn(shape, device=device) * 2
    if causal:
        queries, keys = shape[-2:]
        above = torch.ones(queries, keys, device=device, dtype=torch.bool)
        x = x.masked_fill(above.triu(keys - queries + 1), -INF)
    y = x.softmax(-1).nan_to_num(0.0).to(dtype)
    grad = torch.randn(shape, device=device).to(dtype)
    return torch.empty_like(grad).copy_(grad), torch.empty_like(y).copy_(y)


def check(
    shape: Shape,
    causal: bool,
    device: torch.device,
    backend: str,
    scale: float = 0.3,
    dtypes: tuple[torch.dtype, torch.dtype] = (HALF, HALF),
) -> None:
    grad, y = made(shape, causal, device, dtypes[0])
    exact, error = backward_and_error(False, grad, y, -1)
    result = masked_softmax_backward(grad, y, scale, causal, dtypes[1], backend)
    # the product with the scale adds a rounding, and so does the scale
    error = abs(scale) * error + 2.0**-23 * abs(scale) * exact.abs()
    assert_rounded(result, dtypes[1], scale * exact, error)


@pytest.mark.parametrize("keys", [1, 2, 7, 8, 31, 33, 100, 511, 513, 1000, 1001, 1024, 1025, 2049])
@each_causal
def test_lengths(device: torch.device, backend: str, keys: int, causal: bool) -> None:
    check((2, 4, keys), causal, device, backend)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_diagonal_ends_in_the_corner(
    device: torch.device, backend: str, shape: tuple[int, int]
) -> None:
    check((2, *shape), True, device, backend)


@pytest.mark.parametrize(
    "dtypes", [(BF16, BF16), (WIDE, HALF), (WIDE, WIDE), (HALF, WIDE)], ids=str
)
@pytest.mark.parametrize("scale", [1.0, -2.5, 0.0])
@each_causal
def test_dtypes(
    device: torch.device,
    backend: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    scale: float,
    causal: bool,
) -> None:
    check((2, 5, 72), causal, device, backend, scale, dtypes)


@pytest.mark.parametrize("keys", [65, 129, 200, 256])
@each_causal
@pytest.mark.usefixtures("small_loops")
def test_long_lines(device: torch.device, backend: str, keys: int, causal: bool) -> None:
    check((7, keys), causal, device, backend)
    check((keys + 3, keys), causal, device, backend)


@pytest.mark.parametrize("keys", [16384, 16385])
def test_gradients_at_real_boundaries(device: torch.device, backend: str, keys: int) -> None:
    check((2, keys), True, device, backend)


@pytest.mark.parametrize("many", [None, 0])
def test_gradients_above_the_diagonal_have_no_effect(
    device: torch.device, backend: str, small_tiles: Shrink, many: int | None
) -> None:
    small_tiles(many)
    grad, y = made((2, 20, 300), True, device)
    above = torch.ones(20, 300, dtype=torch.bool, device=device).triu(281)
    expected = masked_softmax_backward(grad, y, 0.3, True, HALF, backend)
    for bad in (NAN, INF, 60000.0):
        given = grad.masked_fill(above, bad)
        assert torch.equal(masked_softmax_backward(given, y, 0.3, True, HALF, backend), expected)
    assert not expected[above.expand_as(expected)].any()


@each_causal
@pytest.mark.parametrize("many", [None, 0])
def test_a_bad_gradient_shows(
    device: torch.device, backend: str, small_tiles: Shrink, causal: bool, many: int | None
) -> None:
    small_tiles(many)
    grad, y = made((6, 300), causal, device)
    for i, bad in enumerate((INF, -INF, NAN)):
        grad[2 * i + 1, 100 + i] = bad
    finite = masked_softmax_backward(grad, y, 0.3, causal, HALF, backend).isfinite()
    assert finite[0::2].all() and not finite[1::2].all(-1).any()


def test_scaled_gradients_are_summed_in_fp32(device: torch.device, backend: str) -> None:
    """1024 gradients of 60000 cancel; their sum is beyond fp16, and so is one before its scale."""
    grad = torch.full((1024,), 60_000.0, dtype=HALF, device=device)
    grad[1] = -60_000.0
    y = torch.full((1024,), 2.0**-10, dtype=HALF, device=device)
    result = masked_softmax_backward(grad, y, 512.0, False, HALF, backend).double()
    exact = 0.5 * (grad.double() - 60_000 * 1022 / 1024)
    torch.testing.assert_close(result, exact, rtol=2.0**-11, atol=0)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (2, 0, 5), (3, 0, 0)])
@each_causal
def test_empty(device: torch.device, backend: str, shape: Shape, causal: bool) -> None:
    grad = torch.zeros(shape, device=device, dtype=HALF)
    result = masked_softmax_backward(grad, grad, 1.0, causal, HALF, backend)
    assert result.shape == shape and result.dtype is HALF


@pytest.mark.parametrize("queries", [1, 9, 70])
@pytest.mark.parametrize("keys", [8, 64, 100])
def test_bytes_of_a_causal_gradient(
    traffic: Any, triton_device: torch.device, queries: int, keys: int
) -> None:
    grad, y = made((2, 3, queries, keys), True, triton_device)
    masked_softmax_backward(grad, y, 0.3, True, HALF, "triton")
    vec = 8 if keys % 8 == 0 else 4
    seen = [max(i + 1 + keys - queries, 0) for i in range(queries)]
    assert traffic.read == 6 * sum(-(-end // vec) * vec for end in seen) * 4
    assert traffic.written == grad.numel() * 2
