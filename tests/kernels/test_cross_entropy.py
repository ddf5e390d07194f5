"""cross_entropy, kernel and twin against FP64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Shrink, U, assert_within, softmax_and_error
from tests.kernels.test_softmax import BF16, HALF, LAYOUTS, WIDE, Layout, inputs
from tests.kernels.test_softmax_special import SPECIAL, N
from tritonamp.kernels import cross_entropy as module
from tritonamp.kernels.cross_entropy import cross_entropy, sample_targets

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* encountered:RuntimeWarning"
)  # NumPy's, in the interpreter

NAMES = ["3", "8", "255", "1024", "more lines", "columns", "two tiles of columns", "vector"]
NAMES += ["no rows", "whole at most", "long from", "long", "long, no masks"]
NAMES += ["long columns", "long, two tiles of columns"]
REAL = {
    "whole": Layout((1, 8192), 1),
    "odd": Layout((2, 50257), 1),
    "most classes": Layout((1, 262144), 1),
}
SMALL = {name: LAYOUTS[name] for name in NAMES}

each_layout = pytest.mark.parametrize("layout", SMALL.values(), ids=SMALL)
each_smoothing = pytest.mark.parametrize("smoothing", [0.0, 0.25])


def losses_and_error(x: Tensor, target: Tensor, dim: int, smoothing: float) -> tuple[Tensor, ...]:
    """The losses in FP64, and the error of FP32 arithmetic.

    Of -log_softmax it is that of one element of softmax_and_error. Smoothing adds the mean of m - x
    over n: n + 3 roundings, and three for each time that the sum is rescaled; then come two
    products and a sum with weights that are rounded themselves.
    """
    log_p, error = softmax_and_error(True, x, dim)
    index = target.clamp(min=0).unsqueeze(dim)
    nll, error = -log_p.gather(dim, index).squeeze(dim), error.gather(dim, index).squeeze(dim)
    if smoothing and x.numel():
        n, even = x.shape[dim], -log_p.mean(dim)
        d = (x.double().amax(dim, keepdim=True) - x.double()).mean(dim)
        tile = module.tiling(x.shape, dim, dim, module.PER_THREAD, module.LONGEST, 8).layout[-1]
        rescaled = -(-n // tile)
        error = error + (17.3 * math.log(n) + 11 + n + 6 * rescaled) * U
        error += ((n + 3 + 3 * rescaled) * d + 4 * (nll + even)) * U
        nll = (1 - smoothing) * nll + smoothing * even
    return nll.masked_fill(target < 0, 0.0), error.masked_fill(target < 0, 0.0)


def special_lines(dim: int, device: Any) -> Tensor:
    """Return lines of which each holds special values, the last none."""
    lines = torch.randn(len(SPECIAL) + 1, N, device=device).to(HALF)
    for line, values in zip(lines, SPECIAL.values(), strict=False):
        for start, end, value in values:
            line[start:end] = value
    return lines if dim == 1 else lines.t().contiguous()


def check(layout: Layout, dtype: torch.dtype, smoothing: float, device: Any, backend: str) -> None:
    x, dim = inputs(layout, dtype, device), layout.dim
    target = sample_targets(x, dim, ignored=True)
    losses, stats = cross_entropy(x, target, dim, -100, smoothing, backend)
    assert losses.dtype is stats.dtype is WIDE
    assert_within(losses, *losses_and_error(x, target, dim, smoothing))
    assert (losses[target < 0] == 0).all() and (stats[:, target < 0] == 0).all()
    d = x.double() - stats[0].unsqueeze(dim)
    kept = d.exp().sum(dim).log()[target >= 0]
    # what a loss near 0 is made of
    of_s = (8 * math.log(x.shape[dim] or 1) + 10 + 7 * x.shape[dim]) * U
    torch.testing.assert_close(stats[1].double()[target >= 0], kept, rtol=0, atol=of_s)


@each_layout
@each_smoothing
def test_results(
    device: torch.device, backend: str, small_tiles: Shrink, layout: Layout, smoothing: float
) -> None:
    small_tiles(layout.many)
    check(layout, HALF, smoothing, device, backend)


@pytest.mark.parametrize("dtype", [BF16, WIDE], ids=str)
@pytest.mark.parametrize("name", ["255", "columns", "long"])
def test_dtypes(
    device: torch.device, backend: str, small_tiles: Shrink, name: str, dtype: torch.dtype
) -> None:
    small_tiles(LAYOUTS[name].many)
    check(LAYOUTS[name], dtype, 0.25, device, backend)


@pytest.mark.parametrize("layout", REAL.values(), ids=REAL)
def test_results_at_real_lengths(device: torch.device, backend: str, layout: Layout) -> None:
    check(layout, HALF, 0.25, device, backend)


@pytest.mark.parametrize(
    ("dim", "many", "column"),
    [(1, None, 0), (1, None, 100), (1, None, N - 1), (1, 0, 100), (0, 0, N - 1)],
)
@each_smoothing
def test_special_lines_are_torchs_and_leave_their_neighbours_alone(
    device: torch.device,
    backend: str,
    small_tiles: Shrink,
    dim: int,
    many: int | None,
    column: int,
    smoothing: float,
) -> None:
    """Logits that are masked by -inf, among others: the target is one of them, or is not."""
    small_tiles(many)
    x = special_lines(dim, device)
    target = torch.full((x.shape[1 - dim],), column, device=device)
    exact, error = losses_and_error(x, target, dim, smoothing)
    losses, _ = cross_entropy(x, target, dim, -100, smoothing, backend)
    assert torch.equal(losses.isnan(), exact.isnan())
    assert torch.equal(losses.isinf(), exact.isinf())
    finite = exact.isfinite()
    assert_within(losses[finite], exact[finite], error[finite])


@pytest.mark.parametrize("bad", [9, -1, 1 << 40])
def test_targets_that_are_no_class_are_refused(
    device: torch.device, backend: str, bad: int
) -> None:
    if device.type == "cuda":
        pytest.skip("an assertion on the device ends the process")
    target = torch.tensor([0, bad, -100])
    with pytest.raises(IndexError, match=f"Target {bad} is out of bounds"):
        cross_entropy(torch.zeros(3, 9, dtype=HALF), target, 1, -100, 0.0, backend)


@pytest.mark.parametrize("shape", [(3, 700), (1, 9000), (2, 8197)])
def test_long_lines_are_read_once(
    triton_device: torch.device, traffic: Any, shape: tuple[int, int]
) -> None:
    """2 B an element, and for each line a target and its logit, a loss and two numbers."""
    x = torch.randn(shape, device=triton_device).to(HALF)
    cross_entropy(x, sample_targets(x, 1, ignored=False), 1, -100, 0.0, "triton")
    assert (traffic.read, traffic.written) == (2 * x.numel() + 12 * shape[0], 12 * shape[0])
    assert traffic.read + traffic.written <= 1.02 * 2 * x.numel()


def test_ignored_lines_are_not_read(triton_device: torch.device, traffic: Any) -> None:
    x = torch.randn(4, 300, device=triton_device).to(HALF)
    target = torch.full((4,), -100, device=triton_device)
    cross_entropy(x, target, 1, -100, 0.0, "triton")
    assert traffic.read == 8 * len(target)
