"""Whether a batch that runs again gives the bits of its first run: the batch, or the hardware."""

import enum
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from tritonamp.diagnosis.replay.faults import listed, number
from tritonamp.diagnosis.replay.nondeterministic_ops import nondeterministic
from tritonamp.diagnosis.replay.repeating import (
    Bits,
    differing_outputs,
    has_gradients,
    note_traits,
    read,
    run_again,
)
from tritonamp.diagnosis.skips import Skip, ranks_in_words
from tritonamp.kernels._decision import OUTLIER, OVERFLOW
from tritonamp.step.forwards import MOST, Forwards
from tritonamp.step.snapshots import Snapshot

_NO_OPS = (
    "Torch lists no op that ran as nondeterministic, so the hardware of {where} is suspected: test "
    "its memory and its GPU, or leave it out.{unless}"
)
_ADDED = " It is not to blame if gradients were not zeroed before, or if a hook has changed them."
_OPS = (
    "Ops that torch lists as nondeterministic ran: {ops}. Under "
    "torch.use_deterministic_algorithms(True) their bits repeat, or they raise an error."
)


class Verdict(enum.Enum):
    """The result of further runs of a batch. The value is the name that users see."""

    REPRODUCED = "reproduced"  # the batch or the model is to blame
    NOT_TWICE = "not reproduced twice"  # nondeterministic ops are to blame
    OTHER_BITS = "other bits"  # the hardware is suspected
    SMALLER = "smaller gradients"  # on this rank; other ranks may explain the skip


class Repeat(NamedTuple):
    """The verdict on the batches of a skip, of one rank or of all.

    Attributes:
        verdict: the verdict.
        words: report; "" where the verdict needs none.
        share: under SMALLER, the part of the gradients that this rank explains at most.
        limit: under SMALLER, the sum of all shares from which on the ranks explain the skip.
        ops: nondeterministic ops that ran.
    """

    verdict: Verdict
    words: str = ""
    share: float = 0.0
    limit: float = 0.0
    ops: Sequence[str] = ()

    @property
    def clears_code(self) -> bool:
        """Whether neither batch, model nor loss is to blame."""
        return self.verdict in (Verdict.NOT_TWICE, Verdict.OTHER_BITS)


class Place(NamedTuple):
    """The rank that runs batches again.

    Attributes:
        rank: number of the rank.
        members: number of ranks that train together.
    """

    rank: int
    members: int

    @property
    def on_rank(self) -> str:
        """The rank after a verdict: " on rank 1", or "" if there is no other."""
        return f" on rank {self.rank}" if self.members > 1 else ""


def repeat_of(
    models: list[nn.Module],
    batches: Sequence[Snapshot],
    skip: Skip,
    place: Place,
    forwards: Forwards | None,
) -> Repeat | None:
    """Run batches again, with their backward where gradients arrived, and compare bits.

    Bits of outputs are compared with those of the first run. Gradients are judged by the reason of
    the skip: whether they are not finite, or their norm is beyond the limit, in a later run, too.

    Args:
        models: the enabled models.
        batches: forwards of the last skip.
        skip: the skip.
        place: this rank.
        forwards: record of forwards, if nothing has changed since the skip, so that bits can be
            compared with those of the first run; None: only later runs are compared.

    Returns:
        the verdict; None: it is not known whether the first run should have had the bits of later
            ones.

    Raises:
        BatchGoneError: a batch is gone, or has changed.
        CollectiveError: a forward or backward communicates with other ranks.
    """
    traits = note_traits(models, batches)
    again = run_again(models, batches, traits.writes)
    is_same = forwards is not None and not any(map(forwards.ran_before_last, batches))
    is_same = is_same and not traits.unlike_first
    outputs = _other_outputs(batches, again) if is_same else None
    gradients = gradients_again(skip, batches, again, place)
    if gradients is not None and gradients.verdict is Verdict.SMALLER:
        gradients = gradients if is_same else None
    elif not outputs and (gradients is not None or (outputs == [] and not _is_of_gradients(skip))):
        return Repeat(Verdict.REPRODUCED)
    later = run_again(models, batches, traits.writes)
    differences = again.differences(later)
    in_output = bool(outputs) or any(not n.startswith("gradient of ") for n in differences)
    # outputs do not depend on ops of the backward
    ran = traits.forward_ops if in_output else [*traits.forward_ops, *traits.backward_ops]
    ops = nondeterministic(ran)
    if differences and not ops:
        # a fault is rare: two of three runs agree, unless code has a state, or a clock
        third = run_again(models, batches, traits.writes)
        agree = not third.differences(again) or not third.differences(later)
        if traits.keeps_state or not agree:
            return None
    if differences:
        seen = f"two more runs of this batch differ from each other: {listed(differences)}"
        return verdict_on(seen, ops, place.on_rank)
    if outputs:
        seen = f"two more runs of this batch agree, and differ from the first: {listed(outputs)}"
        return verdict_on(seen, ops, place.on_rank)
    if gradients is None or place.members > 1:
        return gradients and gradients._replace(ops=ops)
    return verdict_on(gradients.words, ops, only_gradients=True)


def verdict_on(
    seen: str, ops: Sequence[str], where: str = "", only_gradients: bool = False
) -> Repeat:
    """Return the verdict on runs with different results.

    Args:
        seen: the difference, in words.
        ops: nondeterministic ops that ran.
        where: words for the rank that differs; "": there is no other.
        only_gradients: whether the outputs of the first run had the same bits.
    """
    if ops:
        verdict, why = Verdict.NOT_TWICE, _OPS.format(ops=listed(ops))
        return Repeat(verdict, f"{verdict.value}{where}: {seen}. {why}", ops=ops)
    unless = _ADDED if only_gradients else ""
    why = _NO_OPS.format(where=where.removeprefix(" on ") or "this machine", unless=unless)
    return Repeat(Verdict.OTHER_BITS, f"{Verdict.OTHER_BITS.value}{where}: {seen}. {why}")


def repeat_of_all(found: Mapping[int, Repeat | None]) -> Repeat | None:
    """Return one verdict of all ranks, each on its own batches.

    A rank with other bits comes first. Where each rank explains only smaller gradients than those
    that the ranks exchanged, one of them had other bits.
    """
    known = [repeat for repeat in found.values() if repeat is not None]
    for verdict in (Verdict.OTHER_BITS, Verdict.NOT_TWICE):
        same = [repeat for repeat in known if repeat.verdict is verdict]
        if same:
            words = "\n".join(dict.fromkeys(repeat.words for repeat in same))
            return same[0]._replace(words=words)
    if len(known) < len(found) or any(r.verdict is Verdict.SMALLER for r in known):
        return _of_shares(list(found), known)
    return known[0]


def _of_shares(ranks: Sequence[int], known: Sequence[Repeat]) -> Repeat | None:
    """Return a verdict if no rank alone, and no sum over ranks, explains the gradients."""
    small = [repeat for repeat in known if repeat.verdict is Verdict.SMALLER]
    if len(small) < len(ranks) or sum(r.share for r in small) >= small[0].limit:
        return None
    ops = list(dict.fromkeys(op for repeat in small for op in repeat.ops))
    seen = f"{small[0].words}, on each rank"
    return verdict_on(seen, ops, f" on one of {ranks_in_words(ranks)}", only_gradients=True)


def _other_outputs(batches: Sequence[Snapshot], again: Bits) -> list[str] | None:
    """Return the outputs, in words, whose bits differ from the first run's; None: not known."""
    first = [read(batch.sums) for batch in batches]
    if not any(value is not None for values in first for value in values):
        return None
    pairs = zip(first, again.outputs, strict=True)
    return list(dict.fromkeys(name for one, two in pairs for name in differing_outputs(one, two)))


def _is_of_gradients(skip: Skip) -> bool:
    """Return whether gradients were the reason of a skip, and the loss was not."""
    if skip.outcome == OUTLIER:
        return not skip.outlier[0] > skip.outlier[2]
    return skip.outcome == OVERFLOW


def gradients_again(
    skip: Skip, batches: Sequence[Snapshot], again: Bits, place: Place
) -> Repeat | None:
    """Return the verdict on the gradients of another run; None: they cannot be judged."""
    whole = len(batches) < MOST and all(b.ran_one_backward and has_gradients(b) for b in batches)
    # other parameters may wait for a decision of their own
    names = [name for name in again.largest if name in skip.amax or not skip.amax]
    if not whole or not names or not _is_of_gradients(skip):
        return None
    if skip.outcome == OUTLIER:
        return _norm_again(skip, math.hypot(*(again.norms[name] for name in names)), place)
    largest = [again.largest[name] for name in names]
    if not all(map(math.isfinite, largest)):
        return Repeat(Verdict.REPRODUCED)
    bad = [name for name, amax in skip.amax.items() if not skip.is_good(amax)]
    named = f" of {listed(bad)}" if bad else ""
    words = f"gradients{named} were inf or NaN, and are finite in two more runs, which agree"
    share = max(largest) if place.members > 1 else 0.0
    return Repeat(Verdict.SMALLER, words, share, again.limit)


def _norm_again(skip: Skip, norm: float, place: Place) -> Repeat:
    """Return the verdict on the norm of another run, or on this rank's share of the norm."""
    share, limit = norm / skip.scale / place.members, skip.outlier[5]
    if place.members == 1 and share > limit:
        return Repeat(Verdict.REPRODUCED)
    first, later = number(skip.outlier[3]), number(norm / skip.scale)
    words = f"the gradient norm was {first}, and is {later} in two more runs, which agree"
    return Repeat(Verdict.SMALLER, words, share, limit)
