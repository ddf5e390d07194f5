"""Detection of steps whose loss or gradient norm is far above those of the last steps.

For the last 63 values of each, ``m`` is their median, and ``f`` is the median of their distances
from m as factors, max(x/m, m/x), and at least ``LEAST``. A value above m * f ** (1.4826 * sigmas)
is an outlier. This is a limit of ``sigmas`` standard deviations of the logarithm, estimated from
the median absolute deviation. Factors are used because losses of a run that converges spread by
factors, so that plain deviations would call every hard batch an outlier. If a value in the window
is not positive, distances are differences instead.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.kernels._decision import (
    LIMITS,
    OUTLYING,
    RECORD,
    Evidence,
    total_norm,
    unscaled_amax,
    unscaling,
)
from tritonamp.kernels._implementations import Implementations
from tritonamp.kernels._launch import Launch
from tritonamp.kernels._sample import ListSample
from tritonamp.kernels._shipped import Shipped
from tritonamp.kernels.device import tl, triton

SIZE = 64  # values kept, that of this step included
MOST = 4  # outliers among these, so that a run that has changed its level continues
WINDOW = 3 * SIZE + 1  # losses, norms, flags of skipped outliers, and a count of values
LEAST = 1.01  # smallest factor that counts as the usual spread
_TO_SIGMA = 1.4826  # ratio of standard deviation and median absolute deviation of normal values
_BLOCK = 256
_PART = 16  # values that are compared with all at a time
_MIDDLE = (SIZE - 1) // 2


class Limit(NamedTuple):
    """Definition of an outlier.

    Attributes:
        window: float32 of shape (WINDOW,), updated in place: SIZE losses (NaN: not known), SIZE
            norms, SIZE flags of skipped outliers, and the number of values seen, at most 2 SIZE -
            1.
        sigmas: number of standard deviations above the median.
    """

    window: Tensor
    sigmas: float


@triton.jit
def _distance(x, middle, KIND: tl.constexpr):
    """Return the value itself, or its distance from the median as a factor or as a difference."""
    if KIND == "value":
        return x
    elif KIND == "factor":
        # correctly rounded, so that kernel and twin order values alike
        return tl.maximum(tl.div_rn(x, middle), tl.div_rn(middle, x))
    else:
        return tl.abs(x - middle)


@triton.jit
def _median(
    row_ptr, x, j, slot, middle,
    KIND: tl.constexpr, MIDDLE: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Return the distance that has as many others below as above it; ties rank by place."""
    x = _distance(x, middle, KIND)
    rank = tl.zeros([SIZE], tl.int32)
    # PART values at a time, because all pairs at once take too many registers
    for at in range(0, SIZE, PART):
        k = at + tl.arange(0, PART)
        other = tl.expand_dims(_distance(tl.load(row_ptr + k), middle, KIND), 0)
        k, mine = tl.expand_dims(k, 0), tl.expand_dims(x, 1)
        below = (other < mine) | ((other == mine) & (k < tl.expand_dims(j, 1)))
        # the slot of this step holds the oldest value, which is no longer in the window
        rank += tl.sum((below & (k != slot)).to(tl.int32), 1)
    # exactly one value has the middle rank, so its sum with zeros is the value
    return tl.sum(tl.where((rank == MIDDLE) & (j != slot), x, 0.0), 0)


@triton.jit
def _limit(
    row_ptr, x, j, slot, power,
    LEAST: tl.constexpr, MIDDLE: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Return the median, and the largest value that is no outlier; inf if none is known."""
    middle = _median(row_ptr, x, j, slot, 0.0, "value", MIDDLE, SIZE, PART)
    lowest = tl.min(tl.where(j != slot, x, float("inf")), 0)
    # NaN stands for an unknown loss, and compares with nothing
    known = tl.sum(tl.where((j != slot) & (x != x), 1, 0), 0) == 0
    if lowest > 0.0:
        factor = _median(row_ptr, x, j, slot, middle, "factor", MIDDLE, SIZE, PART)
        limit = middle * tl.exp2(power * tl.log2(tl.maximum(factor, LEAST)))
    else:
        spread = _median(row_ptr, x, j, slot, middle, "difference", MIDDLE, SIZE, PART)
        limit = middle + power * tl.maximum(spread, (LEAST - 1.0) * tl.abs(middle))
    middle = tl.where(known, middle, float("nan"))
    # a limit of 0 would make every positive value an outlier
    return middle, tl.where(known & (limit != 0.0), limit, float("inf"))


@triton.jit(do_not_specialize=("n", "parts"))
def outliers_kernel(
    amax_ptr, square_ptr, flag_ptr, earlier_ptr, used_ptr, loss_ptr, window_ptr, numbers_ptr,
    out_ptr, n, parts, power,
    LIMITS: tl.constexpr, OUTLYING: tl.constexpr, SIZE: tl.constexpr, MOST: tl.constexpr,
    MIDDLE: tl.constexpr, TO_SIGMA: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Decide in one program of one warp, in which no thread stores before all have loaded."""
    flag, earlier, loss = tl.load(flag_ptr), tl.load(earlier_ptr), tl.load(loss_ptr)
    inv_scale = tl.div_rn(1.0, tl.load(used_ptr))
    bad, _ = unscaled_amax(amax_ptr, n, inv_scale, BLOCK)
    norm = total_norm(square_ptr, parts, inv_scale, BLOCK)
    # a step that is skipped for another reason says nothing about outliers, and is not kept
    counts = (flag == 0.0) & (earlier == 0.0) & (tl.max(bad, 0) == 0)
    # the slot of this step, whose old value is left out of the window
    seen = tl.load(window_ptr + 3 * SIZE).to(tl.int32)
    slot = seen % SIZE
    j = tl.arange(0, SIZE)
    losses, norms = tl.load(window_ptr + j), tl.load(window_ptr + SIZE + j)
    skipped = tl.sum(tl.where(j != slot, tl.load(window_ptr + 2 * SIZE + j), 0.0), 0)
    loss_middle, loss_limit = _limit(window_ptr, losses, j, slot, power, LEAST, MIDDLE, SIZE, PART)
    norm_middle, norm_limit = _limit(
        window_ptr + SIZE, norms, j, slot, power, LEAST, MIDDLE, SIZE, PART
    )
    above = (loss > loss_limit) | (norm > norm_limit)
    # until the window is full the median says little; after MOST outliers the level has changed
    found = counts & above & (seen >= SIZE - 1) & (skipped < MOST)
    tl.store(out_ptr, tl.where(found, OUTLYING, flag))
    if counts:
        tl.store(window_ptr + slot, loss)
        tl.store(window_ptr + SIZE + slot, norm)
        tl.store(window_ptr + 2 * SIZE + slot, found.to(tl.float32))
        # the count wraps from 2 SIZE to SIZE: slots continue, the
        # window stays full, FP32 stays exact
        tl.store(
            window_ptr + 3 * SIZE, tl.where(seen + 1 < 2 * SIZE, seen + 1, SIZE).to(tl.float32)
        )
    if found:
        tl.store(numbers_ptr + LIMITS, loss.to(tl.float64))
        tl.store(numbers_ptr + LIMITS + 1, loss_middle.to(tl.float64))
        tl.store(numbers_ptr + LIMITS + 2, loss_limit.to(tl.float64))
        tl.store(numbers_ptr + LIMITS + 3, norm.to(tl.float64))
        tl.store(numbers_ptr + LIMITS + 4, norm_middle.to(tl.float64))
        tl.store(numbers_ptr + LIMITS + 5, norm_limit.to(tl.float64))
        tl.store(numbers_ptr + LIMITS + 6, tl.div_rn(power, TO_SIGMA).to(tl.float64))


def outliers_triton(
    evidence: Evidence,
    used_scale: Tensor,
    loss: Tensor,
    limit: Limit,
    numbers: Tensor,
    flag: Tensor,
) -> None:
    amax, square_sum, fault, earlier, _ = evidence
    assert fault is not None and earlier is not None
    tensors = amax, square_sum, fault, earlier, used_scale, loss, limit.window, numbers, flag
    sizes = len(amax), len(square_sum), _TO_SIGMA * limit.sigmas
    constants = (LIMITS, OUTLYING, SIZE, MOST, _MIDDLE, _TO_SIGMA, LEAST, _BLOCK, _PART)
    Launch(outliers_kernel, (1, 1, 1), sizes, constants, 1)(*tensors)


def outliers_torch(
    evidence: Evidence,
    used_scale: Tensor,
    loss: Tensor,
    limit: Limit,
    numbers: Tensor,
    flag: Tensor,
) -> None:
    amax, square_sum, nonfinite, found_earlier, _ = evidence
    assert nonfinite is not None and found_earlier is not None
    window, power = limit.window, _TO_SIGMA * limit.sigmas
    inv_scale, norm = unscaling(square_sum, used_scale)
    # a step that is skipped for another reason says nothing about outliers, and is not kept
    finite = torch.isfinite(amax * inv_scale).all()
    counts = (nonfinite == 0) & (found_earlier == 0) & finite
    # the slot of this step, whose old value is left out of the window
    seen = window[-1].long()
    rows = window[:-1].view(3, SIZE)
    at = (seen + torch.arange(SIZE, device=window.device)) % SIZE
    others = rows[:, at[1:]]
    middles, limits = zip(*(_middle_and_limit(row, power) for row in others[:2]), strict=True)
    above = (loss > limits[0]) | (norm > limits[1])
    found = counts & above & (seen >= SIZE - 1) & (others[2].sum() < MOST)
    kept = torch.stack([loss, norm, found.float()])
    rows[:, at[0]] = torch.where(counts, kept, rows[:, at[0]])
    after = torch.where(seen + 1 < 2 * SIZE, seen + 1, SIZE)
    window[-1] = torch.where(counts, after, seen).float()
    sigmas = torch.full_like(norm, limit.sigmas)
    told = torch.stack([loss, middles[0], limits[0], norm, middles[1], limits[1], sigmas])
    places = slice(LIMITS, RECORD)
    numbers[places] = torch.where(found, told.to(numbers.dtype), numbers[places])
    flag.copy_(torch.where(found, OUTLYING, nonfinite))


def _middle_and_limit(x: Tensor, power: float) -> tuple[Tensor, Tensor]:
    """Return the median, and the largest value that is no outlier; inf if none is known."""
    middle = x.median()
    factor = torch.maximum(x / middle, middle / x).median().clamp(min=LEAST)
    by_factor = middle * torch.exp2(power * torch.log2(factor))
    spread = (x - middle).abs().median()
    by_difference = middle + power * torch.maximum(spread, (LEAST - 1.0) * middle.abs())
    limit = torch.where(x.min() > 0, by_factor, by_difference)
    return middle, torch.where(x.isnan().any() | (limit == 0), torch.inf, limit)


def outliers(
    evidence: Evidence,
    used_scale: Tensor,
    loss: Tensor,
    limit: Limit,
    numbers: Tensor,
    flag: Tensor,
    backend: str = "auto",
) -> None:
    """Decide whether a step is an outlier, and keep its loss and norm.

    It is called before ``decide``. Nothing is an outlier before SIZE - 1 steps were seen, or while
    MOST of the last SIZE - 1 were outliers.

    Args:
        evidence: evidence of the decision, with flags, the same on all ranks.
        used_scale: 0-d float32, the loss scale that the backward used.
        loss: 0-d float32, the same on all ranks; NaN if not known.
        limit: definition of an outlier, with the window.
        numbers: numbers of the decision's Record. For an outlier, those from ``LIMITS`` on
            receive the loss, its median and its limit, the same of the norm, and ``sigmas``.
        flag: 0-d float32, which receives OUTLYING for an outlier, else ``evidence.loss_nonfinite``.
        backend: "auto", "triton" or "eager".
    """
    args = evidence, used_scale, loss, limit, numbers, flag
    OUTLIERS.run(backend, OUTLIERS.uses_triton(backend, used_scale), *args)


def new_window(device: torch.device) -> Tensor:
    """Return a window without values."""
    return torch.zeros(WINDOW, device=device)


def _step(tensors: list[Tensor], loss: float) -> tuple[Any, ...]:
    amax = torch.cat([t.flatten() for t in tensors]).abs().nan_to_num(1.0, 1.0)
    flag = amax.new_zeros(())
    window = amax.new_zeros(WINDOW)
    window[: 2 * SIZE] = 1.0 + torch.arange(2 * SIZE, device=amax.device) % 7
    window[-1] = SIZE + 5
    evidence = Evidence(amax, amax.square()[:1], flag, flag)
    numbers = amax.new_zeros(RECORD, dtype=torch.float64)
    return evidence, flag + 1.0, flag + loss, Limit(window, 6.0), numbers, flag.clone()


def _results(args: tuple[Any, ...], _: None) -> list[Tensor]:
    _, _, _, limit, numbers, flag = args
    return [flag, limit.window, numbers.float()]


OUTLIERS = Implementations(
    outliers_triton,
    outliers_torch,
    [
        ListSample(lambda tensors, _: _step(tensors, 3.0), _results, variant="usual"),
        ListSample(lambda tensors, _: _step(tensors, 1e6), _results, variant="outlier"),
    ],
)


def shipped() -> Iterator[Shipped]:
    """Yield the call of one step."""
    args = _step([torch.empty(64, device="meta")], 3.0)
    yield Shipped("outliers", outliers_triton, args, max_registers=224)
