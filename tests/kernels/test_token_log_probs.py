"""token_log_probs, kernel and twin against FP64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Shrink, U, assert_within
from tests.kernels.test_cross_entropy import REAL
from tests.kernels.test_softmax import BF16, HALF, LAYOUTS, WIDE, Layout, inputs
from tests.kernels.test_softmax_special import SPECIAL, N
from tritonamp.kernels import token_log_probs as module
from tritonamp.kernels.token_log_probs import sample_rows, token_log_probs

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* encountered:RuntimeWarning"
)  # NumPy's, in the interpreter

NAMES = ["3", "8", "255", "1024", "more lines", "columns", "vector", "no rows", "whole at most"]
NAMES += ["long from", "long", "long, no masks", "long columns"]
SMALL = {name: LAYOUTS[name] for name in NAMES}
each_temperature = pytest.mark.parametrize("temperature", [1.0, 0.7, 4.0])


def exact_and_error(
    x: Tensor, target: Tensor, temperature: float
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Log-probabilities and entropies in FP64, and for each the error of FP32 arithmetic.

    With d = (m - x) / T: a difference, the rounded 1 / T and a product are off by 3 u of d each, so
    an e by that and 5 u; a sum of n terms adds log2(n) + 2 roundings, and each time that it is
    rescaled 5 u and what m moves by. log2 is off by 4 u or 2**-22. The entropy's sum of e d / s has
    terms whose error is d times that of e.
    """
    wide = x.double()
    m = wide.amax(-1, keepdim=True)
    d = (m - wide) / temperature
    log_p = (wide / temperature).log_softmax(-1)
    p = log_p.exp()
    n = x.shape[-1]
    tile = module.tiling(x.shape, -1, -1, module.PER_THREAD, module.LONGEST, 8).layout[-1]
    count = math.log2(n or 1) + 2 + 6 * -(-n // tile)
    moved = p.mul(d.masked_fill(p == 0, 0.0)).sum(-1)  # of s and, with d, of the entropy's sum
    of_log_s = (4 * moved + count + 12) * U + 2.0**-21
    of_target = d.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    chosen = log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    square = p.mul(d.masked_fill(p == 0, 0.0).square()).sum(-1)
    entropy = -p.mul(log_p.masked_fill(p == 0, 0.0)).sum(-1)
    of_entropy = of_log_s * (1 + moved) + (8 * square + (count + 12) * moved + 4 * entropy) * U
    error = of_log_s + 4 * U * of_target.masked_fill(of_target.isinf(), 0.0) + U * chosen.abs()
    return (chosen, error), (entropy, of_entropy)


def check(
    layout: Layout, dtype: torch.dtype, temperature: float, device: Any, backend: str
) -> None:
    x, target = sample_rows(inputs(layout, dtype, device), layout.dim)
    found, stats = token_log_probs(x, target, temperature, True, backend)
    alone, two = token_log_probs(x, target, temperature, False, backend)
    assert found.dtype is stats.dtype is WIDE and len(stats) == 3 and len(two) == 2
    assert torch.equal(alone, found) and torch.equal(two, stats[:2])
    if not x.numel():
        return
    chosen, entropy = exact_and_error(x, target, temperature)
    assert_within(found, *chosen)
    assert_within(stats[2], *entropy)


@pytest.mark.parametrize("layout", SMALL.values(), ids=SMALL)
@each_temperature
def test_results(
    device: torch.device, backend: str, small_tiles: Shrink, layout: Layout, temperature: float
) -> None:
    small_tiles(layout.many)
    check(layout, HALF, temperature, device, backend)


@pytest.mark.parametrize("dtype", [BF16, WIDE], ids=str)
@pytest.mark.parametrize("name", ["255", "columns", "long"])
def test_dtypes(
    device: torch.device, backend: str, small_tiles: Shrink, name: str, dtype: torch.dtype
) -> None:
    small_tiles(LAYOUTS[name].many)
    check(LAYOUTS[name], dtype, 0.7, device, backend)


@pytest.mark.parametrize("layout", REAL.values(), ids=REAL)
def test_results_at_real_lengths(device: torch.device, backend: str, layout: Layout) -> None:
    check(layout, HALF, 0.7, device, backend)


@pytest.mark.parametrize("many", [None, 0])
@pytest.mark.parametrize("column", [0, 100, N - 1])
def test_special_rows_are_torchs_and_leave_their_neighbours_alone(
    device: torch.device, backend: str, small_tiles: Shrink, many: int | None, column: int
) -> None:
    """Logits that are masked by -inf, among others: no part of the entropy."""
    small_tiles(many)
    x = torch.randn(len(SPECIAL) + 1, N, device=device).to(HALF)
    for row, values in zip(x, SPECIAL.values(), strict=False):
        for start, end, value in values:
            row[start:end] = value
    target = torch.full((len(x),), column, device=device)
    found, stats = token_log_probs(x, target, 0.7, True, backend)
    (exact, error), (entropy, of_entropy) = exact_and_error(x, target, 0.7)
    assert torch.equal(found.isnan(), exact.isnan())
    assert torch.equal(found.isinf(), exact.isinf())
    finite = exact.isfinite()
    assert_within(found[finite], exact[finite], error[finite])
    assert torch.equal(stats[2].isnan(), entropy.isnan())
    finite = entropy.isfinite()
    assert_within(stats[2][finite], entropy[finite], of_entropy[finite])


def test_large_logits_lose_nothing(device: torch.device, backend: str) -> None:
    """65504 / T in FP32 would be off by 2**-8."""
    x = torch.full((2, 1000), 65504.0, device=device, dtype=HALF)
    target = torch.tensor([0, 999], device=device)
    found, stats = token_log_probs(x, target, 0.7, True, backend)
    exact = torch.full((2,), math.log(1000), device=device)
    torch.testing.assert_close(-found, exact, rtol=0, atol=2.0**-20)
    torch.testing.assert_close(stats[2], exact, rtol=0, atol=2.0**-20)


@pytest.mark.parametrize("bad", [9, -1, -100, 1 << 40])
def test_targets_that_are_no_class_are_refused(
    device: torch.device, backend: str, bad: int
) -> None:
    if device.type == "cuda":
        pytest.skip("an assertion on the device ends the process")
    with pytest.raises(IndexError, match=f"Target {bad} is out of bounds"):
        token_log_probs(torch.zeros(2, 9), torch.tensor([0, bad]), 1.0, False, backend)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("shape", [(3, 700), (1, 9000), (2, 8197)])
def test_long_rows_are_read_once(
    triton_device: torch.device, traffic: Any, shape: tuple[int, int], entropy: bool
) -> None:
    """2 B an element, and for each row the logit of its target, and three or four numbers."""
    x = torch.randn(shape, device=triton_device).to(HALF)
    target = torch.zeros(shape[0], dtype=torch.int64, device=triton_device)
    token_log_probs(x, target, 0.7, entropy, "triton")
    written = (12 + 4 * entropy) * shape[0]
    assert (traffic.read, traffic.written) == (2 * x.numel() + 4 * shape[0], written)
