"""The gradient of token_log_probs, kernel and twin against FP64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Shrink, U, assert_within, ulp
from tests.kernels.test_softmax import BF16, HALF, LAYOUTS, WIDE, Layout, inputs
from tests.kernels.test_token_log_probs import REAL, SMALL
from tritonamp.kernels.token_log_probs import sample_rows, token_log_probs
from tritonamp.kernels.token_log_probs_backward import LONGEST, token_log_probs_backward

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* encountered:RuntimeWarning"
)  # NumPy's, in the interpreter

each_entropy = pytest.mark.parametrize("entropy", [False, True], ids=["alone", "with entropy"])


def gradient_and_error(
    x: Tensor, target: Tensor, grad: Tensor, stats: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """The gradient in FP64 from the numbers that are given, and the error of FP32 arithmetic.

    log(p) = d - log(s) is off by 3 u of d and 1 u of itself, p by that, exp2's argument and exp2
    itself, and below 2**-126 it is 0; products and sums add a rounding each of what they are of.
    """
    m, log_s = (number.double().unsqueeze(-1) for number in stats[:2])
    g = grad[0].double().unsqueeze(-1) / temperature
    d = (x.double() - m) / temperature
    log_p = d - log_s
    p = log_p.exp()
    of_log_p = (4 * d.abs() + 2 * log_s.abs()) * U
    of_p = (of_log_p + (2 * log_p.abs() + 8) * U) * p + 2.0**-126
    of_p = of_p.masked_fill(p == 0, 2.0**-126)
    hit = torch.zeros_like(p)
    if x.numel():
        hit.scatter_(-1, target.unsqueeze(-1), 1.0)
    exact = g * (hit - p)
    error = g.abs() * (of_p + 4 * U * (hit + p))
    if len(grad) == 2:
        h, entropy = grad[1].double().unsqueeze(-1) / temperature, stats[2].double().unsqueeze(-1)
        seen = p > 0
        inner = (log_p + entropy).masked_fill(~seen, 0.0)
        exact = exact - h * p * inner
        of_inner = (of_log_p + 2 * U * (log_p.abs() + entropy.abs())).masked_fill(~seen, 0.0)
        error = error + h.abs() * (of_p * inner.abs() + p * of_inner + 4 * U * p * inner.abs())
        error = error + 2.0**-126 * h.abs() * 200
    return exact, error + 2 * U * exact.abs()


def check(
    layout: Layout, dtype: torch.dtype, entropy: bool, device: Any, backend: str, temperature: float
) -> None:
    x, target = sample_rows(inputs(layout, dtype, device), layout.dim)
    _, stats = token_log_probs(x, target, temperature, entropy, "eager")
    grad = torch.randn((1 + entropy, *target.shape), device=device) * 2.0**10
    dx = token_log_probs_backward(x, target, grad, stats, temperature, backend)
    assert dx.dtype is dtype and dx.shape == x.shape
    exact, error = gradient_and_error(x, target, grad, stats, temperature)
    assert_within(dx, exact, ulp(exact, dtype) / 2 + error)


@pytest.mark.parametrize("layout", SMALL.values(), ids=SMALL)
@each_entropy
def test_backward(
    device: torch.device, backend: str, small_tiles: Shrink, layout: Layout, entropy: bool
) -> None:
    small_tiles(layout.many)
    check(layout, HALF, entropy, device, backend, 0.7)


@pytest.mark.parametrize("dtype", [BF16, WIDE], ids=str)
@pytest.mark.parametrize("name", ["255", "columns", "long"])
def test_backward_dtypes(
    device: torch.device, backend: str, small_tiles: Shrink, name: str, dtype: torch.dtype
) -> None:
    small_tiles(LAYOUTS[name].many)
    check(LAYOUTS[name], dtype, True, device, backend, 1.0)


@pytest.mark.parametrize("layout", REAL.values(), ids=REAL)
def test_backward_at_real_lengths(device: torch.device, backend: str, layout: Layout) -> None:
    check(layout, HALF, True, device, backend, 0.7)


@pytest.mark.parametrize("many", [None, 0])
def test_masked_classes_get_no_gradient(
    device: torch.device, backend: str, small_tiles: Shrink, many: int | None
) -> None:
    """Of -inf as logits, which have no part in log-probabilities and entropy."""
    small_tiles(many)
    x = torch.randn(3, 300, device=device).to(HALF)
    x[:, 7:] = -math.inf
    target = torch.tensor([0, 3, 6], device=device)
    _, stats = token_log_probs(x, target, 0.7, True, backend)
    grad = torch.ones(2, 3, device=device)
    dx = token_log_probs_backward(x, target, grad, stats, 0.7, backend)
    assert (dx[:, 7:] == 0).all() and dx.isfinite().all() and (dx[:, :7] != 0).any(1).all()
    few = token_log_probs_backward(x[:, :7].contiguous(), target, grad, stats, 0.7, "eager")
    torch.testing.assert_close(dx[:, :7], few, rtol=2.0**-10, atol=2.0**-12)


def test_the_loss_scale_is_applied_before_rounding(device: torch.device, backend: str) -> None:
    """Probabilities of 2**-12 in the mean over 2**17 rows: 2**-29, of which half knows nothing."""
    x = torch.zeros(1, 1 << 12, device=device, dtype=HALF)
    target = torch.zeros(1, dtype=torch.int64, device=device)
    _, stats = token_log_probs(x, target, 1.0, False, backend)
    for scale, expected in ((1.0, 0.0), (2.0**16, -(2.0**-13))):
        grad = torch.full((1, 1), scale / 2**17, device=device)
        dx = token_log_probs_backward(x, target, grad, stats, 1.0, backend)
        assert (dx[0, 1:] == expected).all()


@each_entropy
@pytest.mark.parametrize("shape", [(3, 700), (1, 9000), (2, 8197)])
def test_logits_are_read_once_and_gradients_written(
    triton_device: torch.device, traffic: Any, shape: tuple[int, int], entropy: bool
) -> None:
    """4 B an element, and of each tile a target, incoming gradients and two or three numbers."""
    x = torch.randn(shape, device=triton_device).to(HALF)
    target = torch.zeros(shape[0], dtype=torch.int64, device=triton_device)
    _, stats = token_log_probs(x, target, 0.7, entropy, "eager")
    token_log_probs_backward(x, target, stats[: 1 + entropy], stats, 0.7, "triton")
    of_tiles = (20 + 8 * entropy) * shape[0] * math.ceil(shape[1] / LONGEST)
    assert (traffic.read, traffic.written) == (2 * x.numel() + of_tiles, 2 * x.numel())
