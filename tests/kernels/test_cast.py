"""FP32 to half, exhaustively, and back."""

import pytest
import torch
from torch import Tensor

from tritonamp.kernels.cast import cast, fp32_value

HALVES = [torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")


def from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return bits.to(torch.int16).view(dtype)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("half", HALVES)
def test_every_rounding_decision(device: torch.device, half: torch.dtype, sign: int) -> None:
    """Each half value, the middle to the next one (a tie goes to the even bits), and both FP32 neighbours of it."""
    end = int(torch.tensor(INF, dtype=half).view(torch.int16))
    bits = torch.arange(end)
    value = from_bits(bits, half).double()
    above = torch.cat([value[1:], 2 * value[-1:] - value[-2:-1]])  # beyond the largest: where the next would be
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
    cast(sources, copies)
    for copy, (_, expected) in zip(copies, cases, strict=True):
        assert torch.equal(copy.cpu().abs().view(torch.int16).long(), expected)
        assert torch.equal(copy.cpu().signbit(), torch.full(copy.shape, sign < 0))


@pytest.mark.parametrize("half", HALVES)
def test_shapes_and_special_values(device: torch.device, half: torch.dtype) -> None:
    sources = [
        torch.randn(shape, device=device) for shape in [(0,), (), (1,), (1023,), (1024,), (1025,), (5, 7), (3, 0)]
    ]
    sources += [torch.tensor([INF, -INF, NAN, 1e38, -0.0], device=device), torch.randn(6, 8, device=device)[::2, 1:]]
    copies: list[Tensor] = [torch.full_like(source, 9.0, dtype=half) for source in sources]
    copies[6] = torch.full((7, 5), 9.0, dtype=half, device=device).t()
    cast(sources, copies)
    for source, copy in zip(sources, copies, strict=True):
        torch.testing.assert_close(copy, source.to(half), rtol=0, atol=0, equal_nan=True)
    cast([], [])


def test_one_call_takes_several_dtypes(device: torch.device) -> None:
    source = torch.full((3,), 1 + 2.0**-9, device=device)
    copies = [torch.empty(3, dtype=dtype, device=device) for dtype in (torch.float16, torch.bfloat16, torch.float32)]
    cast([source] * 3, copies)
    assert [copy[0].item() for copy in copies] == [1 + 2.0**-9, 1.0, 1 + 2.0**-9]


def test_every_source_has_a_copy() -> None:
    with pytest.raises(ValueError, match=r"^got 2 sources for 1 copies$"):
        cast([torch.zeros(1)] * 2, [torch.zeros(1)])


@pytest.mark.parametrize("half", HALVES)
def test_the_fp32_value_counts_while_it_rounds_to_the_half(device: torch.device, half: torch.dtype) -> None:
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
        (2.0, 2.0, 2.0),
    ]
    halves, precise, expected = (torch.tensor(column, device=device) for column in zip(*cases, strict=True))
    result = fp32_value(halves.to(half), precise)
    assert result.dtype is torch.float32
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_the_fp32_value_is_no_part_of_a_graph(device: torch.device) -> None:
    precise = torch.ones(2, device=device, requires_grad=True)
    assert not fp32_value(torch.ones(2, device=device, dtype=torch.float16), precise).requires_grad
