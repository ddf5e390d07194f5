"""The gradient of cross_entropy, kernel and twin against FP64."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.conftest import Shrink, U, assert_within, ulp
from tests.kernels.test_cross_entropy import REAL, SMALL, each_smoothing, special_lines
from tests.kernels.test_softmax import BF16, HALF, LAYOUTS, WIDE, Layout, inputs
from tritonamp.kernels.cross_entropy import cross_entropy, sample_targets
from tritonamp.kernels.cross_entropy_backward import LONGEST, cross_entropy_backward

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* encountered:RuntimeWarning"
)  # NumPy's, in the interpreter

INF, NAN = float("inf"), float("nan")


def gradient_and_error(
    x: Tensor, target: Tensor, grad: Tensor, stats: Tensor, dim: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """The gradient in FP64 from the numbers that are given, and the error of FP32 arithmetic.

    exp2's argument, (x - m) log2(e) - log(s) log2(e), is off by 2.25 u of each term and 1 u of the
    difference, exp2 itself by 5 u, and below 2**-126 it returns 0. What is taken off is rounded
    twice, the difference and the product once each.
    """
    m, log_s, g = (number.double().unsqueeze(dim) for number in (*stats, grad))
    d, n = x.double() - m, x.shape[dim]
    p = (d - log_s).exp()
    wanted = torch.full_like(p, smoothing / max(n, 1))
    if x.numel():
        index = target.clamp(min=0).unsqueeze(dim)
        wanted.scatter_add_(dim, index, torch.full_like(p, 1 - smoothing))
    of_p = (3.25 * (d.abs() + log_s.abs()) + 5) * U * p + 2.0**-126
    exact = g * (p - wanted)
    error = g.abs() * (of_p + 2 * U * wanted) + 2 * U * exact.abs()
    ignored = (target < 0).unsqueeze(dim)
    return exact.masked_fill(ignored, 0.0), error.masked_fill(ignored, 0.0)


def check(layout: Layout, dtype: torch.dtype, smoothing: float, device: Any, backend: str) -> None:
    x, dim = inputs(layout, dtype, device), layout.dim
    target = sample_targets(x, dim, ignored=True)
    _, stats = cross_entropy(x, target, dim, -100, smoothing, "eager")
    grad = torch.randn(target.shape, device=device) * 2.0**10
    dx = cross_entropy_backward(x, target, grad, stats, dim, -100, smoothing, backend)
    assert dx.dtype is dtype
    exact, error = gradient_and_error(x, target, grad, stats, dim, smoothing)
    assert_within(dx, exact, ulp(exact, dtype) / 2 + error)


@pytest.mark.parametrize("layout", SMALL.values(), ids=SMALL)
@each_smoothing
def test_backward(
    device: torch.device, backend: str, small_tiles: Shrink, layout: Layout, smoothing: float
) -> None:
    small_tiles(layout.many)
    check(layout, HALF, smoothing, device, backend)


@pytest.mark.parametrize("dtype", [BF16, WIDE], ids=str)
@pytest.mark.parametrize("name", ["255", "columns", "long"])
def test_backward_dtypes(
    device: torch.device, backend: str, small_tiles: Shrink, name: str, dtype: torch.dtype
) -> None:
    small_tiles(LAYOUTS[name].many)
    check(LAYOUTS[name], dtype, 0.25, device, backend)


@pytest.mark.parametrize("layout", REAL.values(), ids=REAL)
def test_backward_at_real_lengths(device: torch.device, backend: str, layout: Layout) -> None:
    check(layout, HALF, 0.25, device, backend)


@pytest.mark.parametrize(("dim", "many"), [(1, None), (1, 0), (0, 0)])
def test_backward_of_special_lines_is_finite_where_torchs_is(
    device: torch.device, backend: str, small_tiles: Shrink, dim: int, many: int | None
) -> None:
    small_tiles(many)
    x = special_lines(dim, device)
    target = torch.full((x.shape[1 - dim],), 100, device=device)
    losses, stats = cross_entropy(x, target, dim, -100, 0.25, "eager")
    dx = cross_entropy_backward(x, target, torch.ones_like(losses), stats, dim, -100, 0.25, backend)
    wide = (x if dim == 1 else x.t()).double().requires_grad_()
    F.cross_entropy(wide, target, reduction="sum", label_smoothing=0.25).backward()
    expected = wide.grad if dim == 1 else wide.grad.t()
    assert torch.equal(dx.isfinite(), expected.isfinite())


@pytest.mark.parametrize(("shape", "dim"), [((4, 300), 1), ((4, 9), 1), ((300, 4), 0)])
def test_ignored_lines_leave_nothing(
    device: torch.device, backend: str, small_tiles: Shrink, shape: tuple[int, int], dim: int
) -> None:
    """Whatever is in them, and in their incoming gradients."""
    small_tiles(0)
    x = torch.randn(shape, device=device).to(HALF)
    x.select(1 - dim, 1).fill_(NAN)
    x.select(1 - dim, 2).fill_(-INF)
    target = torch.tensor([0, 7, 7, 1], device=device)
    losses, stats = cross_entropy(x, target, dim, 7, 0.1, backend)
    assert losses.isfinite().all() and (losses[1:3] == 0).all() and (losses[0::3] > 0).all()
    grad = torch.tensor([1.0, NAN, INF, 1.0], device=device)
    dx = cross_entropy_backward(x, target, grad, stats, dim, 7, 0.1, backend)
    assert dx.isfinite().all() and not dx.select(1 - dim, 1).any()
    assert not dx.select(1 - dim, 2).any() and dx.select(1 - dim, 3).any()


def test_large_logits_keep_their_gradient(device: torch.device, backend: str) -> None:
    """In one FP32 number the log-sum-exp of logits near 65504 would be off by up to 2**-9."""
    x = torch.full((4, 1000), 65504.0, device=device, dtype=HALF)
    target = torch.arange(4, device=device)
    losses, stats = cross_entropy(x, target, 1, -100, 0.0, backend)
    dx = cross_entropy_backward(x, target, torch.ones_like(losses), stats, 1, -100, 0.0, backend)
    assert (dx[:, 4:] == torch.tensor(1e-3).to(HALF).item()).all()


def test_the_loss_scale_is_applied_before_rounding(device: torch.device, backend: str) -> None:
    """Probabilities of 2**-12 in the mean over 2**17 lines: 2**-29, of which half knows nothing.

    With a loss scale of 2**16 they are 2**-13.
    """
    x = torch.zeros(1, 1 << 12, device=device, dtype=HALF)
    target = torch.zeros(1, dtype=torch.int64, device=device)
    losses, stats = cross_entropy(x, target, 1, -100, 0.0, backend)
    for scale, expected in ((1.0, 0.0), (2.0**16, 2.0**-13)):
        grad = torch.full_like(losses, scale / 2**17)
        dx = cross_entropy_backward(x, target, grad, stats, 1, -100, 0.0, backend)
        assert (dx[0, 1:] == expected).all()


@pytest.mark.parametrize("shape", [(3, 700), (1, 9000), (2, 8197)])
def test_logits_are_read_once_and_gradients_written(
    triton_device: torch.device, traffic: Any, shape: tuple[int, int]
) -> None:
    """4 B an element, and of each tile a target, its incoming gradient, and two numbers."""
    x = torch.randn(shape, device=triton_device).to(HALF)
    target = sample_targets(x, 1, ignored=False)
    losses, stats = cross_entropy(x, target, 1, -100, 0.0, "eager")
    cross_entropy_backward(x, target, losses, stats, 1, -100, 0.0, "triton")
    of_tiles = 20 * shape[0] * math.ceil(shape[1] / LONGEST)
    assert (traffic.read, traffic.written) == (2 * x.numel() + of_tiles, 2 * x.numel())
    assert traffic.read + traffic.written <= 1.01 * 4 * x.numel()


def test_ignored_lines_are_not_read(triton_device: torch.device, traffic: Any) -> None:
    x = torch.randn(4, 300, device=triton_device).to(HALF)
    target = torch.full((4,), -100, device=triton_device)
    losses, stats = cross_entropy(x, target, 1, -100, 0.0, "eager")
    cross_entropy_backward(x, target, losses, stats, 1, -100, 0.0, "triton")
    assert traffic.read == 8 * len(target)
