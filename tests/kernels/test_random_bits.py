"""Random bits of steps, and stochastic rounding. ``test_codes.py`` has the bits of the kernel."""

import math

import pytest
import torch

from tests.kernels.update_rows import INF, NAN, WIDE
from tests.kernels.updates import bits, same_or_nan
from tritonamp.kernels._random_bits import random_bits_twin, rounded_twin


def test_random_bits_are_even() -> None:
    """Each bit, each pair of bits, and 16 bins, within 6 deviations: along elements and along
    tensors, for both moments.
    """
    n, step = 1 << 14, torch.tensor(3.0)
    of_tensors = [random_bits_twin(torch.empty(16), step, k) for k in range(n // 16)]
    along = {
        "elements": random_bits_twin(torch.empty(n), step, 5),
        "tensors": tuple(map(torch.cat, zip(*of_tensors, strict=True))),
    }
    for name, both in along.items():
        for h in both:
            assert ((h >= 0) & (h < 1 << 32)).all()
            counts = torch.bincount(h >> 28, minlength=16)
            deviation = (n / 16 * (15 / 16)) ** 0.5
            assert ((counts - n / 16).abs() <= 6 * deviation).all(), name
        rows = [(h >> k) & 1 for h in both for k in range(32)]
        signs = torch.stack(rows).double() * 2 - 1
        assert (signs.mean(1).abs() <= 6 / n**0.5).all(), name
        products = (signs @ signs.t() / n).fill_diagonal_(0)
        assert (products.abs() <= 6.5 / n**0.5).all(), name


@pytest.mark.parametrize("first", [1, 1000, 2**24 - 600])
def test_bits_of_successive_steps_spread_evenly(first: int) -> None:
    """Of n steps, n p fall below any p, with 2 + log2(n) more or fewer at most, because each step
    adds the golden ratio. Independent bits would differ by a multiple of sqrt(n p).
    """
    steps = [float(first + k) for k in range(512)]
    rows = [random_bits_twin(torch.empty(64), torch.tensor(s), 1) for s in steps]
    for bits_of_moment in zip(*rows, strict=True):
        u = torch.stack(bits_of_moment).double() / 2**32
        for n in (8, 64, 512):
            for p in (0.01, 0.25, 0.5, 0.9):
                assert (((u[:n] < p).sum(0) - n * p).abs() <= 2 + math.log2(n)).all()


@pytest.mark.parametrize(("dropped", "noise"), [(20, 0.18), (16, 0.034)])
def test_noise_of_a_second_moment(dropped: int, noise: float) -> None:
    """Gradients of variance 1, beta2 0.999, 3,000 steps: independent bits leave 0.20 and 0.043."""
    generator = torch.Generator().manual_seed(0)
    exact = v = torch.ones(4096)
    like, gradients = torch.empty(4096), torch.empty(4096)
    ratios = []
    for step in range(1, 3001):
        square = gradients.normal_(generator=generator).square()
        exact = exact * 0.999 + square * 0.001
        _, bits_of_v = random_bits_twin(like, torch.tensor(float(step)), 0)
        v = rounded_twin(v * 0.999 + square * 0.001, bits_of_v, dropped)
        if step > 2000 and step % 50 == 0:
            ratios.append(v / exact)
    ratio = torch.stack(ratios)
    assert ratio.std(1).mean() <= noise
    assert abs(ratio.mean() - 1) <= 0.03


def test_stochastic_rounding_to_bfloat16() -> None:
    """A value becomes one of its two neighbours, and itself in the mean. NaN, inf and bfloat16
    values stay.
    """
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    many = x.expand(4096, -1).flatten()
    y = rounded_twin(many, torch.randint(0, 1 << 32, many.shape), 16).view(4096, -1)
    assert torch.equal(y, y.bfloat16().float())
    lower = (bits(x) & -0x10000).view(WIDE)
    unit = ((bits(lower) & 0x7F800000) >> 23).double().sub(127 + 7).exp2()
    assert ((y.double() - lower.double()).abs() <= unit).all()
    assert (((y.double().mean(0) - x.double()).abs()) <= 6 * unit / 2 / 64).all()
    stays = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.5, 2.0**-126])
    for random in (0, 0xFFFF, 0xFFFFFFFF):
        kept = rounded_twin(stays, torch.full((8,), random), 16)
        assert same_or_nan(kept, stays)
