"""FP32 to half, exhaustively, and back."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import numpy_warns, unaligned
from tritonamp.kernels import _device_tables
from tritonamp.kernels._multi_tensor import Memory, TensorLists
from tritonamp.kernels.cast import cast, fp32_value
from tritonamp.kernels.device import INTERPRETED

pytestmark = numpy_warns

HALVES = [torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")


def from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return bits.to(torch.int16).view(dtype)


def overflow(lists: TensorLists, device: torch.device) -> list[int]:
    return lists.kept("overflow", (lists.size,), torch.int32, device).tolist()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_every_rounding_decision(
    device: torch.device, backend: str, half: torch.dtype, sign: int
) -> None:
    """Each half value, the middle to the next one (a tie goes to the even bits), and both FP32
    neighbours of it.
    """
    end = int(torch.tensor(INF, dtype=half).view(torch.int16))
    bits = torch.arange(end)
    value = from_bits(bits, half).double()
    above = torch.cat(
        [value[1:], 2 * value[-1:] - value[-2:-1]]
    )  # beyond the largest: where the next would be
    middle = ((value + above) / 2).float()
    assert torch.equal(middle.double(), (value + above) / 2), "FP32 holds every tie"
    cases = [
        (value.float(), bits),
        (middle, bits + bits % 2),
        (torch.nextafter(middle, torch.tensor(0.0)), bits),
        (torch.nextafter(middle, torch.tensor(INF)), bits + 1),
    ]
    sources = [(sign * source).to(device) for source, _ in cases]
    copies = [torch.empty_like(source, dtype=half) for source in sources]
    lists = TensorLists(params=sources, copies=copies)
    cast(lists, backend)
    for copy, (_, expected) in zip(copies, cases, strict=True):
        assert torch.equal(copy.cpu().abs().view(torch.int16).long(), expected)
        assert torch.equal(copy.cpu().signbit(), torch.full(copy.shape, sign < 0))
    if (
        backend == "eager" or half is not torch.bfloat16 or not INTERPRETED
    ):  # FP32 stands in for bfloat16 there
        assert overflow(lists, device) == [
            0,
            1,
            0,
            1,
        ]  # the tie above the largest, whose bits are odd, and beyond


SHAPES = [(0,), (), (1,), (1023,), (1024,), (1025,), (2047,), (2048,), (4107,), (5, 7), (3, 0)]


@pytest.mark.parametrize("place", [lambda x: x, unaligned], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("programs", [_device_tables.PROGRAMS, 1])
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_shapes_and_special_values(
    device: torch.device,
    backend: str,
    half: torch.dtype,
    programs: int,
    place: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_device_tables, "PROGRAMS", programs)
    sources = [torch.randn(shape, device=device) for shape in SHAPES]
    special = [INF, -INF, NAN, -0.0, 2.0**-149, 2.0**-24, -(2.0**-25), 2.0**-14]
    sources += [torch.tensor(special, device=device), torch.randn(6, 8, device=device)[::2, 1:]]
    sources += [
        torch.randn(9, 5, device=device).t(),
        torch.randn(2, 3, 4, device=device).permute(1, 2, 0),
    ]
    copies: list[Tensor] = [place(torch.full_like(source, 9.0, dtype=half)) for source in sources]
    copies[SHAPES.index((5, 7))] = torch.full((7, 5), 9.0, dtype=half, device=device).t()
    kept, versions = [source.clone() for source in sources], [copy._version for copy in copies]
    lists = TensorLists(params=sources, copies=copies)
    cast(lists, backend)
    for source, copy, before, version in zip(sources, copies, kept, versions, strict=True):
        torch.testing.assert_close(copy, source.to(half), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(copy.signbit() & ~copy.isnan(), source.signbit() & ~source.isnan())
        torch.testing.assert_close(source, before, rtol=0, atol=0, equal_nan=True)
        assert copy._version > version
    if place is unaligned:
        memory = torch.as_strided(copies[8], (4107 + 16,), (1,), 0)
        assert memory[0] == 7 and (memory[4108:] == 7).all(), "written out of bounds"
    assert not any(overflow(lists, device))
    cast(TensorLists(params=[], copies=[]), backend)


def test_one_call_takes_several_dtypes(device: torch.device, backend: str) -> None:
    source = torch.full((3,), 1 + 2.0**-9, device=device)
    copies = [
        torch.empty(3, dtype=dtype, device=device)
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
    ]
    cast(TensorLists(params=[source] * 3, copies=copies), backend)
    assert [copy[0].item() for copy in copies] == [1 + 2.0**-9, 1.0, 1 + 2.0**-9]


def test_parameters_of_fp64_and_those_without_a_copy(device: torch.device, backend: str) -> None:
    params = [
        torch.full((3,), 0.1, dtype=dtype, device=device)
        for dtype in (torch.float64, torch.float32)
    ]
    copies = [torch.zeros(3, dtype=torch.float16, device=device), params[1]]
    cast(TensorLists(params=params, copies=copies), backend)
    assert copies[0].tolist() == params[0].half().tolist()
    assert params[1].tolist() == torch.full((3,), 0.1).tolist()
    cast(TensorLists(params=params[1:], copies=params[1:]), backend)
    assert params[1].tolist() == torch.full((3,), 0.1).tolist()


@pytest.mark.parametrize("n", [1, 7, 1023, 2049, 4107])
def test_what_is_beyond_the_range_is_noted_by_number(
    device: torch.device, backend: str, n: int
) -> None:
    """At either end; inf and NaN of the parameter itself are no overflow. The note stays until
    it is cleared.
    """
    params = [torch.ones(n, device=device) for _ in range(5)]
    params[0][0], params[1][-1], params[2][0], params[3][-1] = 65520.0, -1e38, INF, NAN
    copies = [torch.zeros(n, dtype=torch.float16, device=device) for _ in params]
    lists = TensorLists(numbers=[0, 2, 3, 4, 6], size=8, params=params, copies=copies)
    for _ in range(2):
        cast(lists, backend)
        assert overflow(lists, device) == [1, 0, 1, 0, 0, 0, 0, 0]
        for param in params:
            param.fill_(1)


def test_each_call_takes_the_tensors_it_is_given(device: torch.device, backend: str) -> None:
    memory = Memory()
    for value in (1.0, 2.0):
        for make in (torch.ones, lambda n, device: unaligned(torch.ones(n, device=device))):
            params = [make(n, device=device) * value for n in (5, 1030)]
            copies = [p.half() * 0 for p in params]
            cast(TensorLists(memory=memory, params=params, copies=copies), backend)
            assert all(torch.equal(c, p.half()) for c, p in zip(copies, params, strict=True))


@pytest.mark.parametrize("place", [lambda x: x, unaligned], ids=["aligned", "unaligned"])
def test_six_bytes_for_each_parameter(
    triton_device: torch.device, traffic: Any, place: Any
) -> None:
    """Each program reads its row (4 bytes) and of it number, size, first chunk and pointers (8
    each).
    """
    params = [place(torch.randn(n, device=triton_device)) for n in (5, 2047, 4096, 4107)]
    copies = [torch.zeros(len(p), dtype=torch.float16, device=triton_device) for p in params]
    cast(TensorLists(params=params, copies=copies), "triton")
    numel = sum(map(len, params))
    assert traffic.read == 4 * numel + 5 * (4 + 5 * 8)
    assert traffic.written == 2 * numel


@pytest.mark.parametrize("half", HALVES)
def test_the_fp32_value_counts_while_it_rounds_to_the_half(
    device: torch.device, half: torch.dtype
) -> None:
    third = torch.tensor(1 / 3)
    cases = [  # half, precise, expected
        (third.to(half).item(), 1 / 3, third.item()),
        (0.5, 1 / 3, 0.5),
        (INF, 1e39, INF),
        (INF, 1.0, INF),
        (1.0, INF, 1.0),
        (NAN, NAN, NAN),
        (NAN, 1.0, NAN),
        (1.0, NAN, 1.0),
        (0.0, 1e-42, 1e-42),
        (-0.0, 1e-42, -0.0),
        (2.0, 2.0, 2.0),
    ]
    halves, precise, expected = (
        torch.tensor(column, device=device) for column in zip(*cases, strict=True)
    )
    result = fp32_value(halves.to(half), precise)
    assert result.dtype is torch.float32
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_the_fp32_value_is_no_part_of_a_graph(device: torch.device) -> None:
    precise = torch.ones(2, device=device, requires_grad=True)
    assert not fp32_value(torch.ones(2, device=device, dtype=torch.float16), precise).requires_grad
