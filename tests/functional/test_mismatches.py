"""mismatch against FP64, and what it does with masks, infinities and wrong arguments."""

import math
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch
from gpuless.real_cuda import AnyCuda
from torch import Tensor

from tritonamp.functional import Mismatch, mismatch

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INF, NAN = math.inf, math.nan
EPS = torch.finfo(FP32).eps


def expected(
    log_probs: Tensor, sampler: Tensor, mask: Tensor, low: float = 0.999, high: float = 1.002
) -> list[float]:
    """The formulas in FP64, token by token, without those that do not count."""
    d = (log_probs.double() - sampler.double())[mask].tolist()
    k3 = [_above_line(x) for x in d]
    outside = [not low <= math.exp(x) <= high for x in d]
    worst = math.exp(max(d, key=abs))
    return [-math.fsum(d) / len(d), math.fsum(k3) / len(d), sum(outside) / len(d), worst]


def _above_line(x: float) -> float:
    """Return ``exp(x) - 1 - x``, with more digits than FP64, where it cancels, too."""
    with localcontext() as context:
        context.prec = 60
        return float(Decimal(x).exp() - 1 - Decimal(x))


def tokens(device: Any, far: float, dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of two policies with log ratios of about ``far``, and a mask."""
    torch.manual_seed(0)
    log_probs = -10 * torch.rand(5, 61, dtype=FP64)
    sampler = (log_probs + far * torch.randn(5, 61, dtype=FP64)).to(dtype)
    mask = torch.rand(5, 61) < 0.7
    return log_probs.to(dtype).to(device), sampler.to(device), mask.to(device)


@pytest.mark.parametrize("far", [1e-6, 1e-4, 1e-2, 0.3, 0.6, 4.0])
def test_values_are_exact(device: torch.device, far: float) -> None:
    """Also k3 of small log ratios, where ``ratio - 1 - log ratio`` as it is written is noise.

    The tolerance is the rounding of the log ratio, twice in k3, of its function, and of a mean.
    """
    log_probs, sampler, mask = tokens(device, far)
    found = mismatch(log_probs, sampler, mask)
    k1, k3, outside, worst = expected(log_probs, sampler, mask)
    size = (log_probs - sampler)[mask].abs().mean().item()
    assert found.k1.item() == pytest.approx(k1, rel=0, abs=4 * EPS * size)
    assert found.k3.item() == pytest.approx(k3, rel=8 * EPS)
    assert found.outside.item() == pytest.approx(outside, rel=EPS)
    assert found.worst_ratio.item() == pytest.approx(worst, rel=EPS * max(8 * far, 2))


@pytest.mark.parametrize("x", [2.0**-30, -1e-5, 1e-4, 0.01, -0.3, 0.49, -0.5, 0.51, -3.0, 40.0])
def test_k3_of_one_token(device: torch.device, x: float) -> None:
    log_ratio = torch.tensor([x], device=device)
    found = mismatch(log_ratio, torch.zeros_like(log_ratio)).k3.item()
    # the relative error of exp(x) - x grows with x, as does that of any exp
    assert found == pytest.approx(_above_line(log_ratio.item()), rel=EPS * max(6, abs(x)))


@pytest.mark.parametrize(
    ("dtypes", "far"),
    [((FP16, FP16), 0.1), ((BF16, FP32), 0.1), ((FP64, FP64), 1e-9), ((FP32, FP64), 0.1)],
    ids=str,
)
def test_other_dtypes(device: torch.device, dtypes: tuple[Any, Any], far: float) -> None:
    """Half inputs are widened first; FP64 is subtracted in FP64. Results are FP32."""
    log_probs, sampler, mask = tokens(device, far, FP64)
    log_probs, sampler = log_probs.to(dtypes[0]), sampler.to(dtypes[1])
    found = mismatch(log_probs, sampler, mask)
    assert all(value.dtype is FP32 and value.shape == () for value in found)
    exact = expected(log_probs, sampler, mask)
    for got, wanted in zip(found, exact, strict=True):
        assert got.item() == pytest.approx(wanted, rel=1e-5, abs=1e-30)


def test_equal_log_probs_have_no_mismatch(device: torch.device) -> None:
    log_probs = tokens(device, 0.0)[0]
    found = mismatch(log_probs, log_probs.clone(), band=(1, 1))
    assert found == (0.0, 0.0, 0.0, 1.0)


def test_tokens_that_are_masked_do_not_count(device: torch.device) -> None:
    log_probs, sampler, mask = tokens(device, 0.1)
    clean = mismatch(log_probs, sampler, mask)
    for junk in (NAN, INF, -INF):
        for p, q in ((junk, junk), (junk, 0.0), (0.0, junk)):
            spoiled = log_probs.masked_fill(~mask, p), sampler.masked_fill(~mask, q)
            assert mismatch(*spoiled, mask) == clean
    chosen = mismatch(log_probs[mask], sampler[mask])
    torch.testing.assert_close(chosen, clean, rtol=4 * EPS, atol=1e-7)
    assert mismatch(log_probs, sampler, torch.ones_like(mask)) == mismatch(log_probs, sampler)


@pytest.mark.parametrize(
    ("log_prob", "sampler", "wanted"),
    [
        (-INF, -1.0, (INF, INF, 0.5, 0.0)),
        (-1.0, -INF, (-INF, INF, 0.5, INF)),
        (-INF, -INF, (NAN, NAN, 0.5, NAN)),
        (NAN, -1.0, (NAN, NAN, 0.5, NAN)),
        (-1.0, -200.0, (-99.5, INF, 0.5, INF)),  # FP32 has no exp(199)
    ],
)
def test_infinities_that_count(
    device: torch.device, log_prob: float, sampler: float, wanted: tuple[float, ...]
) -> None:
    found = mismatch(
        torch.tensor([log_prob, -2.0], device=device), torch.tensor([sampler, -2.0], device=device)
    )
    assert [value.item() for value in found] == pytest.approx(wanted, nan_ok=True)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (), (3, 4)], ids=str)
def test_nothing_that_counts_is_nan(device: torch.device, shape: tuple[int, ...]) -> None:
    log_probs, mask = torch.zeros(shape, device=device), torch.zeros(shape, device=device).bool()
    found = [mismatch(log_probs, log_probs, mask)]
    if not log_probs.numel():
        found.append(mismatch(log_probs, log_probs))
    assert all(v.isnan() and v.dtype is FP32 and v.shape == () for each in found for v in each)


@pytest.mark.parametrize(
    ("ratios", "worst"),
    [((1.0, 8.0, 0.25), 8.0), ((1.0, 2.0, 0.125), 0.125), ((4.0, 0.25), 4.0), ((0.5,), 0.5)],
)
def test_the_worst_ratio_is_that_of_the_largest_logarithm(
    device: torch.device, ratios: tuple[float, ...], worst: float
) -> None:
    log_ratios = torch.tensor(ratios, device=device, dtype=FP64).log()
    assert mismatch(log_ratios, torch.zeros_like(log_ratios)).worst_ratio.item() == worst


@pytest.mark.parametrize(
    ("band", "outside"),
    [
        ((0.999, 1.002), 3 / 5),
        ([0.5, 2], 1 / 5),
        ((1, 1), 4 / 5),
        ((0, INF), 0.0),
        ((0.0, 1.0015), 2 / 5),
    ],
)
def test_the_band_holds_its_ends(device: torch.device, band: Any, outside: float) -> None:
    log_ratios = torch.tensor([0.5, 1.0, 1.001, 2.0, 4.0], device=device, dtype=FP64).log()
    found = mismatch(log_ratios, torch.zeros_like(log_ratios), band=band)
    assert found.outside.item() == pytest.approx(outside)


def test_no_gradient_flows(device: torch.device) -> None:
    log_probs, sampler, mask = tokens(device, 0.1)
    found = mismatch(log_probs.requires_grad_(), sampler.requires_grad_(), mask)
    assert not any(value.requires_grad for value in found)
    assert not torch.func.grad(lambda p: mismatch(p, sampler, mask).k3)(log_probs).any()


def test_it_does_not_wait_and_a_graph_captures_it(gpu: AnyCuda) -> None:
    log_probs, sampler, mask = tokens("cuda", 0.1)
    with gpu.watch() as records:
        eager = mismatch(log_probs, sampler, mask)
    assert records == []
    p, q = torch.zeros_like(log_probs), torch.zeros_like(sampler)
    mismatch(p, q, mask)
    with gpu.capture() as graph:
        captured = mismatch(p, q, mask)
    p.copy_(log_probs)
    q.copy_(sampler)
    graph.replay()
    assert captured == eager and eager.k3 > 0


def test_one_graph_under_compile() -> None:
    log_probs, sampler, mask = tokens("cpu", 0.1)
    compiled = torch.compile(mismatch, fullgraph=True, backend="aot_eager")
    found = compiled(log_probs, sampler, mask, band=(0.9, 1.1))
    assert type(found) is Mismatch
    assert found == mismatch(log_probs, sampler, mask, band=(0.9, 1.1))


def test_under_vmap(device: torch.device) -> None:
    log_probs, sampler, mask = tokens(device, 0.1)
    by_row = torch.func.vmap(mismatch)(log_probs, sampler, mask)
    for n, row in enumerate(zip(log_probs, sampler, mask, strict=True)):
        torch.testing.assert_close([value[n] for value in by_row], [*mismatch(*row)])


ROWS = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_probs": [0.0]}, r"log_probs: expected a Tensor, got list: call mismatch\("),
        ({"sampler_log_probs": None}, "sampler_log_probs: expected a Tensor, got NoneType"),
        ({"log_probs": ROWS.long()}, "log_probs: .* float64, got torch.int64: give log-prob"),
        (
            {"sampler_log_probs": ROWS.to(torch.complex64)},
            "sampler_log_probs: .* got torch.complex",
        ),
        (
            {"sampler_log_probs": torch.zeros(2)},
            r"sampler_log_probs: expected the shape of log_probs, \(2, 3\), got \(2,\): cut or pad",
        ),
        (
            {"sampler_log_probs": ROWS.to("meta")},
            "sampler_log_probs: expected a tensor on cpu, .* got one on meta: move it there first",
        ),
        ({"mask": [True]}, "mask: expected a bool Tensor or None, got list"),
        ({"mask": ROWS}, r"mask: expected torch.bool, .* got torch.float32: give mask.bool\(\)"),
        (
            {"mask": torch.ones(2).bool()},
            r"mask: expected the shape of log_probs, \(2, 3\), got \(2,\): give mask.expand_as",
        ),
        ({"mask": ROWS.bool().to("meta")}, "mask: expected a tensor on cpu, .* got one on meta"),
        *(
            ({"band": band}, r"band: expected two numbers, 0 <= lowest <= 1 <= highest, .* got")
            for band in [
                *((1.1, 1.2), (0.5, 0.9), (-0.1, 1.1), (NAN, 1.1), (0.9, NAN), (1.2, 0.8)),
                *((0.9,), (0.9, 1.0, 1.1), 0.1, None, ("0.9", "1.1"), (False, True)),
            ]
        ),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"log_probs": ROWS, "sampler_log_probs": ROWS} | change
    with pytest.raises(ValueError, match=message):
        mismatch(given.pop("log_probs"), given.pop("sampler_log_probs"), **given)
