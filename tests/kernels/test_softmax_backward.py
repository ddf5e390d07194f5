"""Gradients of softmax and log_softmax, kernels and twins against FP64."""

import pytest
import torch

from tests.kernels.conftest import U, assert_rounded, backward_and_error, numpy_warns
from tests.kernels.test_softmax import (
    BF16,
    HALF,
    WIDE,
    Layout,
    each_layout,
    each_real_layout,
    each_regime,
    inputs,
)
from tritonamp.kernels.softmax_backward import (
    LONGEST,
    PER_THREAD,
    _backward_tiling,
    softmax_backward,
)

pytestmark = numpy_warns

Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]
BACKWARD_DTYPES = [(HALF, HALF, HALF), (BF16, BF16, BF16), (HALF, WIDE, HALF), (WIDE, WIDE, WIDE)]

each_kind = pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])


def check_softmax_backward(
    log: bool,
    layout: Layout,
    dtypes: Dtypes,
    device: torch.device,
    backend: str,
) -> None:
    """``dtypes``: dtype of y, dtype of its gradient, dtype of the result."""
    forward = torch.log_softmax if log else torch.softmax
    y = forward(inputs(layout, dtypes[0], device).float() / 8, layout.dim).to(dtypes[0])
    grad = torch.randn(y.shape, device=device).to(dtypes[1])
    grad, y = (torch.empty_like(t).copy_(t) for t in (grad, y))
    exact, error = backward_and_error(log, grad, y, layout.dim)
    result = softmax_backward(grad, y, layout.dim, dtypes[2], log, backend)
    assert_rounded(result, dtypes[2], exact, error)


@each_layout
@each_kind
@pytest.mark.usefixtures("tiles_of_layout")
def test_backward(device: torch.device, backend: str, log: bool, layout: Layout) -> None:
    check_softmax_backward(log, layout, BACKWARD_DTYPES[0], device, backend)


@pytest.mark.parametrize("dtypes", BACKWARD_DTYPES[1:], ids=str)
@each_regime
@each_kind
@pytest.mark.usefixtures("tiles_of_layout")
def test_backward_dtypes(
    device: torch.device, backend: str, log: bool, layout: Layout, dtypes: Dtypes
) -> None:
    check_softmax_backward(log, layout, dtypes, device, backend)


@each_real_layout
@each_kind
def test_backward_at_real_boundaries(
    device: torch.device, backend: str, log: bool, layout: Layout
) -> None:
    check_softmax_backward(log, layout, BACKWARD_DTYPES[0], device, backend)


@each_kind
def test_backward_is_wide_enough_for_scaled_gradients(
    device: torch.device, backend: str, log: bool
) -> None:
    """1024 gradients of 60000 cancel exactly; their sum, 6e7, is beyond fp16."""
    grad = torch.full((1024,), 60_000.0, dtype=HALF, device=device)
    y = torch.full((1024,), 2.0**-10, dtype=HALF, device=device)
    if log:
        y = y.float().log()
    # y = log(2**-10) in FP32 is off by up to 4 u, exp by 1.25 |y| + 5 < 14 u; 60000 is about 2**16
    assert softmax_backward(grad, y, 0, WIDE, log, backend).abs().max() <= 2**16 * (4 + 14 + 1) * U


def test_the_longest_line_that_stays_in_registers_gets_all_of_them() -> None:
    """A loop holds less of a longer one at a time."""
    longest, longer = (_backward_tiling((512, n), 1, 8) for n in (LONGEST, 2 * LONGEST))
    assert longest.whole and not longer.whole
    assert longest.num_warps == min(LONGEST // (32 * PER_THREAD), 32)
