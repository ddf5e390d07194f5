"""The gradient of cross_entropy and of entropies, kernel and twin against FP64."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.conftest import Shrink, U, assert_within, ulp
from tests.kernels.test_cross_entropy import (
    NO_CLASS,
    OPTIONS,
    Options,
    each_dtype,
    each_layout,
    each_long_shape,
    each_real_layout,
    rich,
    special_lines,
    targets_of,
)
from tests.kernels.test_softmax import HALF, LAYOUTS, Layout, inputs
from tritonamp.kernels.cross_entropy import cross_entropy, sample_targets
from tritonamp.kernels.cross_entropy_backward import LONGEST, cross_entropy_backward

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* encountered:RuntimeWarning"
)  # NumPy's, in the interpreter

INF, NAN = float("inf"), float("nan")
GRADIENTS = {name: OPTIONS[name] for name in ("plain", "smoothed", "tokens, colder", "everything")}
GRADIENTS["tokens without entropies"] = Options(NO_CLASS, temperature=0.7)


def gradient_and_error(
    x: Tensor, target: Tensor, grad: Tensor, stats: Tensor, dim: int, options: Options
) -> tuple[Tensor, Tensor]:
    """The gradient in FP64 from the numbers that are given, and the error of FP32 arithmetic.

    log(p) = d - log(s) is off by 3 u of d, 2 u of log(s) and 1 u of itself, p by that, exp2's
    argument and exp2 itself, and below 2**-126 it is 0. What is taken off p is rounded twice; the
    difference, the factor and its product add a rounding each of what they are of.
    """
    m, log_s = (number.double().unsqueeze(dim) for number in stats[:2])
    d, n = (x.double() - m) / options.temperature, x.shape[dim]
    g, *h = (number.double().unsqueeze(dim) / options.temperature for number in grad)
    log_p = d - log_s
    p = log_p.exp()
    seen = p > 0
    of_log_p = (4 * d.abs() + 2 * log_s.abs()) * U
    of_p = ((of_log_p + (2 * log_p.abs() + 8) * U) * p).masked_fill(~seen, 0.0) + 2.0**-126
    wanted = torch.full_like(p, options.smoothing / max(n, 1))
    if x.numel():
        index = target.clamp(min=0).unsqueeze(dim)
        wanted.scatter_add_(dim, index, torch.full_like(p, 1 - options.smoothing))
    exact = g * (p - wanted)
    error = g.abs() * (of_p + 2 * U * wanted) + 4 * U * exact.abs()
    if h:
        entropy = stats[2].double().unsqueeze(dim)
        inner = (log_p + entropy).masked_fill(~seen, 0.0)
        of_inner = (of_log_p + 2 * U * (log_p.abs() + entropy.abs())).masked_fill(~seen, 0.0)
        exact = exact - h[0] * p * inner
        error += h[0].abs() * (of_p * inner.abs() + p * of_inner + 4 * U * p * inner.abs())
        error += 2.0**-126 * h[0].abs() * 200 + 2 * U * exact.abs()
    ignored = (target == options.ignore_index).unsqueeze(dim)
    return exact.masked_fill(ignored, 0.0), error.masked_fill(ignored, 0.0)


def backward(
    x: Tensor,
    target: Tensor,
    grad: Tensor,
    stats: Tensor,
    dim: int,
    options: Options,
    backend: str,
) -> Tensor:
    return cross_entropy_backward(x, target, grad, stats, dim, *options[:3], backend)


def check(layout: Layout, dtype: torch.dtype, options: Options, device: Any, backend: str) -> None:
    x, dim = inputs(layout, dtype, device), layout.dim
    target = targets_of(x, dim, options)
    _, stats = cross_entropy(x, target, dim, *options, "eager")
    grad = torch.randn((1 + options.entropy, *target.shape), device=device) * 2.0**10
    dx = backward(x, target, grad, stats, dim, options, backend)
    assert dx.dtype is dtype and dx.shape == x.shape
    exact, error = gradient_and_error(x, target, grad, stats, dim, options)
    assert_within(dx, exact, ulp(exact, dtype) / 2 + error)


@each_layout
@pytest.mark.parametrize("options", GRADIENTS.values(), ids=GRADIENTS)
def test_backward(
    device: torch.device, backend: str, small_tiles: Shrink, layout: Layout, options: Options
) -> None:
    small_tiles(layout.many)
    check(layout, HALF, options, device, backend)


@each_dtype
@rich
@pytest.mark.parametrize("name", ["255", "columns", "long"])
def test_backward_dtypes(
    device: torch.device,
    backend: str,
    small_tiles: Shrink,
    name: str,
    options: Options,
    dtype: torch.dtype,
) -> None:
    small_tiles(LAYOUTS[name].many)
    check(LAYOUTS[name], dtype, options, device, backend)


@rich
@each_real_layout
def test_backward_at_real_lengths(
    device: torch.device, backend: str, layout: Layout, options: Options
) -> None:
    check(layout, HALF, options, device, backend)


@pytest.mark.parametrize(("dim", "many"), [(1, None), (1, 0), (0, 0)])
def test_backward_of_special_lines_is_finite_where_torchs_is(
    device: torch.device, backend: str, small_tiles: Shrink, dim: int, many: int | None
) -> None:
    small_tiles(many)
    x, options = special_lines(dim, device), OPTIONS["smoothed"]
    target = torch.full((x.shape[1 - dim],), 100, device=device)
    losses, stats = cross_entropy(x, target, dim, *options, "eager")
    dx = backward(x, target, torch.ones_like(losses)[None], stats, dim, options, backend)
    wide = (x if dim == 1 else x.t()).double().requires_grad_()
    F.cross_entropy(wide, target, reduction="sum", label_smoothing=0.25).backward()
    expected = wide.grad if dim == 1 else wide.grad.t()
    assert torch.equal(dx.isfinite(), expected.isfinite())


@pytest.mark.parametrize("many", [None, 0])
def test_masked_classes_get_no_gradient(
    device: torch.device, backend: str, small_tiles: Shrink, many: int | None
) -> None:
    """Of -inf as logits, which have no part in log-probabilities and entropy."""
    small_tiles(many)
    x = torch.randn(3, 300, device=device).to(HALF)
    x[:, 7:] = -INF
    target, options = torch.tensor([0, 3, 6], device=device), OPTIONS["tokens, colder"]
    _, stats = cross_entropy(x, target, 1, *options, backend)
    grad = torch.ones(2, 3, device=device)
    dx = backward(x, target, grad, stats, 1, options, backend)
    assert (dx[:, 7:] == 0).all() and dx.isfinite().all() and (dx[:, :7] != 0).any(1).all()
    few = backward(x[:, :7].contiguous(), target, grad, stats, 1, options, "eager")
    torch.testing.assert_close(dx[:, :7], few, rtol=2.0**-10, atol=2.0**-12)


@pytest.mark.parametrize(("shape", "dim"), [((4, 300), 1), ((4, 9), 1), ((300, 4), 0)])
def test_ignored_lines_leave_nothing(
    device: torch.device, backend: str, small_tiles: Shrink, shape: tuple[int, int], dim: int
) -> None:
    """Whatever is in them, and in their incoming gradients."""
    small_tiles(0)
    x = torch.randn(shape, device=device).to(HALF)
    x.select(1 - dim, 1).fill_(NAN)
    x.select(1 - dim, 2).fill_(-INF)
    target, options = torch.tensor([0, 7, 7, 1], device=device), Options(7, 0.1, 0.7, True)
    losses, stats = cross_entropy(x, target, dim, *options, backend)
    for numbers in (losses, stats[2]):
        assert numbers.isfinite().all() and (numbers[1:3] == 0).all() and (numbers[::3] > 0).all()
    grad = torch.tensor([1.0, NAN, INF, 1.0], device=device).expand(2, 4)
    dx = backward(x, target, grad, stats, dim, options, backend)
    assert dx.isfinite().all() and not dx.select(1 - dim, 1).any()
    assert not dx.select(1 - dim, 2).any() and dx.select(1 - dim, 3).any()


def test_large_logits_keep_their_gradient(device: torch.device, backend: str) -> None:
    """In one FP32 number the log-sum-exp of logits near 65504 would be off by up to 2**-9."""
    x = torch.full((4, 1000), 65504.0, device=device, dtype=HALF)
    target, options = torch.arange(4, device=device), Options()
    losses, stats = cross_entropy(x, target, 1, *options, backend)
    dx = backward(x, target, torch.ones_like(losses)[None], stats, 1, options, backend)
    assert (dx[:, 4:] == torch.tensor(1e-3).to(HALF).item()).all()


@pytest.mark.parametrize("ignore_index", [-100, NO_CLASS])
def test_the_loss_scale_is_applied_before_rounding(
    device: torch.device, backend: str, ignore_index: int
) -> None:
    """Probabilities of 2**-12 in the mean over 2**17 lines: 2**-29, of which half knows nothing.

    With a loss scale of 2**16 they are 2**-13.
    """
    x, options = torch.zeros(1, 1 << 12, device=device, dtype=HALF), Options(ignore_index)
    target = torch.zeros(1, dtype=torch.int64, device=device)
    _, stats = cross_entropy(x, target, 1, *options, backend)
    for scale, expected in ((1.0, 0.0), (2.0**16, 2.0**-13)):
        grad = torch.full((1, 1), scale / 2**17, device=device)
        dx = backward(x, target, grad, stats, 1, options, backend)
        assert (dx[0, 1:] == expected).all()


@pytest.mark.parametrize("name", ["plain", "tokens, colder", "tokens without entropies"])
@each_long_shape
def test_logits_are_read_once_and_gradients_written(
    triton_device: torch.device, traffic: Any, shape: tuple[int, int], name: str
) -> None:
    """4 B an element, and of each tile a target, incoming gradients and two or three numbers."""
    x, options = torch.randn(shape, device=triton_device).to(HALF), GRADIENTS[name]
    target = sample_targets(x, 1, ignored=False)
    _, stats = cross_entropy(x, target, 1, *options, "eager")
    backward(x, target, stats[: 1 + options.entropy], stats, 1, options, "triton")
    of_tiles = (20 + 8 * options.entropy) * shape[0] * math.ceil(shape[1] / LONGEST)
    assert (traffic.read, traffic.written) == (2 * x.numel() + of_tiles, 2 * x.numel())
    assert traffic.read + traffic.written <= (1.02 if options.entropy else 1.01) * 4 * x.numel()


def test_ignored_lines_are_not_read(triton_device: torch.device, traffic: Any) -> None:
    x, options = torch.randn(4, 300, device=triton_device).to(HALF), OPTIONS["everything"]
    target = torch.full((4,), -100, device=triton_device)
    losses, stats = cross_entropy(x, target, 1, *options, "eager")
    backward(x, target, torch.stack([losses, losses]), stats, 1, options, "triton")
    assert traffic.read == 8 * len(target)
