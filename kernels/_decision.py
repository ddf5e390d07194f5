"""What a decision knows, what it notes, and how it is undone."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonamp.kernels._loss_scale import ScaleState
from tritonamp.kernels.device import is_capturing, tl, triton, wide_dtype, widened

CLEAN, OVERFLOW, FAULT, OUTLIER, VETO, HUGE = range(6)
"""Outcomes of a decision: clean, a scale overflow, a forward fault, an outlier, a veto, or finite
gradients with squares beyond FP32. In a record these are the places of the numbers of such
decisions.
"""
COUNTS = {
    "clean": CLEAN,
    "scale_overflows": OVERFLOW,
    "forward_faults": FAULT,
    "outliers": OUTLIER,
    "vetoes": VETO,
    "huge_gradients": HUGE,
}
"""Name of each outcome in states, to the outcome's place in a record. CLEAN comes first."""
NORM, AMAX, SQUARES, SCALE, SKIPPED, SKIPPED_SCALE, LOSS, LIMITS = range(6, 14)
"""Further places in a record.

- NORM, AMAX: total norm and largest magnitude of the last clean decision, both unscaled.
- SQUARES: bound of the squares that clean decisions have left in the optimizers' state.
- SCALE: scale that the last decision used.
- SKIPPED, SKIPPED_SCALE: outcome and scale of the last skipped decision.
- LOSS: loss of the last decision; NaN: not known.
- LIMITS and the six after it: loss of the last outlier, its usual value and its limit; the same of
  the norm; the limits in standard deviations, as in kernels.outliers.
"""
RECORD = LIMITS + 7  # numbers before a record's magnitudes
# Values of a loss's flag besides 0 and 1. A veto is the largest, because micro-batches and ranks
# combine flags with max, so that a veto survives.
OUTLYING = 2.0  # the step is an outlier
EXCEEDING = 2.5  # squares of the step's gradients leave FP32
VETOED = 3.0  # the caller wants a skip


_APART = 4  # distance of two numbers of a verdict


class Evidence(NamedTuple):
    """Evidence of a decision: results of grad_stats, two flags, and the loss.

    Attributes:
        amax: magnitudes of all gradients that take part, float32 of shape (n,).
        square_sum: sums of squares of these gradients, float32 of shape (k,).
        loss_nonfinite: 0-d float32: 0; 1 if the loss was inf or NaN; OUTLYING if the step is an
            outlier; VETOED if the caller wants a skip, whatever loss and gradients are. None: the
            decision finds the flag by ``loss``. Then ``found_earlier`` is None, too.
        found_earlier: 0-d float32, not 0 if gradients of the same loss that were judged earlier are
            to be skipped.
        loss: 0-d float32 or float64; None: not known, and finite.
    """

    amax: Tensor
    square_sum: Tensor
    loss_nonfinite: Tensor | None
    found_earlier: Tensor | None
    loss: Tensor | None = None


class Record(NamedTuple):
    """The memory of decisions.

    Attributes:
        numbers: float64 of shape (20 + names,), float32 on a device without float64: numbers by
            place, then the scaled magnitudes of the last skipped decision by name.
        places: int64 of shape (names,): index of each name's gradient in the decision, or -1 for
            none.
        spare: memory of earlier ``Undo``.
    """

    numbers: Tensor
    places: Tensor
    spare: list[Tensor]


class Undo:
    """The numbers that a decision is about to move. A call restores their old values, once.

    ``decide`` writes the old values of record and scale to ``memory``, without a launch of its own.

    Args:
        record: record of the decision.
        state: loss scale that ``decide`` moves, or None.
        others: tensors that other operations move. They are copied at once.

    Attributes:
        memory: the record's numbers, then the scale's, in the record's dtype.
        is_filled: whether ``memory`` holds the old values.
    """

    def __init__(
        self, record: Record, state: ScaleState | None, others: Sequence[Tensor] = ()
    ) -> None:
        numbers = record.numbers
        # a CUDA graph writes to the memory of its own decisions in each replay
        self._spare = [] if is_capturing(numbers.device) else record.spare
        if self._spare:
            self.memory = self._spare.pop()
        else:
            self.memory = numbers.new_empty(numbers.numel() + len(ScaleState._fields))
        self.is_filled = False
        self._moved = [numbers, *(state or ())]
        self._copies = [(tensor, tensor.clone()) for tensor in others] if others else []

    def fill(self) -> None:
        """Write the old values to ``memory``, as the kernel of ``decide`` does."""
        torch._foreach_copy_(self._old_values(), self._moved)
        self.is_filled = True

    def _old_values(self) -> list[Tensor]:
        size = self._moved[0].numel()
        return [self.memory[:size], *self.memory[size:].unbind()][: len(self._moved)]

    def __call__(self, unless: Tensor | None = None) -> None:
        """Restore the tensors, once.

        Args:
            unless: 0-d flag; the tensors stay as they are if it is not 0. None: always restore.
        """
        filled = zip(self._moved, self._old_values(), strict=True) if self.is_filled else ()
        # In place: kernels, and graphs that have captured them, know the tensors by their
        # addresses. The copies are older than ``memory``, so they come last.
        for tensor, value in [*filled, *self._copies]:
            tensor.copy_(value if unless is None else torch.where(unless != 0, tensor, value))
        self._copies.clear()
        self.drop()

    def drop(self) -> None:
        """Give the memory to later decisions, because this decision is final."""
        self.is_filled = False
        self._spare.append(self.memory)


@triton.jit
def keep_for_undo(
    before_ptr, numbers_ptr, size, scale_ptr, growth_ptr, hysteresis_ptr, ceiling_ptr,
    MOVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the numbers of the record, then those of the scale, to the memory of an ``Undo``."""
    j = tl.arange(0, BLOCK)
    for at in range(0, size, BLOCK):
        numbers = tl.load(numbers_ptr + at + j, mask=at + j < size)
        tl.store(before_ptr + at + j, numbers, mask=at + j < size)
    if MOVE:
        before_ptr += size
        tl.store(before_ptr, tl.load(scale_ptr).to(tl.float64))
        tl.store(before_ptr + 1, tl.load(growth_ptr).to(tl.float64))
        tl.store(before_ptr + 2, tl.load(hysteresis_ptr).to(tl.float64))
        tl.store(before_ptr + 3, tl.load(ceiling_ptr).to(tl.float64))


class Verdict(NamedTuple):
    """The results of ``decide``: float32 tensors in one piece of memory, 0-d except ``numbers``.

    Attributes:
        numbers: the three others and ``flag``, of shape (4,) and stride (4,).
        found_inf: not 0 if the optimizers skip.
        norm: 2-norm of the unscaled gradients.
        grad_scale: factor from a scaled gradient to the one to step with: 1/scale times the clip
            coefficient.
    """

    numbers: Tensor
    found_inf: Tensor
    norm: Tensor
    grad_scale: Tensor

    @property
    def flag(self) -> Tensor:
        """``Evidence.loss_nonfinite`` or EXCEEDING, 0-d; few steps need it."""
        return self.numbers[3]


def new_verdicts(count: int, device: torch.device) -> list[Verdict]:
    """Return memory for ``count`` verdicts in one piece, which costs about as much as for one."""
    # Each number is at a multiple of 16 bytes, because launches that read it are found faster then.
    block = torch.empty((count, 4, _APART), dtype=torch.float32, device=device)
    by_name = block.as_strided((3, count), (_APART, 4 * _APART)).unbind()
    fields = block[..., 0].unbind(), *[row.unbind() for row in by_name]
    return [Verdict(*verdict) for verdict in zip(*fields, strict=True)]


def nonfinite_flag(loss: Tensor) -> Tensor:
    """Return 1 if any element of ``loss`` is inf or NaN, else 0: 0-d float32 on its device."""
    # Not 0 of inf and NaN alone: fewer launches than isfinite. Not in place, which would save one
    # more: DTensor refuses that for a loss of which each rank has a summand.
    nonfinite = (loss - loss) != 0
    return (nonfinite.any() if nonfinite.dim() else nonfinite).float()


def note(
    record: Record,
    amax: Tensor,
    of_clean: Tensor,
    found_inf: Tensor,
    flag: Tensor,
    used_scale: Tensor,
    loss: Tensor | None,
) -> None:
    """Note a decision in its record, as the kernel of ``decide`` does.

    Args:
        record: record to update.
        amax: magnitudes of all gradients, scaled.
        of_clean: values of NORM, AMAX and SQUARES after a clean decision.
        found_inf: first number of the verdict.
        flag: last number of the verdict.
        used_scale: loss scale that the backward used.
        loss: loss of the decision, or None.
    """
    fault = flag != 0
    outcome = FAULT * fault + OVERFLOW * ((found_inf != 0) & ~fault)
    for value, slot in ((EXCEEDING, HUGE), (OUTLYING, OUTLIER), (VETOED, VETO)):
        outcome = torch.where(flag == value, slot, outcome)
    numbers, places = record.numbers, record.places
    # in place, so that a CUDA graph that captured these tensors continues to count
    numbers[:NORM] += torch.arange(NORM, device=outcome.device) == outcome
    numbers[NORM:SCALE] = torch.where(outcome == CLEAN, of_clean, numbers[NORM:SCALE])
    numbers[SCALE].copy_(used_scale)
    numbers[LOSS] = torch.nan if loss is None else loss
    found = torch.cat([amax, amax.new_zeros(1)])[places]  # place -1: the zero
    last = torch.stack([outcome.float(), used_scale])
    for part, values in ((numbers[SKIPPED:LOSS], last), (numbers[RECORD:], found)):
        part.copy_(torch.where(outcome != CLEAN, values.to(part.dtype), part))


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


def unscaling(square_sum: Tensor, used_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1/scale and the norm of all unscaled gradients, 0-d FP32, as the kernels do."""
    inv_scale = widened(used_scale).reciprocal().float()
    if wide_dtype(square_sum.device) is torch.float64:
        return inv_scale, square_sum.double().sum().sqrt().float() * inv_scale
    # FP32 holds the sum in units of the largest square; 0 and inf are no units
    largest = torch.cat([square_sum, square_sum.new_zeros(1)]).max()
    unit = torch.where((largest > 0) & (largest < torch.inf), largest, 1.0)
    return inv_scale, (square_sum / unit).sum().sqrt() * unit.sqrt() * inv_scale
