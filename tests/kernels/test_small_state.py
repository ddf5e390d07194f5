"""Masters in two halves, one-byte moments and stochastic rounding: what they lose, and the bits of
their Triton functions.
"""

import math

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import numpy_warns
from tests.kernels.update_rows import ADAM, ROWS
from tests.kernels.updates import Updates
from tritonamp.kernels import _small_state as small
from tritonamp.kernels._small_state import (
    BLOCK,
    SIGNED,
    UNSIGNED,
    decode,
    encode,
    join_master,
    split_master,
)
from tritonamp.kernels.sgd import SGDRule

pytestmark = numpy_warns

HALF, BF16, WIDE = torch.float16, torch.bfloat16, torch.float32
INF, NAN = float("inf"), float("nan")
KINDS = {"signed": SIGNED, "unsigned": UNSIGNED}
EDGES = [-0x8000, -0x7FFF, -0x4000, -1, 0, 1, 0x3FFC, 0x3FFF, 0x4000, 0x7FFF]  # of 16 bits, signed

each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
each_half = pytest.mark.parametrize("half", [HALF, BF16], ids=str)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def same(x: Tensor, y: Tensor) -> bool:
    """The same bits; any NaN is the same as another."""
    return torch.equal(bits(x)[~x.isnan()], bits(y)[~x.isnan()]) and torch.equal(
        x.isnan(), y.isnan()
    )


def patterns(dtype: torch.dtype) -> Tensor:
    """All values of a half dtype."""
    return torch.arange(-0x8000, 0x8000, dtype=torch.int16).view(dtype)


def upper_and_lower_bits() -> Tensor:
    """FP32 values of all 65536 upper halves, with lower halves at the edges and at random."""
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


def random_bits(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 1 << 32, (n,), generator=torch.Generator().manual_seed(seed))


def exponent_of(x: Tensor) -> Tensor:
    return (bits(x) >> 23) & 0xFF


# masters in two halves


def test_a_bfloat16_master_comes_back_exactly() -> None:
    """All FP32 values but those beyond the largest bfloat16 number."""
    x = upper_and_lower_bits()
    upper, lower = split_master(x, BF16)
    back = join_master(upper, lower)
    finite = upper.isfinite()
    assert finite.sum() > 0.99 * len(x)
    assert torch.equal(bits(back)[finite], bits(x)[finite])
    assert torch.equal(bits(back)[~finite], bits(upper.float())[~finite])
    assert torch.equal(upper.isnan(), x.isnan())
    is_tie = (bits(x) & 0xFFFF) == 0x8000
    nearest = torch.where(is_tie, x + (x - (bits(x) & -0x10000).view(WIDE)), x).bfloat16()
    assert same(upper.float()[finite], nearest.float()[finite])


def test_a_float16_master_comes_back() -> None:
    """Exactly from 2^-14 to 65504, below that to half of a unit of 2^-39, which is found with one
    rounding to FP32. The sign of 0 is lost.
    """
    x = upper_and_lower_bits()
    x = torch.cat([x, torch.rand(1 << 16, generator=torch.Generator().manual_seed(1)) * 2**-13])
    upper, lower = split_master(x, HALF)
    assert same(upper.float(), x.half().float())
    back = join_master(upper, lower)
    exact = (x.abs() >= 2**-14) & (x.abs() <= 65504)
    tiny = x.abs() < 2**-14
    assert min(exact.sum(), tiny.sum()) > 1 << 16
    assert torch.equal(bits(back)[exact], bits(x)[exact])
    assert ((back.double() - x.double()).abs()[tiny] <= 2.0**-40 * (1 + 2.0**-24)).all()
    assert (lower[tiny] != 0).sum() > 1 << 14
    beyond = x.abs() > 65520
    assert torch.equal(back[beyond], x[beyond].half().float())
    assert torch.equal(back.isnan(), x.isnan())


@pytest.mark.parametrize("r", EDGES)
def test_a_bfloat16_value_of_somebody_elses_keeps_the_remainder(r: int) -> None:
    """inf and NaN have none, and zeros none that would change their sign."""
    upper = patterns(BF16)
    lower = torch.full(upper.shape, r, dtype=torch.int16)
    x, wide = join_master(upper, lower), upper.float()
    alone = ~upper.isfinite() | ((upper == 0) & (lower < 0))
    assert same(x[alone], wide[alone])
    again = split_master(x[~alone], BF16)
    assert torch.equal(bits(again[0].float()), bits(wide[~alone]))
    assert torch.equal(again[1], lower[~alone])


@pytest.mark.parametrize("r", [r for r in EDGES if abs(r) <= 0x4000])
def test_a_float16_value_of_somebody_elses_keeps_the_remainder(r: int) -> None:
    """Of those that ``split_master`` leaves, half an ulp at most. Half the ulp of a power of two
    reaches its neighbour below. An FP32 ulp is four units, so that some remainders are rounded.
    """
    upper = patterns(HALF)
    x, wide = join_master(upper, torch.full(upper.shape, r, dtype=torch.int16)), upper.float()
    assert same(x[~upper.isfinite()], wide[~upper.isfinite()])
    finite = upper.isfinite()
    ulp = (exponent_of(wide).clamp_min(113).double() - 127 - 10).exp2()
    assert ((x.double() - wide.double()).abs() <= ulp / 2)[finite].all()
    assert ((x - wide).sign() * r >= 0)[finite].all()
    is_power = bits(wide) & 0x7FFFFF == 0
    inside = finite & ~(is_power & (wide * r < 0)) & (abs(r) < 0x3FFE)
    again = split_master(x[inside], HALF)
    assert torch.equal(again[0], upper[inside])
    assert torch.equal(join_master(*again), x[inside])


@each_half
def test_what_has_no_remainder(half: torch.dtype) -> None:
    x = torch.tensor([INF, -INF, NAN, 0.0, 3.4e38, -3.4e38, -0.0])
    upper, lower = split_master(x, half)
    assert lower.tolist() == [0] * 7
    assert same(upper.float(), x.to(half).float())
    assert same(join_master(upper, lower)[:6], x.to(half).float()[:6])


# moments of one byte


def spread(kind: int, blocks: int, seed: int = 0) -> Tensor:
    """Values whose magnitudes go 2^40 down from the block's largest, and zeros."""
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
    """An update divides by its root. In a block of tiny ones, and next to a large one."""
    for largest in (value, 1.0, 1e38):
        x = torch.full((BLOCK,), value)
        x[5], x[6] = largest, 0.0
        for random in (None, random_bits(BLOCK)):
            y = decode(*encode(x, random, UNSIGNED), UNSIGNED)
            assert torch.equal(y > 0, x > 0)
            assert (y.sqrt() > 0).sum() == BLOCK - 1


@each_kind
def test_codes_are_unbiased(kind: int) -> None:
    """By value, over 4096 hashes: an error is within a unit, its deviation at most half of one; six
    deviations of the mean. Unsigned values below a unit become one.
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
    top = (kind << 3) | 0
    codes = torch.arange(256, dtype=torch.uint8)
    if kind == SIGNED:
        codes[128] = 0
    blocks = codes.view(2, BLOCK).clone()
    blocks[:, 0] = top
    exponents = torch.arange(40, 255, dtype=torch.uint8).repeat_interleave(2)
    codes = blocks.repeat(215, 1).flatten()
    x = decode(codes, exponents, kind)
    assert x.isfinite().all() and len(x.unique()) > 8 * 215
    for random in (None, random_bits(len(x))):
        again = encode(x, random, kind)
        assert torch.equal(again[0], codes) and torch.equal(again[1], exponents)


@each_kind
def test_nan_marks_its_block(kind: int) -> None:
    x = torch.ones(3 * BLOCK)
    x[BLOCK + 7] = NAN
    for random in (None, random_bits(len(x))):
        y = decode(*encode(x, random, kind), kind)
        assert y.isnan().view(3, BLOCK).sum(1).tolist() == [0, BLOCK, 0]


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
    """In a block whose first moments m differ by 2^20 and more, and second ones by 2^40, with v of
    m^2 at least, |m| / sqrt(v) is at most 1 before. Coded: 9/8 / sqrt(7/8) < 1.21 times that, where
    m has 8 units or more. A unit of m is 2^(E - 17), one of v 2^(2E - 33), or 2^(2E - 34) where m's
    largest value was rounded up to 2^E. There m of k units becomes k + 1 at most, and v k^2 at
    least, but never 0: at most 2.
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


def test_the_mean_of_a_gradient_2_to_the_20_below_its_block_is_kept() -> None:
    """2^-20 is an eighth of 1's unit, so every eighth code is 1, to 6 deviations."""
    x = torch.full((4096, BLOCK), 2.0**-20)
    x[:, 0] = 1.0
    y = decode(*encode(x.flatten(), random_bits(x.numel()), SIGNED), SIGNED).view(x.shape)
    assert y[:, 1:].unique().tolist() == [0.0, 2.0**-17]
    n, p = y[:, 1:].numel(), 1 / 8
    assert abs((y[:, 1:] > 0).float().mean().item() - p) <= 6 * (p * (1 - p) / n) ** 0.5


# random bits and bfloat16


def test_random_bits_are_even() -> None:
    """Of elements and of tensors in turn, both moments': each bit, each pair of bits, and 16 bins;
    6 deviations.
    """
    n, step = 1 << 14, torch.tensor(3.0)
    of_tensors = [small.random_bits_twin(torch.empty(16), step, k) for k in range(n // 16)]
    along = {
        "elements": small.random_bits_twin(torch.empty(n), step, 5),
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
    """By the golden ratio: of n steps, n p come below any p, and 2 + log2(n) more or fewer at most
    (independent ones: a multiple of sqrt(n p)).
    """
    steps = [float(first + k) for k in range(512)]
    rows = [small.random_bits_twin(torch.empty(64), torch.tensor(s), 1) for s in steps]
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
        _, bits_of_v = small.random_bits_twin(like, torch.tensor(float(step)), 0)
        v = small.rounded_twin(v * 0.999 + square * 0.001, bits_of_v, dropped)
        if step > 2000 and step % 50 == 0:
            ratios.append(v / exact)
    ratio = torch.stack(ratios)
    assert ratio.std(1).mean() <= noise
    assert abs(ratio.mean() - 1) <= 0.03


def test_stochastic_rounding_to_bfloat16() -> None:
    """To one of the two neighbours, in the mean to the value; NaN and inf stay, what bfloat16 holds
    stays.
    """
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    many = x.expand(4096, -1).flatten()
    y = small.rounded_twin(many, random_bits(len(many)), 16).view(4096, -1)
    assert torch.equal(y, y.bfloat16().float())
    lower = (bits(x) & -0x10000).view(WIDE)
    unit = ((bits(lower) & 0x7F800000) >> 23).double().sub(127 + 7).exp2()
    assert ((y.double() - lower.double()).abs() <= unit).all()
    assert (((y.double().mean(0) - x.double()).abs()) <= 6 * unit / 2 / 64).all()
    stays = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.5, 2.0**-126])
    for random in (0, 0xFFFF, 0xFFFFFFFF):
        kept = small.rounded_twin(stays, torch.full((8,), random), 16)
        assert same(kept, stays)


# bits of the kernel


@pytest.mark.parametrize("form", ["packed", "packed bfloat16"])
def test_masters_are_the_twins(triton_device: torch.device, form: str) -> None:
    """A step makes a master of any FP32 value; another keeps that of any half and any remainder."""
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
        assert same(a.float(), b.float())
    assert all(map(torch.equal, kernel.lists["remainders"], twin.lists["remainders"]))
    assert same(kernel.masters()[0].cpu(), join_master(*split_master(x, halves.dtype)))


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
    x = torch.cat([x, upper_and_lower_bits()[:: 13 * 8 + 1]])
    rule = ADAM._replace(lr=0.0, beta1=0.0, beta2=0.0)
    kernel = Updates(ROWS["adamw"], triton_device, form, [rule], [x.shape], step, grad=WIDE)
    kernel.lists["grads"][0].copy_(x)
    kernel.groups = [0] * (number + 2)
    twin = kernel.clone()
    for run, backend in ((kernel, "triton"), (twin, "eager")):
        run.step(backend, numbers=[number, number + 1], size=number + 2)
    for name, i in (("exp_avgs", 0), ("exp_avg_sqs", 0)):
        assert same(kernel.value(name, i), twin.value(name, i))
    assert x[x.isfinite()].unique().numel() > 8000
