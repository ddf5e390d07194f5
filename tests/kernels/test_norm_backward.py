"""Gradients of layer_norm and rms_norm, kernels and twins against FP64."""

from typing import Any

import pytest
import torch

from tests.kernels.conftest import U, assert_rounded, assert_within, numpy_warns
from tests.kernels.test_norm import (
    BF16,
    DTYPES,
    EPS,
    HALF,
    WIDE,
    Case,
    Inputs,
    Shrink,
    assert_are_sums,
    each_case,
    each_kind,
    each_long_case,
    exact,
    gradient_and_error,
    inputs,
)
from tritonamp.kernels import norm_backward as norm_backward_module
from tritonamp.kernels.norm import norm
from tritonamp.kernels.norm_backward import _backward, norm_backward

pytestmark = numpy_warns


@pytest.fixture
def three_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial sums of the weights' gradients."""
    monkeypatch.setattr(norm_backward_module, "PARTS", 3)
    monkeypatch.setattr(norm_backward_module, "WARPS", 0)


def check_norm_backward(given: Inputs, center: bool, backend: str) -> None:
    """The sums over n elements of a line carry n + 3 roundings."""
    x, w, _, grad = given
    _, stats = norm(x, w, None, given.n, EPS, center, x.dtype, "eager")
    dx, sums = norm_backward(grad, x, w, stats, given.n, True, center, None, backend)
    assert (sums.dtype, sums.shape) == (WIDE, (1 + center, given.n))
    e, wide = exact(x, center), grad.double().reshape(-1, given.n)
    expected, error = gradient_and_error(e, wide * w.double(), given.n + 2, center)
    assert_rounded(dx, x.dtype, expected.view(x.shape), error.view(x.shape))
    assert_are_sums(sums, wide, e.h, e.h_error)


@each_case
@each_kind
@pytest.mark.usefixtures("three_parts")
def test_gradients(device: torch.device, backend: str, case: Case, center: bool) -> None:
    check_norm_backward(inputs(*case, device), center, backend)


@each_long_case
@each_kind
@pytest.mark.usefixtures("small_loops")
def test_gradients_of_long_lines(
    device: torch.device, backend: str, case: Case, center: bool
) -> None:
    check_norm_backward(inputs(*case, device), center, backend)


@each_kind
@pytest.mark.parametrize("limit", [None, 0], ids=["whole", "long"])
def test_gradients_of_another_dtype(
    device: torch.device, backend: str, small_tiles: Shrink, limit: int | None, center: bool
) -> None:
    small_tiles(limit)
    given = inputs((3, 258), (HALF, BF16), device)
    check_norm_backward(given._replace(grad=given.grad.float() * 1.001), center, backend)


@pytest.mark.parametrize(
    ("rows", "n", "itemsize", "programs", "lines", "num_warps"),
    [
        (8192, 256, 2, 128, 16, 16),
        (4096, 1000, 2, 128, 4, 16),
        (4096, 2048, 2, 128, 2, 16),
        (4096, 8192, 2, 128, 1, 32),
        (256, 1024, 2, 128, 2, 8),  # few lines: a tile for each program
        (128, 1024, 2, 128, 1, 4),
        (4096, 1001, 2, 512, 1, 4),  # vectors of one element
        (4096, 1024, 4, 512, 1, 4),
        (4096, 4096, 4, 128, 1, 16),
    ],
)
def test_2048_warps_leave_few_rows_of_sums(
    rows: int, n: int, itemsize: int, programs: int, lines: int, num_warps: int
) -> None:
    """Where a thread holds one vector of a line, as many lines as 16 warps hold make up a tile."""
    dtype = {2: HALF, 4: WIDE}[itemsize]
    launch: Any = _backward((rows, n), n, itemsize, (dtype,) * 4, False, *[True] * 4)
    assert launch.grid == (programs, 1, 1)
    assert launch.results[1][0] == (2, programs, n)
    assert (launch.constants[-2], launch.num_warps) == (lines, num_warps)


@pytest.mark.parametrize(("n", "dtype"), [(520, HALF), (521, HALF), (520, WIDE)], ids=str)
@each_kind
def test_gradients_do_not_depend_on_other_lines(
    device: torch.device, backend: str, n: int, dtype: torch.dtype, center: bool
) -> None:
    """Bit for bit, although more lines make wider tiles."""
    x, w, _, grad = inputs((600, n), (dtype, dtype), device)
    stats = norm(x, w, None, n, EPS, center, dtype, "eager")[1]
    dx, some = (
        norm_backward(grad[:k], x[:k], w, stats[:, :k].contiguous(), n, True, center, None, backend)
        for k in (600, 100)
    )
    assert torch.equal(dx[0][:100], some[0])


@pytest.mark.parametrize("wanted", [(False, False), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("shape", [(9, 64), (9, 257)], ids=str)
@pytest.mark.usefixtures("small_loops")
def test_only_the_sums_that_are_wanted(
    device: torch.device, backend: str, shape: tuple[int, ...], wanted: tuple[bool, bool]
) -> None:
    x, w, _, grad = inputs(shape, DTYPES[0], device)
    _, stats = norm(x, w, None, shape[1], EPS, True, HALF, "eager")
    both = norm_backward(grad, x, w, stats, shape[1], True, True, None, backend)
    some = norm_backward(grad, x, w, stats, shape[1], *wanted, None, backend)
    assert torch.equal(some[0], both[0])
    assert torch.equal(some[1], both[1][torch.tensor(wanted, device=device)])


@pytest.mark.parametrize("shape", [(9, 64), (2, 257)], ids=str)
@each_kind
@pytest.mark.usefixtures("small_loops")
def test_another_gradient_of_x_is_added(
    device: torch.device, backend: str, center: bool, shape: tuple[int, ...]
) -> None:
    """In FP32, where a GPU may round the product and the sum in one."""
    x, w, added, grad = inputs(shape, (WIDE, WIDE), device)
    added = added.expand(shape)
    _, stats = norm(x, w, None, shape[1], EPS, center, WIDE, "eager")
    args = grad, x, w, stats, shape[1], True, center
    alone, sums = norm_backward(*args, None, backend)
    both, same_sums = norm_backward(*args, added, backend)
    assert torch.equal(sums, same_sums)
    exact = alone.double() + added.double()
    assert_within(both, exact, 2 * U * (alone.double().abs() + exact.abs()))


@each_kind
def test_without_weights(device: torch.device, backend: str, center: bool) -> None:
    """As with ones, bit for bit."""
    x, w, _, grad = inputs((9, 64), DTYPES[0], device)
    _, stats = norm(x, None, None, 64, EPS, center, HALF, "eager")
    bare, sums = norm_backward(grad, x, None, stats, 64, False, False, None, backend)
    ones = torch.ones_like(w)
    assert sums.shape == (0, 64)
    assert torch.equal(
        bare, norm_backward(grad, x, ones, stats, 64, False, False, None, backend)[0]
    )


def test_scaled_gradients_may_be_large(device: torch.device, backend: str) -> None:
    """64 lines of 60000: their sum, 3.84e6, is beyond fp16."""
    x, w, _, _ = inputs((64, 8), DTYPES[0], device)
    grad = torch.full_like(x, 60_000.0)
    _, stats = norm(x, w, None, 8, EPS, True, HALF, "eager")
    _, sums = norm_backward(grad, x, w, stats, 8, False, True, None, backend)
    assert torch.equal(sums[0], torch.full_like(sums[0], 64 * 60_000.0))
