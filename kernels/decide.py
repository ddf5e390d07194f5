"""The decision of a step: skip it or not, the factor on the gradients, and the next loss scale."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._decision import (
    EXCEEDING,
    LIMITS,
    OUTLYING,
    RECORD,
    SQUARES,
    VETOED,
    Evidence,
    Record,
    Undo,
    Verdict,
    keep_for_undo,
    new_verdicts,
    nonfinite_flag,
    note,
    total_norm,
    unscaled_amax,
    unscaling,
)
from tritonamp.kernels._implementations import Implementations
from tritonamp.kernels._launch import Launch
from tritonamp.kernels._lines import cached_by_shape
from tritonamp.kernels._loss_scale import (
    ScaleRule,
    ScaleState,
    move_scale,
    next_scale,
    numbers_of,
)
from tritonamp.kernels._sample import ListSample
from tritonamp.kernels._shipped import Shipped
from tritonamp.kernels._squares import LARGEST_SQUARE, NO_SQUARES, Squares
from tritonamp.kernels.device import tl, triton, widened

_BLOCK = 1024


@triton.jit(do_not_specialize=("n", "parts", "names", "growth_interval", "hysteresis"))
def decide_kernel(
    amax_ptr, square_ptr, fault_ptr, earlier_ptr, loss_ptr, used_ptr, verdict_ptr,
    scale_ptr, growth_ptr, hysteresis_ptr, ceiling_ptr, numbers_ptr, places_ptr, before_ptr,
    n, parts, names, max_norm,
    growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale, headroom,
    keep, gain,
    FLAGGED: tl.constexpr, KNOWN: tl.constexpr, CLIP: tl.constexpr, MOVE: tl.constexpr,
    RECORD: tl.constexpr, UNDO: tl.constexpr, BLOCK: tl.constexpr,
    CLEAN: tl.constexpr, OVERFLOW: tl.constexpr, FAULT: tl.constexpr, OUTLIER: tl.constexpr,
    VETO: tl.constexpr, HUGE: tl.constexpr, NORM: tl.constexpr, AMAX: tl.constexpr,
    SQUARES: tl.constexpr, SCALE: tl.constexpr, SKIPPED: tl.constexpr,
    SKIPPED_SCALE: tl.constexpr, LOSS: tl.constexpr, OUTLYING: tl.constexpr,
    EXCEEDING: tl.constexpr, VETOED: tl.constexpr, LARGEST_SQUARE: tl.constexpr,
):  # fmt: skip
    """Decide in one program.

    FLAGGED, KNOWN, CLIP, MOVE and UNDO say which arguments are given: the two flags, the loss,
    max_norm, a scale to move, and memory for an Undo. RECORD is the count of numbers before a
    record's magnitudes, or 0.
    """
    j = tl.arange(0, BLOCK)
    # The scale and the numbers may be those that move below, so all threads load them before the
    # reductions, at which they meet.
    if UNDO:
        keep_for_undo(
            before_ptr, numbers_ptr, RECORD + names,
            scale_ptr, growth_ptr, hysteresis_ptr, ceiling_ptr, MOVE, BLOCK // 4,
        )  # fmt: skip
    used = tl.load(used_ptr)
    loss = tl.load(loss_ptr).to(tl.float64) if KNOWN else float("nan")
    if FLAGGED:
        fault, earlier = tl.load(fault_ptr), tl.load(earlier_ptr)
    else:
        fault = tl.zeros([], tl.float32)
        if KNOWN:
            fault = ((tl.abs(loss) < float("inf")) == 0).to(tl.float32)
        earlier = fault
    # correctly rounded, so that a scale that is a power of two unscales exactly
    inv_scale = tl.div_rn(1.0, used)
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
    tl.store(verdict_ptr + 4, norm)
    tl.store(verdict_ptr + 8, factor)
    tl.store(verdict_ptr + 12, fault)
    # after the verdict, which belongs to the scale that the backward used
    if MOVE:
        next_scale(
            scale_ptr, growth_ptr, hysteresis_ptr, ceiling_ptr, found_inf, fault, peak,
            growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale,
            headroom,
        )  # fmt: skip
    if RECORD > 0:
        outcome = tl.where(fault != 0.0, FAULT, tl.where(found_inf != 0.0, OVERFLOW, CLEAN))
        outcome = tl.where(fault == EXCEEDING, HUGE, outcome)
        outcome = tl.where(fault == OUTLYING, OUTLIER, outcome)
        outcome = tl.where(fault == VETOED, VETO, outcome)
        # as in next_scale: the thread that stores the count has loaded it before
        tl.store(numbers_ptr + outcome, tl.load(numbers_ptr + outcome) + 1.0)
        tl.store(numbers_ptr + SCALE, used.to(tl.float64))
        tl.store(numbers_ptr + LOSS, loss)
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
    verdict: Verdict,
    undo: Undo | None = None,
) -> None:
    # pointers have to point somewhere, also without an argument
    moved = state or (used_scale,) * 4
    amax, square_sum, fault, earlier, loss = evidence
    numbers, places = (amax,) * 2 if record is None else record[:2]
    before = numbers if undo is None else undo.memory
    # numel() instead of len(), which is written in Python for tensors, and slow
    lengths = amax.numel(), square_sum.numel(), places.numel() if record else 0
    given = fault is not None, loss is not None, max_norm is not None, state is not None
    constants = *given, RECORD if record else 0, undo is not None
    # the dtype of the loss, because a launch keeps the kernel that it has found
    kind = lengths, max_norm, rule, squares, constants, None if loss is None else loss.dtype
    fault = used_scale if fault is None else fault
    earlier = used_scale if earlier is None else earlier
    known = amax, square_sum, fault, earlier, used_scale if loss is None else loss
    _launch_of(*kind)(*known, used_scale, verdict.numbers, *moved, numbers, places, before)
    if undo is not None:
        undo.is_filled = True


# a steady run decides with the same numbers in each step, so the launch is kept
@cached_by_shape
def _launch_of(
    lengths: tuple[int, int, int],
    max_norm: float | None,
    rule: ScaleRule,
    squares: Squares,
    constants: tuple[Any, ...],
    _: torch.dtype | None,
) -> Launch:
    sizes = (*lengths, float(max_norm or 0.0), *numbers_of(rule), *squares)
    flags = OUTLYING, EXCEEDING, VETOED
    # the kernel's names of outcomes and places are numbers from 0 on
    constants = (*constants, _BLOCK, *range(LIMITS), *flags, LARGEST_SQUARE)
    return Launch(decide_kernel, (1, 1, 1), sizes, constants, 4)


def decide_torch(
    evidence: Evidence,
    used_scale: Tensor,
    max_norm: float | None,
    state: ScaleState | None,
    rule: ScaleRule,
    squares: Squares,
    record: Record | None,
    verdict: Verdict,
    undo: Undo | None = None,
) -> None:
    amax, square_sum, loss_nonfinite, found_earlier, loss = evidence
    if undo is not None:
        undo.fill()
    if loss_nonfinite is None or found_earlier is None:
        known = torch.zeros_like(used_scale) if loss is None else loss
        loss_nonfinite = found_earlier = nonfinite_flag(known)
    inv_scale, norm = unscaling(square_sum, used_scale)
    # a decision may have no gradients, and max refuses an empty tensor
    largest = clipped = torch.cat([amax, amax.new_zeros(1)]).max() * inv_scale
    factor = inv_scale
    if max_norm is not None:
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        factor, clipped = inv_scale * coefficient, largest * coefficient
    # 1/scale can leave FP32, as can a finite scaled gradient times it: look at the unscaled value
    nonfinite = ~torch.isfinite(amax * inv_scale).all() | ~torch.isfinite(factor)
    # a square that leaves FP32 would stay inf in the optimizer's state for ever
    # without a gain it is 0, also where the square is beyond FP32
    bound = widened(clipped).square() * squares.gain if squares.gain else widened(clipped * 0.0)
    if record is not None:
        bound = squares.keep * record.numbers[SQUARES] + bound
    no_other = ~nonfinite & (loss_nonfinite == 0) & (found_earlier == 0)
    flag = torch.where(no_other & (bound > LARGEST_SQUARE), EXCEEDING, loss_nonfinite)
    found_inf = (nonfinite | (flag != 0) | (found_earlier != 0)).float()
    if record is not None:
        of_clean = torch.stack([norm, largest, bound])
        note(record, amax, of_clean, found_inf, flag, used_scale, loss)
    if state is not None:  # after all uses of used_scale, which may be state.scale itself
        move_scale(state, rule, found_inf, flag, largest)
    verdict.numbers.copy_(torch.stack([found_inf, norm, factor, flag]))


def decide(
    evidence: Evidence,
    used_scale: Tensor,
    max_norm: float | None,
    state: ScaleState | None,
    rule: ScaleRule,
    squares: Squares,
    record: Record | None,
    verdict: Verdict,
    backend: str = "auto",
    undo: Undo | None = None,
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
        verdict: memory for the results, from ``new_verdicts``.
        backend: "auto", "triton" or "eager".
        undo: memory for the old values of ``record``, which must be given, and of ``state``.
    """
    args = evidence, used_scale, max_norm, state, rule, squares, record, verdict, undo
    DECIDE.run(backend, DECIDE.uses_triton(backend, used_scale), *args)


def _decision(tensors: list[Tensor], overflow: bool) -> tuple[Any, ...]:
    amax = torch.cat([t.flatten() for t in tensors]).abs()
    amax[-1] = float("inf") if overflow else 1.0
    zero, names = amax.new_zeros(()), 8
    evidence = Evidence(amax, amax.square(), None, None, zero + 3.0)
    numbers = amax.new_zeros(RECORD + names, dtype=torch.float64)
    record = Record(numbers, torch.arange(names, device=amax.device), [])
    tracker = zero.new_ones((), dtype=torch.int32)
    state = ScaleState(zero + 1024.0, tracker, tracker.clone(), zero + 4096.0)
    rule, squares = ScaleRule(2.0, 0.5, 2, 1, 2.0**-24, 2.0**24), Squares(0.75, 0.25)
    verdict, undo = new_verdicts(1, amax.device)[0], Undo(record, state)
    return evidence, zero + 1024.0, 0.5, state, rule, squares, record, verdict, undo


def _decided(args: tuple[Any, ...], _: None) -> list[Tensor]:
    """Return the tensors that a decision wrote, with float64 numbers as FP32 values."""
    state, record, verdict, undo = args[3], args[6], args[7], args[8]
    return [verdict.numbers, *state, record.numbers.float(), undo.memory.float()]


DECIDE = Implementations(
    decide_triton,
    decide_torch,
    [
        ListSample(lambda t, _: _decision(t, False), _decided, variant="clean"),
        ListSample(lambda t, _: _decision(t, True), _decided, variant="overflow"),
    ],
)


def shipped() -> Iterator[Shipped]:
    """Yield a decision with all its parts but flags, and a bare one with flags alone."""
    everything = _decision([torch.empty(64, device="meta")], False)
    yield Shipped("decide", decide_triton, everything)
    (amax, square_sum, *_), scale, _, _, rule, _, _, verdict, _ = everything
    evidence = Evidence(amax, square_sum, scale, scale)
    bare = evidence, scale, None, None, rule, NO_SQUARES, None, verdict
    yield Shipped("decide only", decide_triton, bare)
