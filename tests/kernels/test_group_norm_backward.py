"""Gradients of group_norm in both memory formats, kernels and twins against FP64."""

import pytest
import torch

from tests.kernels.conftest import Traffic, U, assert_within, numpy_warns, ulp
from tests.kernels.test_group_norm import (
    Inputs,
    each_case,
    each_format,
    each_long_case,
    inputs,
)
from tests.kernels.test_norm import DTYPES, EPS, WIDE, Shrink, exact
from tritonamp.kernels import group_norm_backward as group_norm_backward_module
from tritonamp.kernels.group_norm import group_norm
from tritonamp.kernels.group_norm_backward import group_norm_backward

pytestmark = numpy_warns


def check_backward(given: Inputs, backend: str) -> None:
    """As of layer_norm, whose bounds are explained there: sums over n elements of a line carry
    n + 3 roundings, and one of a product more, with the weight after the sum over places.
    """
    x, w, _, grad, groups = given
    _, stats = group_norm(x, w, None, groups, EPS, "eager")
    dx, sums = group_norm_backward(grad, x, w, stats, groups, True, True, backend)
    assert (dx.dtype, dx.stride()) == (x.dtype, x.stride())
    assert (sums.dtype, sums.shape) == (WIDE, (2, x.shape[1]))
    e, wide = exact(given.lines(x), True), given.lines(grad.double())
    g, n = wide * given.of_channels(w), wide.shape[1]
    along, level = (g * e.h).mean(1, keepdim=True), g.mean(1, keepdim=True)
    expected = e.rstd * (g - level - e.h * along)
    of_along = (g * e.h_error).abs().mean(1, keepdim=True)
    of_along += (n + 4) * U * (g * e.h).abs().mean(1, keepdim=True)
    of_level = (n + 3) * U * g.abs().mean(1, keepdim=True)
    inner = of_level + e.h.abs() * of_along + e.h_error * (along.abs() + of_along)
    size = g.abs() + level.abs() + (e.h * along).abs()
    error = e.rstd * (inner + size * (e.rstd_error + 5 * U))
    assert_within(given.lines(dx), expected, ulp(expected, x.dtype) / 2 + error)
    channels = [t.reshape(len(x), x.shape[1], -1) for t in (wide, e.h, e.h_error)]
    grads, h, h_error = (t.transpose(0, 1).flatten(1) for t in channels)
    added = h.shape[1] + 2
    dw_error = (grads * h_error).abs().sum(1) + added * U * (grads * h).abs().sum(1)
    assert_within(sums[0], (grads * h).sum(1), dw_error)
    assert_within(sums[1], grads.sum(1), added * U * grads.abs().sum(1))


@each_case
@each_format
def test_gradients(
    device: torch.device,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    form: torch.memory_format,
    shape: tuple[int, ...],
    groups: int,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    monkeypatch.setattr(group_norm_backward_module, "PARTS", 3)
    check_backward(inputs(shape, groups, dtypes, form, device), backend)


@each_long_case
@each_format
def test_gradients_of_long_lines(
    device: torch.device,
    backend: str,
    small_tiles: Shrink,
    form: torch.memory_format,
    shape: tuple[int, ...],
    groups: int,
) -> None:
    small_tiles(0)
    check_backward(inputs(shape, groups, DTYPES[0], form, device), backend)


@pytest.mark.parametrize("wanted", [(False, False), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("shape", [(3, 4, 2, 8), (2, 4, 9, 16)], ids=["whole", "long"])
def test_only_the_sums_that_are_wanted(
    device: torch.device,
    backend: str,
    small_tiles: Shrink,
    shape: tuple[int, ...],
    wanted: tuple[bool, bool],
) -> None:
    """And without a weight as with ones, bit for bit."""
    small_tiles(0)
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


@pytest.mark.parametrize("long", [False, True], ids=["whole", "long"])
@each_format
def test_bytes(
    triton_device: torch.device,
    small_tiles: Shrink,
    traffic: Traffic,
    form: torch.memory_format,
    long: bool,
) -> None:
    """Long lines are read twice, the second time out of L2; mean and rstd are read once."""
    small_tiles(0)
    shape = (2, 6, 5, 9) if long else (2, 6, 3, 5)
    x, _, _, grad, _ = inputs(shape, 2, DTYPES[0], form, triton_device)
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
