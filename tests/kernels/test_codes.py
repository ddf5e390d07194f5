"""Moments of one byte: their errors, and the bits of kernel and twin."""

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import numpy_warns
from tests.kernels.update_rows import ADAM, INF, NAN, ROWS, WIDE
from tests.kernels.updates import Updates, bits, same_or_nan
from tritonamp.kernels._codes import SIGNED, UNSIGNED, decode, encode
from tritonamp.kernels._memory_order import BLOCK

pytestmark = numpy_warns

each_kind = pytest.mark.parametrize("kind", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])


def random_bits(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 1 << 32, (n,), generator=torch.Generator().manual_seed(seed))


def exponent_of(x: Tensor) -> Tensor:
    return (bits(x) >> 23) & 0xFF


def spread(kind: int, blocks: int, seed: int = 0) -> Tensor:
    """Return values with magnitudes down to 2^-40 of the block's largest, and zeros."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randint(-30, 30, (blocks, 1), generator=generator).float().exp2()
    down = torch.rand((blocks, BLOCK), generator=generator) * -40
    x = down.exp2() * scale * (torch.rand((blocks, BLOCK), generator=generator) > 0.05)
    if kind == SIGNED:
        x *= torch.randn((blocks, BLOCK), generator=generator).sign()
    return x.flatten()


@each_kind
@pytest.mark.parametrize("rounds", ["down", "stochastically"])
def test_a_code_is_off_by_less_than_a_unit(kind: int, rounds: str) -> None:
    """3 bits of mantissa. Below 2^(E - KIND + 1), where E is the block's exponent and KIND - 1 is
    14 or 30, units of 2^(E - KIND - 2). E is that of the largest value, or, where it was rounded up
    to a power of two, the next.
    """
    x = spread(kind, 2000)
    random = random_bits(len(x)) if rounds == "stochastically" else None
    codes, exponents = encode(x, random, kind)
    y = decode(codes, exponents, kind)
    largest = exponent_of(x.view(-1, BLOCK).abs().amax(1))
    assert ((exponents.int() - largest).unique().tolist()) in ([0], [0, 1])
    e = exponents.repeat_interleave(BLOCK).double() - 127
    least = (e - kind + 1).exp2()
    bound = torch.where(x.abs() >= least, x.abs().double() / 8, least / 8)
    error = (y.double() - x.double()).abs()
    assert (error[x != 0] < bound[x != 0]).all()
    assert (error > bound / 2).any(), "a bound that is near"
    assert (y[x == 0] == 0).all()
    assert (y * x >= 0).all()
    if kind == UNSIGNED:
        assert torch.equal(y > 0, x > 0)
    if random is None:
        assert (y.abs() <= x.abs())[x.abs() >= least / 8].all()


@pytest.mark.parametrize("value", [1e-45, 1e-38, 1e-30])
def test_an_unsigned_code_is_never_zero(value: float) -> None:
    """An update divides by its root. Tiny values stand alone in a block, or next to a large one."""
    for largest in (value, 1.0, 1e38):
        x = torch.full((BLOCK,), value)
        x[5], x[6] = largest, 0.0
        for random in (None, random_bits(BLOCK)):
            y = decode(*encode(x, random, UNSIGNED), UNSIGNED)
            assert torch.equal(y > 0, x > 0)
            assert (y.sqrt() > 0).sum() == BLOCK - 1


@each_kind
def test_codes_are_unbiased(kind: int) -> None:
    """The mean of each value over 4096 hashes is off by six deviations at most. An error is within
    a unit, so its deviation is at most half a unit. Unsigned values below a unit become one unit.
    """
    times, values = 4096, spread(kind, 1, 3)
    largest = values.abs().argmax()
    values[largest] *= 1.97 / (values[largest].abs() * 2.0 ** -values[largest].abs().log2().floor())
    x = values.expand(times, -1).flatten()
    codes, exponents = encode(x, random_bits(len(x), 1), kind)
    y = decode(codes, exponents, kind).view(times, BLOCK).double()
    e = exponents.max().double() - 127
    assert len(exponents.unique()) == 2, "the largest value is rounded to the next power of two"
    magnitude = values.abs().double()
    unit = torch.maximum(magnitude.log2().floor().clamp_min(-200).exp2() / 8, (e - kind - 2).exp2())
    bound = 6 * unit / 2 / times**0.5
    kept = torch.ones_like(values, dtype=torch.bool)
    if kind == UNSIGNED:
        kept = (magnitude == 0) | (magnitude > (e - kind - 2).exp2())
        assert not kept.all()
    assert ((y.mean(0) - values.double()).abs() <= bound)[kept].all()
    assert (y.std(0) > 0).sum() > BLOCK / 2


@each_kind
def test_what_was_decoded_is_encoded_exactly(kind: int) -> None:
    """All codes at all exponents, whatever the random bits. The largest code of a block says its
    exponent. There is no -0.
    """
    codes = torch.arange(256, dtype=torch.uint8)
    if kind == SIGNED:
        codes[128] = 0
    blocks = codes.view(2, BLOCK).clone()
    blocks[:, 0] = kind << 3
    exponents = torch.arange(40, 255, dtype=torch.uint8).repeat_interleave(2)
    codes = blocks.repeat(215, 1).flatten()
    x = decode(codes, exponents, kind)
    assert x.isfinite().all() and len(x.unique()) > 8 * 215
    for random in (None, random_bits(len(x))):
        again = encode(x, random, kind)
        assert torch.equal(again[0], codes) and torch.equal(again[1], exponents)


@each_kind
@pytest.mark.parametrize("large", [INF, 3.4028234663852886e38, 3.3e38, 3.1901473e38])
def test_what_no_code_holds_becomes_the_largest_code(kind: int, large: float) -> None:
    """Rounded up it would be inf, which the exponent of a block cannot tell from NaN."""
    largest = 1.875 * 2.0**127
    x = torch.ones(4 * BLOCK)
    x[BLOCK + 7], x[2 * BLOCK + 7] = large, -large if kind == SIGNED else large
    for random in (None, random_bits(len(x))):
        y = decode(*encode(x, random, kind), kind)
        assert y.isfinite().all()
        assert y[BLOCK + 7] == largest and y[2 * BLOCK + 7].abs() == largest
        assert (y[2 * BLOCK + 7] < 0) == (kind == SIGNED)
        assert (y[[0, 3 * BLOCK]] == 1).all()


def test_updates_stay_small_where_gradients_differ_by_2_to_the_20() -> None:
    """Second moments v then differ by 2^40. v is m^2 or more, so |m| / sqrt(v) is at most 1.
    Coded: 9/8 / sqrt(7/8) < 1.21 times that, where m has 8 units or more. A unit of m is
    2^(E - 17), one of v 2^(2E - 33), or 2^(2E - 34) where m's largest value was rounded up to 2^E.
    There m of k units becomes k + 1 at most, and v k^2 at least, but never 0: at most 2.
    """
    generator = torch.Generator().manual_seed(0)
    for seed in range(20):
        m = spread(SIGNED, 100, seed)
        m = torch.where(m == 0, 1e-9, m)
        v = m.square() * (1 + torch.rand(m.shape, generator=generator) * 3)
        codes, exponents = encode(m, random_bits(len(m), seed), SIGNED)
        m_coded = decode(codes, exponents, SIGNED)
        v_coded = decode(*encode(v, random_bits(len(m), seed + 100), UNSIGNED), UNSIGNED)
        ratio, coded = m.abs() / v.sqrt(), m_coded.abs() / v_coded.sqrt()
        assert (coded <= 2).all()
        large = m.abs() >= (exponents.repeat_interleave(BLOCK).float() - 127 - 14).exp2()
        assert large.sum() > 1000 and (coded <= 1.21 * ratio)[large].all()


@pytest.mark.parametrize("form", ["bf16", "8bit fp32"])
@pytest.mark.parametrize("step", [0.0, 2.0**24 - 2])
@pytest.mark.parametrize("number", [0, 3, 100_003])
def test_moments_are_the_twins(
    triton_device: torch.device, form: str, step: float, number: int
) -> None:
    """If betas are 0, moments are the gradient and its square: any value, blocks of zeros, of tiny
    and of huge values.
    """
    x = spread(SIGNED, 24, 7)
    x[x.abs() < 2.0**-60] = 0.0
    x[BLOCK + 3], x[5 * BLOCK + 3], x[6 * BLOCK + 3] = NAN, 3.4e38, -3.4e38
    x[2 * BLOCK : 3 * BLOCK] = 0.0
    x[3 * BLOCK : 4 * BLOCK] *= 2.0**-60 / x[3 * BLOCK : 4 * BLOCK].abs().max()
    x[4 * BLOCK : 5 * BLOCK] *= 3.3e38 / x[4 * BLOCK : 5 * BLOCK].abs().max()
    x = torch.cat([x, torch.randint(-(1 << 31), 1 << 31, (8192,)).int().view(WIDE)])
    rule = ADAM._replace(lr=0.0, beta1=0.0, beta2=0.0)
    kernel = Updates(ROWS["adamw"], triton_device, form, [rule], [x.shape], step, grad=WIDE)
    kernel.lists["grads"][0].copy_(x)
    kernel.groups = [0] * (number + 2)
    twin = kernel.clone()
    for run, backend in ((kernel, "triton"), (twin, "eager")):
        run.step(backend, numbers=[number, number + 1], size=number + 2)
    for name in kernel.row.states(rule):
        assert same_or_nan(kernel.value(name, 0), twin.value(name, 0))
