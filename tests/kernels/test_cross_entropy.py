"""cross_entropy and entropies, kernel and twin against FP64; tokens are rows of the table."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Shrink, U, assert_within
from tests.kernels.test_softmax import BF16, HALF, LAYOUTS, WIDE, Layout, inputs
from tests.kernels.test_softmax_special import SPECIAL, N
from tritonamp.kernels import cross_entropy as module
from tritonamp.kernels.cross_entropy import NO_CLASS, cross_entropy, sample_targets

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* encountered:RuntimeWarning"
)  # NumPy's, in the interpreter


class Options(NamedTuple):
    """Arguments of the operation, in its order."""

    ignore_index: int = -100
    smoothing: float = 0.0
    temperature: float = 1.0
    entropy: bool = False


NAMES = ["3", "8", "255", "1024", "more lines", "columns", "two tiles of columns", "vector"]
NAMES += ["no rows", "whole at most", "long from", "long", "long, no masks"]
NAMES += ["long columns", "long, two tiles of columns"]
REAL = {
    "whole": Layout((1, 8192), 1),
    "odd": Layout((2, 50257), 1),
    "most classes": Layout((1, 262144), 1),
}
SMALL = {name: LAYOUTS[name] for name in NAMES}
OPTIONS = {
    "plain": Options(),
    "smoothed": Options(smoothing=0.25),
    "tokens": Options(NO_CLASS, entropy=True),
    "tokens, colder": Options(NO_CLASS, temperature=0.7, entropy=True),
    "tokens, hotter": Options(NO_CLASS, temperature=4.0, entropy=True),
    "everything": Options(smoothing=0.25, temperature=0.7, entropy=True),
}
RICH = {name: OPTIONS[name] for name in ("smoothed", "tokens, colder")}

each_layout = pytest.mark.parametrize("layout", SMALL.values(), ids=SMALL)
each_real_layout = pytest.mark.parametrize("layout", REAL.values(), ids=REAL)
each_dtype = pytest.mark.parametrize("dtype", [BF16, WIDE], ids=str)
each_long_shape = pytest.mark.parametrize("shape", [(3, 700), (1, 9000), (2, 8197)])
rich = pytest.mark.parametrize("options", RICH.values(), ids=RICH)


class Exact(NamedTuple):
    """A result in FP64, and the error of FP32 arithmetic."""

    value: Tensor
    error: Tensor


def exact_results(
    x: Tensor, target: Tensor, dim: int, options: Options
) -> tuple[Exact, Exact, Tensor]:
    """Losses, entropies, and the error of log(s).

    With d = (m - x) / T: a difference, the rounded 1 / T and a product are off by 3 u of d each, so
    an e by that and 5 u; a sum of n terms adds log2(n) + 2 roundings, and each time that it is
    rescaled 5 u and what m moves by. log2 is off by 4 u or 2**-22. The entropy's sum of e d / s has
    terms whose error is d times that of e. Smoothing adds the mean of d over n: n + 3 roundings,
    and three for each time that the sum is rescaled; then come two products and a sum with weights
    that are rounded themselves.
    """
    _, smoothing, temperature, _ = options
    wide, n = x.double(), x.shape[dim]
    d = (wide.amax(dim, keepdim=True) - wide) / temperature
    log_p = (wide / temperature).log_softmax(dim)
    p = log_p.exp()
    finite_d, finite_log_p = d.masked_fill(p == 0, 0.0), log_p.masked_fill(p == 0, 0.0)
    tile = module.tiling(x.shape, dim, dim, module.PER_THREAD, module.LONGEST, 8).layout[-1]
    rescaled = -(-n // tile)
    count = math.log2(n or 1) + 2 + 6 * rescaled
    moved = (p * finite_d).sum(dim)  # of s and, with d, of the entropy's sum
    of_log_s = (4 * moved + count + 12) * U + 2.0**-21
    index = target.clamp(min=0).unsqueeze(dim)
    loss, of_target = -log_p.gather(dim, index).squeeze(dim), d.gather(dim, index).squeeze(dim)
    of_loss = of_log_s + 4 * U * of_target.masked_fill(of_target.isinf(), 0.0) + U * loss.abs()
    if smoothing:
        even = -log_p.mean(dim)
        of_loss = of_loss + ((n + 5 + 3 * rescaled) * d.mean(dim) + 4 * (loss + even)) * U
        loss = (1 - smoothing) * loss + smoothing * even
    entropy = -(p * finite_log_p).sum(dim)
    square = (p * finite_d.square()).sum(dim)
    of_entropy = of_log_s * (1 + moved) + (8 * square + (count + 12) * moved + 4 * entropy) * U
    ignored = target == options.ignore_index
    losses, entropies = (
        Exact(value.masked_fill(ignored, 0.0), error.masked_fill(ignored, 0.0))
        for value, error in ((loss, of_loss), (entropy, of_entropy))
    )
    return losses, entropies, of_log_s


def targets_of(x: Tensor, dim: int, options: Options) -> Tensor:
    """Classes, some of them ignored if the options ignore any."""
    return sample_targets(x, dim, options.ignore_index == -100)


def special_lines(dim: int, device: Any) -> Tensor:
    """Return lines of which each holds special values, the last none."""
    lines = torch.randn(len(SPECIAL) + 1, N, device=device).to(HALF)
    for line, values in zip(lines, SPECIAL.values(), strict=False):
        for start, end, value in values:
            line[start:end] = value
    return lines if dim == 1 else lines.t().contiguous()


def check(layout: Layout, dtype: torch.dtype, options: Options, device: Any, backend: str) -> None:
    x, dim = inputs(layout, dtype, device), layout.dim
    target = targets_of(x, dim, options)
    losses, stats = cross_entropy(x, target, dim, *options, backend)
    assert losses.dtype is stats.dtype is WIDE and len(stats) == 2 + options.entropy
    if options.entropy:
        plain = options._replace(entropy=False)
        alone, two = cross_entropy(x, target, dim, *plain, backend)
        assert torch.equal(alone, losses) and torch.equal(two, stats[:2])
    if not x.numel():
        return
    exact, entropies, of_log_s = exact_results(x, target, dim, options)
    assert_within(losses, *exact)
    if options.entropy:
        assert_within(stats[2], *entropies)
    ignored = target == options.ignore_index
    assert (losses[ignored] == 0).all() and (stats[:, ignored] == 0).all()
    kept = ((x.double() - stats[0].unsqueeze(dim)) / options.temperature).exp().sum(dim).log()
    # what a loss near 0 is made of
    assert_within(stats[1][~ignored], kept[~ignored], of_log_s[~ignored])


@each_layout
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_results(
    device: torch.device, backend: str, small_tiles: Shrink, layout: Layout, options: Options
) -> None:
    small_tiles(layout.many)
    check(layout, HALF, options, device, backend)


@each_dtype
@rich
@pytest.mark.parametrize("name", ["255", "columns", "long"])
def test_dtypes(
    device: torch.device,
    backend: str,
    small_tiles: Shrink,
    name: str,
    options: Options,
    dtype: torch.dtype,
) -> None:
    small_tiles(LAYOUTS[name].many)
    check(LAYOUTS[name], dtype, options, device, backend)


@rich
@each_real_layout
def test_results_at_real_lengths(
    device: torch.device, backend: str, layout: Layout, options: Options
) -> None:
    check(layout, HALF, options, device, backend)


@pytest.mark.parametrize(
    ("dim", "many", "column"),
    [(1, None, 0), (1, None, 100), (1, None, N - 1), (1, 0, 100), (1, 0, N - 1), (0, 0, N - 1)],
)
@pytest.mark.parametrize("name", ["plain", "smoothed", "tokens, colder"])
def test_special_lines_are_torchs_and_leave_their_neighbours_alone(
    device: torch.device,
    backend: str,
    small_tiles: Shrink,
    dim: int,
    many: int | None,
    column: int,
    name: str,
) -> None:
    """Logits that are masked by -inf, among others: the target is one of them, or is not."""
    small_tiles(many)
    x, options = special_lines(dim, device), OPTIONS[name]
    target = torch.full((x.shape[1 - dim],), column, device=device)
    losses, stats = cross_entropy(x, target, dim, *options, backend)
    *exact, _ = exact_results(x, target, dim, options)
    for found, (value, error) in zip([losses, *stats[2:]], exact, strict=False):
        assert torch.equal(found.isnan(), value.isnan())
        assert torch.equal(found.isinf(), value.isinf())
        finite = value.isfinite()
        assert_within(found[finite], value[finite], error[finite])


def test_large_logits_lose_nothing(device: torch.device, backend: str) -> None:
    """65504 / T in FP32 would be off by 2**-8."""
    x = torch.full((2, 1000), 65504.0, device=device, dtype=HALF)
    target = torch.tensor([0, 999], device=device)
    options = Options(NO_CLASS, temperature=0.7, entropy=True)
    losses, stats = cross_entropy(x, target, -1, *options, backend)
    exact = torch.full((2,), math.log(1000), device=device)
    torch.testing.assert_close(losses, exact, rtol=0, atol=2.0**-20)
    torch.testing.assert_close(stats[2], exact, rtol=0, atol=2.0**-20)
    x = (65504 - torch.arange(1000, device=device) / 256).expand(2, -1)  # exact in FP32
    losses, stats = cross_entropy(x, target, -1, *options, backend)
    of_losses, of_entropies, _ = exact_results(x, target, -1, options)
    assert_within(losses, *of_losses)
    assert_within(stats[2], *of_entropies)


@pytest.mark.parametrize(
    ("ignore_index", "bad"),
    [(-100, 9), (-100, -1), (-100, 1 << 40), *((NO_CLASS, bad) for bad in (9, -1, -100, 1 << 40))],
)
def test_targets_that_are_no_class_are_refused(
    device: torch.device, backend: str, ignore_index: int, bad: int
) -> None:
    if device.type == "cuda":
        pytest.skip("an assertion on the device ends the process")
    target = torch.tensor([0, bad, -100 if ignore_index == -100 else 8])
    with pytest.raises(IndexError, match=f"Target {bad} is out of bounds"):
        cross_entropy(torch.zeros(3, 9, dtype=HALF), target, 1, *Options(ignore_index), backend)


@pytest.mark.parametrize("name", ["plain", "tokens", "tokens without entropies"])
@each_long_shape
def test_long_lines_are_read_once(
    triton_device: torch.device, traffic: Any, shape: tuple[int, int], name: str
) -> None:
    """2 B an element, and for each line the target's logit, a loss, and two or three numbers.

    The target itself is read where some may be ignored.
    """
    x = torch.randn(shape, device=triton_device).to(HALF)
    options = OPTIONS.get(name, Options(NO_CLASS))
    target = sample_targets(x, 1, ignored=False)
    cross_entropy(x, target, 1, *options, "triton")
    read, written = 12 if name == "plain" else 4, 12 + 4 * options.entropy
    found = traffic.read, traffic.written
    assert found == (2 * x.numel() + read * shape[0], written * shape[0])
    assert traffic.read + traffic.written <= 1.02 * 2 * x.numel()


def test_ignored_lines_are_not_read(triton_device: torch.device, traffic: Any) -> None:
    x = torch.randn(4, 300, device=triton_device).to(HALF)
    target = torch.full((4,), -100, device=triton_device)
    cross_entropy(x, target, 1, *OPTIONS["everything"], "triton")
    assert traffic.read == 8 * len(target)
