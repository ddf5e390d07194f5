"""Gradients of group_norm in both memory formats, kernels and twins against FP64."""

import pytest
import torch

from tests.kernels.conftest import Traffic, assert_rounded, numpy_warns
from tests.kernels.test_group_norm import (
    Case,
    Inputs,
    each_case,
    each_format,
    each_long_case,
    inputs,
    values_of_bytes,
    whole_and_long,
)
from tests.kernels.test_norm import (
    DTYPES,
    EPS,
    WIDE,
    assert_are_sums,
    exact,
    gradient_and_error,
)
from tritonamp.kernels import group_norm_backward as group_norm_backward_module
from tritonamp.kernels.group_norm import group_norm
from tritonamp.kernels.group_norm_backward import group_norm_backward

pytestmark = numpy_warns


@pytest.fixture
def three_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial sums of the weights' gradients."""
    monkeypatch.setattr(group_norm_backward_module, "PARTS", 3)


def check_group_norm_backward(given: Inputs, backend: str) -> None:
    """As of layer_norm, and a rounding more: the weight comes after the sum over places."""
    x, w, _, grad, groups = given
    _, stats = group_norm(x, w, None, groups, EPS, "eager")
    dx, sums = group_norm_backward(grad, x, w, stats, groups, True, True, backend)
    assert dx.stride() == x.stride()
    assert (sums.dtype, sums.shape) == (WIDE, (2, x.shape[1]))
    e, wide = exact(given.lines(x), True), given.lines(grad.double())
    g = wide * given.of_channels(w)
    expected, error = gradient_and_error(e, g, wide.shape[1] + 3, True)
    assert_rounded(given.lines(dx), x.dtype, expected, error)
    places = [t.reshape(len(x), x.shape[1], -1).mT.flatten(0, 1) for t in (wide, e.h, e.h_error)]
    assert_are_sums(sums, *places)


@each_case
@each_format
@pytest.mark.usefixtures("three_parts")
def test_gradients(
    device: torch.device, backend: str, form: torch.memory_format, case: Case
) -> None:
    check_group_norm_backward(inputs(*case, form, device), backend)


@each_long_case
@each_format
@pytest.mark.usefixtures("small_loops")
def test_gradients_of_long_lines(
    device: torch.device, backend: str, form: torch.memory_format, case: Case
) -> None:
    check_group_norm_backward(inputs(*case, form, device), backend)


@pytest.mark.parametrize("wanted", [(False, False), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("shape", [(3, 4, 2, 8), (2, 4, 9, 16)], ids=["whole", "long"])
@pytest.mark.usefixtures("small_loops")
def test_only_the_sums_that_are_wanted(
    device: torch.device, backend: str, shape: tuple[int, ...], wanted: tuple[bool, bool]
) -> None:
    """And without a weight as with ones, bit for bit."""
    x, w, _, grad, groups = inputs(shape, 2, DTYPES[0], torch.contiguous_format, device)
    _, stats = group_norm(x, None, None, groups, EPS, "eager")
    args = x, torch.ones_like(w), stats, groups
    both = group_norm_backward(grad, *args, True, True, backend)
    some = group_norm_backward(grad, x, None, stats, groups, *wanted, backend)
    assert torch.equal(some[0], both[0])
    assert torch.equal(some[1], both[1][torch.tensor(wanted, device=device)])


@each_format
def test_a_gradient_in_another_format(
    device: torch.device, backend: str, form: torch.memory_format
) -> None:
    """As in that of x, whose format its gradient has."""
    x, w, _, grad, groups = inputs((2, 6, 3, 5), 2, DTYPES[0], form, device)
    _, stats = group_norm(x, w, None, groups, EPS, "eager")
    args = x, w, stats, groups, True, True, backend
    same = group_norm_backward(grad, *args)
    other = group_norm_backward(grad.transpose(2, 3).contiguous().transpose(2, 3), *args)
    assert other[0].stride() == x.stride()
    for got, expected in zip(other, same, strict=True):
        torch.testing.assert_close(got, expected, rtol=2.0**-10, atol=2.0**-15)


def test_scaled_gradients_may_be_large(device: torch.device, backend: str) -> None:
    """64 places of 60000: their sum, 3.84e6, is beyond fp16."""
    x = inputs((2, 4, 4, 8), 2, DTYPES[0], torch.contiguous_format, device).x
    grad = torch.full_like(x, 60_000.0)
    _, stats = group_norm(x, None, None, 2, EPS, "eager")
    _, sums = group_norm_backward(grad, x, None, stats, 2, False, True, backend)
    assert torch.equal(sums[0], torch.full_like(sums[0], 64 * 60_000.0))


@whole_and_long
@each_format
@pytest.mark.usefixtures("small_loops")
def test_bytes(
    triton_device: torch.device, traffic: Traffic, form: torch.memory_format, long: bool
) -> None:
    """Long lines are read twice, the second time out of L2; mean and rstd are read once."""
    x = values_of_bytes(long, form, triton_device)
    grad = torch.randn_like(x)
    _, stats = group_norm(x, None, None, 2, EPS, "eager")
    group_norm_backward(grad, x, None, stats, 2, False, False, "triton")
    assert traffic.read == (1 + long) * 4 * x.numel() + 8 * 2 * len(x)
    assert traffic.written == 2 * x.numel()


def test_partial_sums_do_not_grow_with_the_images(
    triton_device: torch.device, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four programs share two groups' images: four rows of eight channels, written and read."""
    monkeypatch.setattr(group_norm_backward_module, "PARTS", 4)
    x, w, _, grad, _ = inputs((12, 8, 2, 4), 2, DTYPES[0], torch.contiguous_format, triton_device)
    _, stats = group_norm(x, w, None, 2, EPS, "eager")
    group_norm_backward(grad, x, w, stats, 2, True, True, "triton")
    parts, results = 2 * 4 * 8 * 4, 2 * 8 * 4
    assert traffic.written == 2 * x.numel() + parts + results
    assert traffic.read == 4 * x.numel() + 8 * 2 * len(x) + 4 * 8 * 4 + parts
