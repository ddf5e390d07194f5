"""group_norm in both memory formats, kernels and twins against FP64."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Traffic, U, assert_rounded, numpy_warns
from tests.kernels.test_norm import DTYPES, EPS, HALF, WIDE, assert_are_stats, exact
from tritonamp.kernels._group_norms import walk
from tritonamp.kernels.group_norm import group_norm

pytestmark = numpy_warns

LAST = torch.channels_last
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "one place": ((3, 12, 1, 1), 3),
    "neither is a power of two": ((2, 6, 3, 5), 2),
    "vectors": ((2, 32, 4, 4), 4),
    "groups that fill no tile": ((2, 24, 4, 2), 3),
    "groups of one channel": ((3, 5, 2, 8), 5),
    "one group": ((2, 7, 3, 3), 1),
    "many images": ((11, 8, 2, 4), 2),
}
Case = tuple[tuple[int, ...], int, tuple[torch.dtype, torch.dtype]]
CASES: dict[str, Case] = {name: (*case, DTYPES[0]) for name, case in SHAPES.items()} | {
    f"{dtypes[0]} by {dtypes[1]}": ((2, 6, 3, 5), 2, dtypes) for dtypes in DTYPES[1:]
}
LONG: dict[str, tuple[tuple[int, ...], int]] = {
    "long": ((2, 6, 5, 9), 2),
    "long, many places": ((1, 4, 9, 16), 2),
    "long, no masks": ((2, 32, 4, 8), 2),
    "long, many channels": ((2, 264, 3, 1), 2),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
each_long_case = pytest.mark.parametrize(
    "case", [(*case, DTYPES[0]) for case in LONG.values()], ids=LONG
)
each_format = pytest.mark.parametrize("form", [torch.contiguous_format, LAST], ids=str)


class Inputs(NamedTuple):
    """Attributes:
    x: groups far from 0, of different spread.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor
    grad: Tensor
    groups: int

    def lines(self, x: Tensor) -> Tensor:
        """Return ``x`` as groups of images, [N * groups, elements]."""
        return x.reshape(len(x) * self.groups, -1)

    def of_channels(self, w: Tensor) -> Tensor:
        """Return a weight in FP64 for each element, in lines."""
        return self.lines(w.double().view(1, -1, 1, 1).expand_as(self.x))


def inputs(
    shape: tuple[int, ...],
    groups: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    form: torch.memory_format,
    device: torch.device,
) -> Inputs:
    """``dtypes``: dtype of x and its gradient, dtype of weight and bias. Weights may be guarded."""
    dtype, of_weights = dtypes
    spread = torch.tensor([3.0, 100.0, 0.1]).repeat(shape[0] * groups)[: shape[0] * groups]
    x = torch.randn(len(spread), *shape[1:]).view(-1)[: torch.Size(shape).numel()]
    x = (x.view(len(spread), -1) * spread[:, None] + 2 * spread.mean()).view(shape)
    weights = 1 + torch.rand(2, shape[1])
    tensors = [x.to(dtype), torch.randn(shape).to(dtype)]
    x, grad = (t.to(device).contiguous(memory_format=form) for t in tensors)
    w, b = (torch.empty_like(t, device=device).copy_(t) for t in weights.to(of_weights))
    return Inputs(x, w, b, grad, groups)


def values_of_bytes(long: bool, form: torch.memory_format, device: torch.device) -> Tensor:
    """Two groups of 45 elements each, or of 135, which are more than a tile has."""
    shape = (2, 6, 5, 9) if long else (5, 6, 3, 5)
    return inputs(shape, 2, DTYPES[0], form, device).x


whole_and_long = pytest.mark.parametrize("long", [False, True], ids=["whole", "long"])


def check_group_norm(given: Inputs, backend: str) -> None:
    x, w, b, _, groups = given
    y, stats = group_norm(x, w, b, groups, EPS, backend)
    assert y.stride() == x.stride()
    assert (stats.dtype, stats.shape) == (WIDE, (2, len(x) * groups))
    e, wide_w, wide_b = exact(given.lines(x), True), given.of_channels(w), given.of_channels(b)
    expected = e.h * wide_w + wide_b
    error = e.h_error * wide_w + 2 * U * ((e.h * wide_w).abs() + wide_b)
    assert_rounded(given.lines(y), x.dtype, expected, error)
    assert_are_stats(stats, e)


@each_case
@each_format
def test_results(device: torch.device, backend: str, form: torch.memory_format, case: Case) -> None:
    check_group_norm(inputs(*case, form, device), backend)


@each_long_case
@each_format
@pytest.mark.usefixtures("small_loops")
def test_results_of_long_lines(
    device: torch.device, backend: str, form: torch.memory_format, case: Case
) -> None:
    check_group_norm(inputs(*case, form, device), backend)


@each_format
def test_without_weights(device: torch.device, backend: str, form: torch.memory_format) -> None:
    """As with ones and zeros, bit for bit."""
    x, w, b, _, groups = inputs((2, 12, 3, 4), 3, DTYPES[0], form, device)
    bare, _ = group_norm(x, None, None, groups, EPS, backend)
    ones, zeros = torch.ones_like(w), torch.zeros_like(b)
    assert torch.equal(bare, group_norm(x, ones, zeros, groups, EPS, backend)[0])


@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 5), (2, 6, 2, 3, 2)], ids=str)
def test_any_number_of_dimensions(
    device: torch.device, backend: str, shape: tuple[int, ...]
) -> None:
    """As of one dimension of places, bit for bit; three that lie channels last stay so."""
    x = torch.randn(shape, device=device).to(HALF)
    y, stats = group_norm(x, None, None, 2, EPS, backend)
    flat = group_norm(x.reshape(2, 6, -1), None, None, 2, EPS, backend)
    assert torch.equal(y.reshape(2, 6, -1), flat[0]) and torch.equal(stats, flat[1])
    if len(shape) == 5:
        last = x.contiguous(memory_format=torch.channels_last_3d)
        assert group_norm(last, None, None, 2, EPS, backend)[0].stride() == last.stride()


@whole_and_long
@each_format
@pytest.mark.usefixtures("small_loops")
def test_bytes(
    triton_device: torch.device, traffic: Traffic, form: torch.memory_format, long: bool
) -> None:
    """A long line is read twice, the second time out of L2; mean and rstd are written once."""
    x = values_of_bytes(long, form, triton_device)
    group_norm(x, None, None, 2, EPS, "triton")
    assert traffic.read == (1 + long) * 2 * x.numel()
    assert traffic.written == 2 * x.numel() + 8 * 2 * len(x)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((2, 48, 1 << 28), 3),
        ((1, 1 << 22, 16, 64), 8),
        ((9, 10, 64), 10),
        ((8, 4096, 2), 1),
        ((3, 5, 7), 5),
        ((9, 64, 1), 4),
    ],
    ids=str,
)
def test_tiles(shape: tuple[int, ...], groups: int, last: bool) -> None:
    """Tiles are no larger than they may be, cover what they say, and offsets fit 32 bits. Where
    there is one place, channels are neighbours.
    """
    t = walk(shape, groups, last, 2, 16, 16384)
    assert t.layout[0] == (last or shape[2:] == (1,))
    last, align, vec, places, rows, block = t.layout
    _, depth, spatial, n = t.sizes
    channels = block // places
    distance = depth * groups if last else spatial
    assert (places if last else channels) * distance <= 1 << 31
    assert rows * block <= 16384 and t.blocks * rows >= groups
    assert not t.whole or (channels >= depth and places >= spatial)
    full = depth % channels == 0 and spatial % places == 0 and groups % rows == 0
    assert (align == block) == full
    assert (depth if last else spatial) % vec == 0 and n == depth * spatial
