"""Packed masters: their errors, and the bits of kernel and twin."""

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import numpy_warns
from tests.kernels.update_rows import BF16, HALF, ROWS, WIDE
from tests.kernels.updates import Updates, bits, same_or_nan
from tritonamp.kernels._packed_masters import join_master, split_master
from tritonamp.kernels.sgd import SGDRule

pytestmark = numpy_warns

EDGES = [-0x8000, -0x7FFF, -0x4000, -1, 0, 1, 0x3FFC, 0x3FFF, 0x4000, 0x7FFF]  # of 16 bits, signed


def patterns(dtype: torch.dtype) -> Tensor:
    """Return all values of a half dtype."""
    return torch.arange(-0x8000, 0x8000, dtype=torch.int16).view(dtype)


def upper_and_lower_bits() -> Tensor:
    """Return FP32 values of all 65536 upper halves, with edges and random bits as lower halves."""
    generator = torch.Generator().manual_seed(0)
    lower = torch.cat(
        [
            torch.tensor(EDGES).expand(0x10000, -1),
            torch.randint(-0x8000, 0x8000, (0x10000, 4), generator=generator),
        ],
        1,
    )
    upper = torch.arange(-0x8000, 0x8000)[:, None] << 16
    return (upper | (lower & 0xFFFF)).to(torch.int32).view(WIDE).flatten()


def test_a_bfloat16_master_comes_back_exactly() -> None:
    """All FP32 values but those beyond the largest bfloat16 number."""
    x = upper_and_lower_bits()
    upper, lower = split_master(x, BF16)
    back = join_master(upper, lower)
    finite = upper.isfinite()
    assert finite.sum() > 0.99 * len(x)
    assert torch.equal(bits(back)[finite], bits(x)[finite])
    assert torch.equal(bits(back)[~finite], bits(upper.float())[~finite])
    assert not lower[~finite].any()
    assert torch.equal(upper.isnan(), x.isnan())
    is_tie = (bits(x) & 0xFFFF) == 0x8000
    nearest = torch.where(is_tie, x + (x - (bits(x) & -0x10000).view(WIDE)), x).bfloat16()
    assert same_or_nan(upper.float()[finite], nearest.float()[finite])


def test_a_float16_master_comes_back() -> None:
    """Exactly from 2^-14 to 65504, below that to half of a unit of 2^-39, which is found with one
    rounding to FP32. The sign of 0 is lost.
    """
    x = upper_and_lower_bits()
    x = torch.cat([x, torch.rand(1 << 16, generator=torch.Generator().manual_seed(1)) * 2**-13])
    upper, lower = split_master(x, HALF)
    assert same_or_nan(upper.float(), x.half().float())
    back = join_master(upper, lower)
    exact = (x.abs() >= 2**-14) & (x.abs() <= 65504)
    tiny = x.abs() < 2**-14
    assert min(exact.sum(), tiny.sum()) > 1 << 16
    assert torch.equal(bits(back)[exact], bits(x)[exact])
    assert ((back.double() - x.double()).abs()[tiny] <= 2.0**-40 * (1 + 2.0**-24)).all()
    assert (lower[tiny] != 0).sum() > 1 << 14
    beyond = x.abs() > 65520
    assert torch.equal(back[beyond], x[beyond].half().float())
    assert not lower[(x == 0) | beyond | x.isnan()].any()
    assert torch.equal(back.isnan(), x.isnan())


@pytest.mark.parametrize("r", EDGES)
def test_a_written_bfloat16_value_keeps_the_remainder(r: int) -> None:
    """inf and NaN have none, and zeros none that would change their sign."""
    upper = patterns(BF16)
    lower = torch.full(upper.shape, r, dtype=torch.int16)
    x, wide = join_master(upper, lower), upper.float()
    alone = ~upper.isfinite() | ((upper == 0) & (lower < 0))
    assert same_or_nan(x[alone], wide[alone])
    again = split_master(x[~alone], BF16)
    assert torch.equal(bits(again[0].float()), bits(wide[~alone]))
    assert torch.equal(again[1], lower[~alone])


@pytest.mark.parametrize("r", [r for r in EDGES if abs(r) <= 0x4000])
def test_a_written_float16_value_keeps_the_remainder(r: int) -> None:
    """Remainders are half an ulp at most, like those of ``split_master``. Half the ulp of a power
    of two reaches its neighbour below. An FP32 ulp is four units, so some remainders are rounded.
    """
    upper = patterns(HALF)
    x, wide = join_master(upper, torch.full(upper.shape, r, dtype=torch.int16)), upper.float()
    assert same_or_nan(x[~upper.isfinite()], wide[~upper.isfinite()])
    finite = upper.isfinite()
    ulp = (((bits(wide) >> 23) & 0xFF).clamp_min(113).double() - 127 - 10).exp2()
    assert ((x.double() - wide.double()).abs() <= ulp / 2)[finite].all()
    assert ((x - wide).sign() * r >= 0)[finite].all()
    is_power = bits(wide) & 0x7FFFFF == 0
    inside = finite & ~(is_power & (wide * r < 0)) & (abs(r) < 0x3FFE)
    again = split_master(x[inside], HALF)
    assert torch.equal(again[0], upper[inside])
    assert torch.equal(join_master(*again), x[inside])


@pytest.mark.parametrize("form", ["packed", "packed bfloat16"])
def test_masters_are_the_twins(triton_device: torch.device, form: str) -> None:
    """A step moves one master to any FP32 value, and keeps another of any half and remainder."""
    x, rule = upper_and_lower_bits()[:: 13 * 8 + 1], SGDRule(1.0, 0.0, 0.0, 0.0, False, False)
    kernel = Updates(ROWS["sgd"], triton_device, form, [rule], [x.shape, x.shape], grad=WIDE)
    (zeros, halves, _), remainders = kernel.lists["params"], kernel.lists["remainders"]
    zeros.zero_(), remainders[0].zero_()
    kernel.lists["grads"][0].copy_(-x)
    halves.copy_(patterns(halves.dtype)[:: 0x10000 // len(x)][: len(x)])
    remainders[1].copy_(torch.tensor(EDGES).repeat(len(remainders[1]))[: len(remainders[1])])
    kernel.lists["grads"][1].zero_()
    twin = kernel.clone()
    kernel.step("triton")
    twin.step("eager")
    for a, b in zip(kernel.lists["params"], twin.lists["params"], strict=True):
        assert same_or_nan(a.float(), b.float())
    assert all(map(torch.equal, kernel.lists["remainders"], twin.lists["remainders"]))
    assert same_or_nan(kernel.masters()[0].cpu(), join_master(*split_master(x, halves.dtype)))
