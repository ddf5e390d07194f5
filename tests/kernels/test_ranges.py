"""Largest magnitude, zeros and subnormals, counted one by one; the flag; bytes."""

import struct

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Traffic, numpy_warns, unaligned
from tritonamp.kernels.ranges import (
    AMAX,
    ELEMENTS,
    FORMAT,
    FORMATS,
    ROW,
    SUBNORMALS,
    ZEROS,
    ranges,
    ranges_traced,
)

pytestmark = numpy_warns

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SIZES = [1, 7, 8, 2047, 4095, 4096, 4097, 16 * 4096 + 9]
INF, NAN = float("inf"), float("nan")


def values(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of both signs, every fifth 0, every seventh at or below the smallest normal one."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    x[::5] = -0.0
    x[1::7] *= torch.finfo(dtype).tiny
    x[3::35] = torch.finfo(dtype).tiny  # normal, just
    return x.to(device, dtype)


def empty_row(device: torch.device) -> Tensor:
    return torch.zeros(ROW, dtype=torch.int64, device=device)


def on(device: torch.device, flag: int = 1) -> Tensor:
    return torch.full((), flag, dtype=torch.int32, device=device)


def read(row: Tensor) -> tuple[float, int, int, int, torch.dtype | None]:
    numbers = row.tolist()
    (amax,) = struct.unpack("f", struct.pack("I", numbers[AMAX]))
    return amax, *(numbers[i] for i in (ELEMENTS, ZEROS, SUBNORMALS)), FORMATS[numbers[FORMAT]]


def counted(*tensors: Tensor) -> tuple[float, int, int, int, torch.dtype | None]:
    """What the row must hold, from Python's own numbers."""
    dtype = max((t.dtype for t in tensors), key=FORMATS.index)
    numbers = [(x, torch.finfo(t.dtype).tiny) for t in tensors for x in t.flatten().tolist()]
    return (
        max(abs(x) for x, _ in numbers),
        len(numbers),
        sum(x == 0 for x, _ in numbers),
        sum(0 < abs(x) < tiny for x, tiny in numbers),
        dtype,
    )


@pytest.mark.parametrize("place", [lambda x: x, unaligned], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_counts(
    device: torch.device, backend: str, dtype: torch.dtype, n: int, place: object
) -> None:
    x, row = place(values(n, dtype, device)), empty_row(device)  # type: ignore[operator]
    ranges(x, row, on(device), backend)
    assert read(row) == counted(x)


def test_rows_add_up(device: torch.device, backend: str) -> None:
    tensors = [values(100, torch.float32, device), values(50, torch.float16, device) * 4]
    row = empty_row(device)
    for x in tensors:
        ranges(x, row, on(device), backend)
    assert read(row) == counted(*tensors)


def test_float64_is_counted_by_torch(device: torch.device) -> None:
    x, row = values(100, torch.float64, device), empty_row(device)
    ranges(x, row, on(device))
    amax, *rest = counted(x)
    assert read(row) == (torch.tensor(amax).float().item(), *rest)


@pytest.mark.parametrize("special", [INF, -INF, NAN])
def test_inf_and_nan_are_the_largest(device: torch.device, backend: str, special: float) -> None:
    for dtype in DTYPES:
        x, row = values(5000, dtype, device), empty_row(device)
        x[4321] = special
        ranges(x, row, on(device), backend)
        amax = read(row)[0]
        assert amax == INF if special == special else amax != amax


def test_of_every_layout_each_element_counts_once(device: torch.device, backend: str) -> None:
    x = values(600, torch.float16, device)
    layouts = [
        x.view(20, 30).t(),
        x.view(2, 3, 10, 10).contiguous(memory_format=torch.channels_last),
        x.view(20, 30)[::2, 1:],
        x.view(20, 30)[:, :1].expand(20, 30),
        x[0],
        x[:0],
    ]
    shown = [*layouts[:3], x.view(20, 30)[:, 0], x[0]]
    for laid, elements in zip(layouts, shown, strict=False):
        row = empty_row(device)
        ranges(laid, row, on(device), backend)
        assert read(row) == counted(elements)
    row = empty_row(device)
    ranges(layouts[-1], row, on(device), backend)
    assert not row.any()


def test_off_leaves_the_row(device: torch.device, backend: str) -> None:
    row = torch.arange(ROW, device=device)
    ranges(values(5000, torch.float16, device), row, on(device, 0), backend)
    assert row.tolist() == [*range(ROW)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_bytes(traffic: Traffic, device: torch.device, dtype: torch.dtype) -> None:
    """Each element once, a row for each program; where it says so nothing but the flag."""
    x, row = torch.ones(1 << 18, device=device, dtype=dtype), empty_row(device)
    ranges(x, row, on(device), "triton")
    programs = x.numel() * dtype.itemsize // (16 * 4096 * 2)
    assert traffic.read == x.numel() * dtype.itemsize + 4 * programs
    assert traffic.written == 8 * ROW * programs
    traffic.read = traffic.written = 0
    ranges(x, row, on(device, 0), "triton")
    assert (traffic.read, traffic.written) == (4 * programs, 0)


def test_it_is_one_operation_of_a_graph() -> None:
    device = torch.device("cpu")
    x, row = values(100, torch.float16, device), empty_row(device)
    torch.library.opcheck(ranges_traced, (x, row, on(device), "eager"))
    compiled = torch.compile(lambda: ranges_traced(x, row, on(device), "eager"), backend="eager")
    row.zero_()
    compiled()
    assert read(row) == counted(x)
