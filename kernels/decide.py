"""The decision of a step: skip it or not, the factor on the gradients, and the next loss scale."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.kernels._implementations import Implementations
from tritonamp.kernels._launch import Launch
from tritonamp.kernels._lines import cached_by_shape
from tritonamp.kernels._sample import ListSample
from tritonamp.kernels._shipped import Shipped
from tritonamp.kernels._squares import LARGEST_SQUARE, NO_SQUARES, Squares
from tritonamp.kernels.device import tl, triton

_BLOCK = 1024

CLEAN, OVERFLOW, FAULT, OUTLIER, VETO, HUGE = range(6)
"""Outcomes of a decision: clean, a scale overflow, a forward fault, an outlier, a veto, or finite
gradients with squares beyond FP32. In a record these are the places of the numbers of such
decisions.
"""
NORM, AMAX, SQUARES, SCALE, SKIPPED, SKIPPED_SCALE, LOSS = range(6, 13)
"""Further places in a record.

- NORM, AMAX: total norm and largest magnitude of the last clean decision, both unscaled.
- SQUARES: bound of the squares that clean decisions have left in the optimizers' state.
- SCALE: scale that the last decision used.
- SKIPPED, SKIPPED_SCALE: outcome and scale of the last skipped decision.
- LOSS and the six after it: loss of the last outlier, its usual value and its limit; the same of
  the norm; the limits in standard deviations, as in kernels.outliers.
"""
RECORD = LOSS + 7  # numbers before a record's magnitudes
# Values of a loss's flag besides 0 and 1. A veto is the largest, because micro-batches and ranks
# combine flags with max, so that a veto survives.
OUTLYING = 2.0  # the step is an outlier
EXCEEDING = 2.5  # squares of the step's gradients leave FP32
VETOED = 3.0  # the caller wants a skip


class Evidence(NamedTuple):
    """Evidence of a decision: results of grad_stats, and two flags.

    Attributes:
        amax: magnitudes of all gradients that take part, float32 of shape (n,).
        square_sum: sums of squares of these gradients, float32 of shape (k,).
        loss_nonfinite: 0-d float32: 0; 1 if the loss was inf or NaN; OUTLYING if the step is an
            outlier; VETOED if the caller wants a skip, whatever loss and gradients are.
        found_earlier: 0-d float32, not 0 if gradients of the same loss that were judged earlier are
            to be skipped.
    """

    amax: Tensor
    square_sum: Tensor
    loss_nonfinite: Tensor
    found_earlier: Tensor


class ScaleRule(NamedTuple):
    """Movement of a loss scale. A fixed scale is ``min_scale == max_scale``.

    - Loss non-finite, an outlier, a veto, or huge gradients: nothing moves.
    - Gradients non-finite though the loss is finite: the growth count restarts. At the
      ``hysteresis``-th time without a clean step in between, the scale is multiplied by
      ``backoff_factor``, never below ``min_scale``.
    - Clean: after ``growth_interval`` clean steps in a row, or earlier if ``headroom`` allows it,
      the scale is multiplied by ``growth_factor``, never above ``max_scale``.

    With a positive ``headroom``, the scale also grows at each clean step while the largest scaled
    gradient would stay within ``headroom``, and the scale below its ceiling. An overflow after a
    clean step sets the ceiling; the ceiling is lifted when a ``growth_interval`` is over.
    """

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    hysteresis: int
    min_scale: float
    max_scale: float
    headroom: float = 0.0


class ScaleState(NamedTuple):
    """A loss scale and its memory, as 0-d tensors.

    Attributes:
        scale: float32.
        growth_tracker: int32, number of clean steps in a row.
        hysteresis_tracker: int32, number of overflows that are left before the scale backs off.
        ceiling: float32, highest scale that ``headroom`` lets grow.
    """

    scale: Tensor
    growth_tracker: Tensor
    hysteresis_tracker: Tensor
    ceiling: Tensor


class Record(NamedTuple):
    """The memory of decisions.

    Attributes:
        numbers: float64 of shape (19 + names,): numbers by place, then the scaled magnitudes of
            the last skipped decision by name.
        places: int64 of shape (names,): index of each name's gradient in the decision, or -1 for
            none.
    """

    numbers: Tensor
    places: Tensor


@triton.jit
def _next_scale(
    scale_ptr, growth_ptr, hysteresis_ptr, ceiling_ptr, found_inf, fault, largest,
    growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale, headroom,
):  # fmt: skip
    # All threads load, one stores: formally a race. A thread of a late warp may load new
    # values, but stores nothing itself. The thread that stores has loaded the old ones before.
    scale, tracker, patience = tl.load(scale_ptr), tl.load(growth_ptr), tl.load(hysteresis_ptr)
    ceiling = tl.load(ceiling_ptr)
    overflow = (found_inf != 0.0) & (fault == 0.0)
    clean = (found_inf == 0.0) & (fault == 0.0)
    lower = tl.maximum(scale * backoff_factor, min_scale)
    higher = tl.minimum(scale * growth_factor, max_scale)
    # A fault of the forward moves nothing, because a lower scale would not
    # help, and would sink for ever.
    # overflow: use up one unit of patience, back off when there is none left
    patience -= overflow.to(tl.int32)
    back_off = overflow & (patience <= 0)
    ceiling = tl.where(overflow & (tracker > 0), lower, ceiling)
    # clean: count, grow after growth_interval in a row, or where there is room
    tracker = tl.where(overflow, 0, tracker + clean.to(tl.int32))
    due = clean & (tracker >= growth_interval)
    grow = due | (clean & (largest * higher <= headroom) & (headroom > 0.0) & (higher <= ceiling))
    tl.store(scale_ptr, tl.where(back_off, lower, tl.where(grow, higher, scale)))
    tl.store(growth_ptr, tl.where(due, 0, tracker))
    tl.store(hysteresis_ptr, tl.where(clean, hysteresis, tl.maximum(patience, 0)))
    tl.store(ceiling_ptr, tl.where(due, max_scale, ceiling))


@triton.jit
def unscaled_amax(amax_ptr, n, inv_scale, BLOCK: tl.constexpr):
    """Return in parts whether an unscaled magnitude is inf or NaN, and the largest other one."""
    j = tl.arange(0, BLOCK)
    # 1/scale can leave FP32, as can a finite scaled gradient times it: look at the unscaled value
    bad = tl.zeros([BLOCK], tl.int32)
    largest = tl.zeros([BLOCK], tl.float32)
    for at in range(0, n, BLOCK):
        unscaled = tl.load(amax_ptr + at + j, mask=at + j < n, other=0.0) * inv_scale
        # NaN fails the comparison, too; integers, because a reduction of flags takes no booleans
        bad |= (unscaled < float("inf")).to(tl.int32) ^ 1
        largest = tl.maximum(largest, tl.where(unscaled < float("inf"), unscaled, 0.0))
    return bad, largest


@triton.jit
def total_norm(square_ptr, parts, inv_scale, BLOCK: tl.constexpr):
    """Return the norm of all unscaled gradients; FP64 holds the sum of any FP32 squares."""
    j = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float64)
    for at in range(0, parts, BLOCK):
        squares += tl.load(square_ptr + at + j, mask=at + j < parts, other=0.0).to(tl.float64)
    return tl.sqrt(tl.sum(squares, 0)).to(tl.float32) * inv_scale


@triton.jit(do_not_specialize=("n", "parts", "names", "growth_interval", "hysteresis"))
def decide_kernel(
    amax_ptr, square_ptr, fault_ptr, earlier_ptr, used_ptr, verdict_ptr,
    scale_ptr, growth_ptr, hysteresis_ptr, ceiling_ptr, numbers_ptr, places_ptr,
    n, parts, names, max_norm,
    growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale, headroom,
    keep, gain,
    CLIP: tl.constexpr, MOVE: tl.constexpr, RECORD: tl.constexpr, BLOCK: tl.constexpr,
    CLEAN: tl.constexpr, OVERFLOW: tl.constexpr, FAULT: tl.constexpr, OUTLIER: tl.constexpr,
    VETO: tl.constexpr, HUGE: tl.constexpr, NORM: tl.constexpr, AMAX: tl.constexpr,
    SQUARES: tl.constexpr, SCALE: tl.constexpr, SKIPPED: tl.constexpr,
    SKIPPED_SCALE: tl.constexpr, OUTLYING: tl.constexpr, EXCEEDING: tl.constexpr,
    VETOED: tl.constexpr, LARGEST_SQUARE: tl.constexpr,
):  # fmt: skip
    """Decide in one program. RECORD is the count of numbers before a record's magnitudes, or 0."""
    # The scale may be the one that moves below, so all threads load it before the
    # reductions, at which they meet.
    used, fault, earlier = tl.load(used_ptr), tl.load(fault_ptr), tl.load(earlier_ptr)
    # correctly rounded, so that a scale that is a power of two unscales exactly
    inv_scale = tl.div_rn(1.0, used)
    j = tl.arange(0, BLOCK)
    bad, largest = unscaled_amax(amax_ptr, n, inv_scale, BLOCK)
    # partial sums are added in one order, so that every run has the same bits
    norm = total_norm(square_ptr, parts, inv_scale, BLOCK)
    peak = tl.max(largest, 0)
    factor, clipped = inv_scale, peak
    if CLIP:
        coefficient = tl.div_rn(max_norm, norm + 1e-6)
        coefficient = tl.where(coefficient > 1.0, 1.0, coefficient)  # minimum would drop a NaN
        factor *= coefficient
        clipped *= coefficient
    nonfinite = (tl.max(bad, 0) != 0) | ((tl.abs(factor) < float("inf")) == 0)
    # a square that leaves FP32 would stay inf in the optimizer's state for ever
    squares = clipped.to(tl.float64) * clipped.to(tl.float64) * gain
    if RECORD > 0:
        squares += tl.load(numbers_ptr + SQUARES) * keep
    # a huge square is the cause only if nothing else is: the other causes have counts of their own
    no_other = (nonfinite == 0) & (fault == 0.0) & (earlier == 0.0)
    fault = tl.where(no_other & (squares > LARGEST_SQUARE), EXCEEDING, fault)
    found_inf = (nonfinite | (fault != 0.0) | (earlier != 0.0)).to(tl.float32)
    tl.store(verdict_ptr, found_inf)
    tl.store(verdict_ptr + 1, norm)
    tl.store(verdict_ptr + 2, factor)
    tl.store(verdict_ptr + 3, fault)
    # after the verdict, which belongs to the scale that the backward used
    if MOVE:
        _next_scale(
            scale_ptr, growth_ptr, hysteresis_ptr, ceiling_ptr, found_inf, fault, peak,
            growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale,
            headroom,
        )  # fmt: skip
    if RECORD > 0:
        outcome = tl.where(fault != 0.0, FAULT, tl.where(found_inf != 0.0, OVERFLOW, CLEAN))
        outcome = tl.where(fault == EXCEEDING, HUGE, outcome)
        outcome = tl.where(fault == OUTLYING, OUTLIER, outcome)
        outcome = tl.where(fault == VETOED, VETO, outcome)
        # as in _next_scale: the thread that stores the count has loaded it before
        tl.store(numbers_ptr + outcome, tl.load(numbers_ptr + outcome) + 1.0)
        tl.store(numbers_ptr + SCALE, used.to(tl.float64))
        if outcome == CLEAN:
            tl.store(numbers_ptr + NORM, norm.to(tl.float64))
            tl.store(numbers_ptr + AMAX, peak.to(tl.float64))
            tl.store(numbers_ptr + SQUARES, squares)
        else:
            tl.store(numbers_ptr + SKIPPED, outcome.to(tl.float64))
            tl.store(numbers_ptr + SKIPPED_SCALE, used.to(tl.float64))
            # for the message of a skip: which gradients were not
            # finite, of up to any number of names
            for at in range(0, names, BLOCK):
                place = tl.load(places_ptr + at + j, mask=at + j < names, other=-1)
                amax = tl.load(amax_ptr + place, mask=place >= 0, other=0.0)
                tl.store(numbers_ptr + RECORD + at + j, amax.to(tl.float64), mask=at + j < names)


def decide_triton(
    evidence: Evidence,
    used_scale: Tensor,
    max_norm: float | None,
    state: ScaleState | None,
    rule: ScaleRule,
    squares: Squares,
    record: Record | None,
    verdict: Tensor,
) -> None:
    # pointers have to point somewhere, also without a scale to move and without a record
    moved = state or (used_scale,) * 4
    numbers, places = record or (evidence.amax,) * 2
    # numel() instead of len(), which is written in Python for tensors, and slow
    lengths = evidence.amax.numel(), evidence.square_sum.numel(), places.numel() if record else 0
    launch = _launch_of(lengths, max_norm, rule, squares, state is not None, record is not None)
    launch(*evidence, used_scale, verdict, *moved, numbers, places)


# a steady run decides with the same numbers in each step, so the launch is kept
@cached_by_shape
def _launch_of(
    lengths: tuple[int, int, int],
    max_norm: float | None,
    rule: ScaleRule,
    squares: Squares,
    moves: bool,
    records: bool,
) -> Launch:
    sizes = (*lengths, float(max_norm or 0.0), *_numbers(rule), *squares)
    clips, numbers = max_norm is not None, RECORD if records else 0
    flags = OUTLYING, EXCEEDING, VETOED
    # the kernel's names of outcomes and places are numbers from 0 on
    constants = (clips, moves, numbers, _BLOCK, *range(LOSS), *flags, LARGEST_SQUARE)
    return Launch(decide_kernel, (1, 1, 1), sizes, constants, 4)


def decide_torch(
    evidence: Evidence,
    used_scale: Tensor,
    max_norm: float | None,
    state: ScaleState | None,
    rule: ScaleRule,
    squares: Squares,
    record: Record | None,
    verdict: Tensor,
) -> None:
    amax, square_sum, loss_nonfinite, found_earlier = evidence
    inv_scale = used_scale.double().reciprocal().float()
    norm = square_sum.double().sum().sqrt().float() * inv_scale
    # a decision may have no gradients, and max refuses an empty tensor
    largest = clipped = torch.cat([amax, amax.new_zeros(1)]).max() * inv_scale
    factor = inv_scale
    if max_norm is not None:
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        factor, clipped = inv_scale * coefficient, largest * coefficient
    # 1/scale can leave FP32, as can a finite scaled gradient times it: look at the unscaled value
    nonfinite = ~torch.isfinite(amax * inv_scale).all() | ~torch.isfinite(factor)
    # a square that leaves FP32 would stay inf in the optimizer's state for ever
    bound = squares.gain * clipped.double().square()
    if record is not None:
        bound = squares.keep * record.numbers[SQUARES] + bound
    no_other = ~nonfinite & (loss_nonfinite == 0) & (found_earlier == 0)
    flag = torch.where(no_other & (bound > LARGEST_SQUARE), EXCEEDING, loss_nonfinite)
    found_inf = (nonfinite | (flag != 0) | (found_earlier != 0)).float()
    if record is not None:
        _note(record, amax, torch.stack([norm, largest, bound]), found_inf, flag, used_scale)
    if state is not None:  # after all uses of used_scale, which may be state.scale itself
        _move_scale(state, rule, found_inf, flag, largest)
    verdict.copy_(torch.stack([found_inf, norm, factor, flag]))


def _move_scale(
    state: ScaleState, rule: ScaleRule, found_inf: Tensor, loss_nonfinite: Tensor, largest: Tensor
) -> None:
    scale, growth_tracker, hysteresis_tracker, ceiling = state
    fault = loss_nonfinite != 0  # of the forward, which a lower scale cannot help
    overflow = (found_inf != 0) & ~fault
    clean = ~fault & ~overflow
    lower = (scale * rule.backoff_factor).clamp(min=rule.min_scale)
    higher = (scale * rule.growth_factor).clamp(max=rule.max_scale)

    # overflow: use up one unit of patience, back off when there is none left
    patience = hysteresis_tracker - overflow.int()
    back_off = overflow & (patience <= 0)
    ceiling.copy_(torch.where(overflow & (growth_tracker > 0), lower, ceiling))
    # clean: count, grow after growth_interval in a row, or where there is room
    tracker = (growth_tracker + clean) * ~overflow
    due = clean & (tracker >= rule.growth_interval)
    grow = due
    if rule.headroom > 0:
        grow = due | (clean & (largest * higher <= rule.headroom) & (higher <= ceiling))

    scale.copy_(torch.where(back_off, lower, torch.where(grow, higher, scale)))
    growth_tracker.copy_(tracker * ~due)
    hysteresis_tracker.copy_(
        torch.where(clean, torch.full_like(patience, rule.hysteresis), patience.clamp(min=0))
    )
    ceiling.copy_(torch.where(due, torch.full_like(ceiling, rule.max_scale), ceiling))


def _note(
    record: Record,
    amax: Tensor,
    of_clean: Tensor,
    found_inf: Tensor,
    flag: Tensor,
    used_scale: Tensor,
) -> None:
    fault = flag != 0
    outcome = FAULT * fault + OVERFLOW * ((found_inf != 0) & ~fault)
    for value, slot in ((EXCEEDING, HUGE), (OUTLYING, OUTLIER), (VETOED, VETO)):
        outcome = torch.where(flag == value, slot, outcome)
    numbers, places = record
    # in place, so that a CUDA graph that captured these tensors continues to count
    numbers[:NORM] += torch.arange(NORM, device=outcome.device) == outcome
    numbers[NORM:SCALE] = torch.where(outcome == CLEAN, of_clean, numbers[NORM:SCALE])
    numbers[SCALE].copy_(used_scale)
    found = torch.cat([amax, amax.new_zeros(1)])[places]  # place -1: the zero
    last = torch.stack([outcome.float(), used_scale]).double()
    for part, values in ((numbers[SKIPPED:LOSS], last), (numbers[RECORD:], found.double())):
        part.copy_(torch.where(outcome != CLEAN, values, part))


def decide(
    evidence: Evidence,
    used_scale: Tensor,
    max_norm: float | None,
    state: ScaleState | None,
    rule: ScaleRule,
    squares: Squares,
    record: Record | None,
    verdict: Tensor,
    backend: str = "auto",
) -> None:
    """Judge the gradients of one decision, move the loss scale, and note the outcome.

    Args:
        evidence: facts of the gradients and losses.
        used_scale: 0-d float32, the loss scale that the backward used.
        max_norm: total 2-norm to clip the unscaled gradients to
            (``torch.nn.utils.clip_grad_norm_``), or None.
        state: loss scale to move by ``rule``, or None.
        rule: rule of the loss scale's movement.
        squares: squares of the optimizers that step, by which the record's bound moves.
        record: memory of decisions, updated in place, or None.
        verdict: float32 of shape (4,), which receives found_inf (not 0: skip), the norm of the
            unscaled gradients, the factor from a scaled gradient to the one to step with (1/scale
            times the clip coefficient), and the flag ``evidence.loss_nonfinite`` or EXCEEDING.
        backend: "auto", "triton" or "eager".
    """
    args = evidence, used_scale, max_norm, state, rule, squares, record, verdict
    DECIDE.run(backend, DECIDE.uses_triton(backend, used_scale), *args)


def _numbers(rule: ScaleRule) -> tuple[float, ...]:
    """Return the rule's numbers for a kernel, which distinguishes integers and floats by type."""
    growth, backoff, interval, hysteresis, *limits = map(float, rule)
    return growth, backoff, int(interval), int(hysteresis), *limits


def _decision(tensors: list[Tensor], overflow: bool) -> tuple[Any, ...]:
    amax = torch.cat([t.flatten() for t in tensors]).abs()
    amax[-1] = float("inf") if overflow else 1.0
    flag, names = amax.new_zeros(()), 8
    evidence = Evidence(amax, amax.square(), flag, flag)
    numbers = amax.new_zeros(RECORD + names, dtype=torch.float64)
    record = Record(numbers, torch.arange(names, device=amax.device))
    tracker = flag.new_ones((), dtype=torch.int32)
    state = ScaleState(flag + 1024.0, tracker, tracker.clone(), flag + 4096.0)
    rule, squares = ScaleRule(2.0, 0.5, 2, 1, 2.0**-24, 2.0**24), Squares(0.75, 0.25)
    return evidence, flag + 1024.0, 0.5, state, rule, squares, record, amax.new_zeros(4)


def _decided(args: tuple[Any, ...], _: None) -> list[Tensor]:
    """Return the tensors that a decision wrote, with the record's numbers as FP32 values."""
    return [args[-1], *args[3], args[6].numbers.float()]


DECIDE = Implementations(
    decide_triton,
    decide_torch,
    [
        ListSample(lambda t, _: _decision(t, False), _decided, variant="clean"),
        ListSample(lambda t, _: _decision(t, True), _decided, variant="overflow"),
    ],
)


def shipped() -> Iterator[Shipped]:
    """Yield a decision with all its parts, and a bare one."""
    everything = _decision([torch.empty(64, device="meta")], False)
    yield Shipped("decide", decide_triton, everything)
    evidence, scale, _, _, rule, _, _, verdict = everything
    bare = evidence, scale, None, None, rule, NO_SQUARES, None, verdict
    yield Shipped("decide only", decide_triton, bare)
