"""layer_norm and rms_norm, kernels and twins against FP64."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Shrink, U, assert_rounded, assert_within, numpy_warns
from tritonamp.kernels.norm import norm

pytestmark = numpy_warns

HALF, BF16, WIDE = torch.float16, torch.bfloat16, torch.float32
EPS = 1e-5
SHAPES = {f"{n}": (3, n) for n in (1, 2, 3, 8, 9, 255, 256, 257, 1024, 1025)} | {
    "one line": (5,),
    "two tiles of lines": (513, 8),
    "several dimensions": (2, 3, 40),
    "more lines than partial sums": (40, 16),
    "no lines": (0, 5),
}
LONG = {"whole at most": (3, 128), "long from": (3, 129), "long": (3, 257), "no masks": (2, 256)}
DTYPES = [(HALF, WIDE), (BF16, WIDE), (HALF, HALF), (WIDE, WIDE)]
Case = tuple[tuple[int, ...], tuple[torch.dtype, torch.dtype]]
# each shape in one pair of dtypes, each pair in one shape
CASES: dict[str, Case] = {name: (shape, DTYPES[0]) for name, shape in SHAPES.items()} | {
    f"257 {dtypes[0]} by {dtypes[1]}": ((3, 257), dtypes) for dtypes in DTYPES[1:]
}

each_kind = pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
each_long_case = pytest.mark.parametrize(
    "case", [(shape, DTYPES[0]) for shape in LONG.values()], ids=LONG
)


class Inputs(NamedTuple):
    """Attributes:
    x: lines far from 0, of different spread.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor
    grad: Tensor

    @property
    def n(self) -> int:
        return self.x.shape[-1]


def inputs(
    shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype], device: torch.device
) -> Inputs:
    """``dtypes``: dtype of x and its gradient, dtype of weight and bias. Memory may be guarded."""
    dtype, of_weights = dtypes
    spread = torch.tensor([3.0, 100.0, 0.1]).repeat(shape[0])[: shape[0]]
    x = torch.randn(shape) * spread.view(-1, *[1] * (len(shape) - 1)) + 2 * spread.mean()
    weights = 1 + torch.rand(2, shape[-1])
    made = [x.to(dtype), *weights.to(of_weights), torch.randn(shape).to(dtype)]
    return Inputs(*(torch.empty_like(t, device=device).copy_(t) for t in made))


class Exact(NamedTuple):
    """In FP64, by line. Attributes:
    d: x without its mean.
    rstd_error: relative, of FP32 arithmetic.
    h_error: absolute, of d * rstd.
    """

    d: Tensor
    mean: Tensor
    rstd: Tensor
    mean_error: Tensor
    rstd_error: Tensor
    h_error: Tensor

    @property
    def h(self) -> Tensor:
        return self.d * self.rstd


def exact(x: Tensor, center: bool) -> Exact:
    """With n additions in any order the mean is off by e = (n + 1) u mean |x|.

    The mean of squares: n + 4 roundings, and from a mean that is off 2 e / sigma + (e / sigma)**2,
    because mean |d| is at most sigma. rstd: half of that, the addition of eps, and 2.2 u of a
    GPU's rsqrt. d * rstd: what d and rstd are off, and a rounding each.
    """
    wide, n = x.double().reshape(-1, x.shape[-1]), x.shape[-1]
    mean = wide.mean(1, keepdim=True) * center
    mean_error = (n + 1) * U * wide.abs().mean(1, keepdim=True) * center
    d = wide - mean
    rstd = (d.square().mean(1, keepdim=True) + EPS).rsqrt()
    part = mean_error * rstd
    rstd_error = (n + 4) * U / 2 + part + part.square() / 2 + 4 * U
    h_error = part * (1 + rstd_error) + (d * rstd).abs() * (rstd_error + 2 * U)
    return Exact(d, mean, rstd, mean_error, rstd_error, h_error)


def assert_are_stats(stats: Tensor, e: Exact) -> None:
    """Assert that the rows are the mean, if there are two, and rstd of each line."""
    assert_within(stats[-1], e.rstd[:, 0], (e.rstd * (e.rstd_error + U))[:, 0])
    if len(stats) == 2:
        assert_within(stats[0], e.mean[:, 0], (e.mean_error + U * e.mean.abs())[:, 0])


def gradient_and_error(e: Exact, g: Tensor, roundings: int, center: bool) -> tuple[Tensor, Tensor]:
    """The gradient of lines in FP64, and the error of FP32 arithmetic.

    g: the gradient of the normalized values. roundings: number of roundings in a sum of g over a
    line; a product has one more.
    """
    along, level = (g * e.h).mean(1, keepdim=True), g.mean(1, keepdim=True) * center
    of_along = (g * e.h_error).abs().mean(1, keepdim=True)
    of_along += (roundings + 1) * U * (g * e.h).abs().mean(1, keepdim=True)
    of_level = roundings * U * g.abs().mean(1, keepdim=True) * center
    inner = of_level + e.h.abs() * of_along + e.h_error * (along.abs() + of_along)
    size = g.abs() + level.abs() + (e.h * along).abs()
    return e.rstd * (g - level - e.h * along), e.rstd * (inner + size * (e.rstd_error + 5 * U))


def assert_are_sums(sums: Tensor, grad: Tensor, h: Tensor, h_error: Tensor) -> None:
    """Assert that the rows are the gradient of the weight and, if there are two, of the bias.

    Sums over lines carry as many roundings as there are lines, and what h is off.
    """
    products, unit = grad * h, (len(grad) + 2) * U
    error = (grad * h_error).abs().sum(0) + unit * products.abs().sum(0)
    assert_within(sums[0], products.sum(0), error)
    if len(sums) == 2:
        assert_within(sums[1], grad.sum(0), unit * grad.abs().sum(0))


def check_norm(given: Inputs, center: bool, backend: str, dtype: torch.dtype | None = None) -> None:
    x, w, b, _ = given
    dtype = x.dtype if dtype is None else dtype
    y, stats = norm(x, w, b, given.n, EPS, center, dtype, backend)
    assert (stats.dtype, len(stats)) == (WIDE, 1 + center)
    e, wide_w = exact(x, center), w.double()
    expected = (e.h * wide_w + b.double()).view(x.shape)
    error = e.h_error * wide_w + 2 * U * ((e.h * wide_w).abs() + b.double())
    assert_rounded(y, dtype, expected, error.view(x.shape))
    assert_are_stats(stats, e)


@each_case
@each_kind
def test_results(device: torch.device, backend: str, case: Case, center: bool) -> None:
    check_norm(inputs(*case, device), center, backend)


@each_long_case
@each_kind
@pytest.mark.usefixtures("small_loops")
def test_results_of_long_lines(
    device: torch.device, backend: str, case: Case, center: bool
) -> None:
    check_norm(inputs(*case, device), center, backend)


@each_kind
@pytest.mark.parametrize("limit", [None, 0], ids=["whole", "long"])
def test_results_in_a_dtype_of_their_own(
    device: torch.device, backend: str, small_tiles: Shrink, limit: int | None, center: bool
) -> None:
    small_tiles(limit)
    check_norm(inputs((3, 258), (HALF, BF16), device), center, backend, WIDE)
    check_norm(inputs((3, 258), (WIDE, HALF), device), center, backend, BF16)


@each_kind
def test_without_weights(device: torch.device, backend: str, center: bool) -> None:
    """As with ones and zeros, bit for bit."""
    x, w, b, _ = inputs((9, 64), DTYPES[0], device)
    ones, zeros = torch.ones_like(w), torch.zeros_like(b)
    bare, _ = norm(x, None, None, 64, EPS, center, HALF, backend)
    assert torch.equal(bare, norm(x, ones, zeros, 64, EPS, center, HALF, backend)[0])


def test_a_line_of_equal_values_has_no_variance(device: torch.device, backend: str) -> None:
    """60000 is beyond what squares in half can hold, and its mean is exact."""
    x = torch.full((2, 1000), 60_000.0, dtype=HALF, device=device)
    y, stats = norm(x, None, None, 1000, EPS, True, HALF, backend)
    assert (y == 0).all()
    assert_within(
        stats[1], torch.full_like(stats[1], EPS).double().rsqrt(), 4 * U * stats[1].double()
    )


@each_kind
@pytest.mark.usefixtures("small_loops")
def test_long_lines_do_not_lose_their_variance_to_a_large_mean(
    device: torch.device, backend: str, center: bool
) -> None:
    """A sum of squares would hold 2**20 n, and leave of the variance 1 no more than 4 bits. Torch's
    own, which corrects a mean of 2**10 step by step, is off by 2**10 u for each of a few parts.
    """
    x = torch.full((1, 512), 1024.0, device=device)
    x[:, ::2] += 2
    y, stats = norm(x, None, None, 512, 0.0, center, WIDE, backend)
    if center:
        expected = torch.tensor([[1025.0], [1.0]], dtype=torch.float64, device=device)
        assert_within(stats, expected, 2.0**-12 * expected)
    else:
        torch.testing.assert_close(y.abs(), torch.ones_like(y), rtol=2e-3, atol=0.0)


@each_kind
def test_weights_may_have_gaps(device: torch.device, backend: str, center: bool) -> None:
    made = inputs((3, 40), DTYPES[0], device)
    weights = (made.weight, made.bias) if center else (made.weight, None)
    apart = [w if w is None else torch.stack([w, -w], 1)[:, 0] for w in weights]
    results = [
        norm(made.x, *given, made.n, EPS, center, HALF, backend) for given in (weights, apart)
    ]
    assert all(map(torch.equal, *results))
