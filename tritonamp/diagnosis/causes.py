"""Why a step was skipped: from what the device noted, the batch and the parameters."""

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tritonamp.kernels.decide import FAULT

_FP32_MAX = torch.finfo(torch.float32).max
# times the gradients of the step before: more than a scale that is looking for its level runs into
_SUDDEN = 256
_RUNNING = ("running_mean", "running_var")  # other buffers may hold -inf on purpose: masks
_SHOWN = 8  # names or samples in a text


class _Facts(NamedTuple):
    words: str
    advice: str
    replayable: bool = False
    scale_moves: bool = False
    lasting: bool = False


class Cause(enum.Enum):
    """Why a step was skipped. The value is the name in words that users see.

    Attributes:
        advice: what to do; "{where}" in it stands for the suspects.
        replayable: running the batch again may name the operation.
        scale_moves: a lower loss scale is the answer; nobody has to do anything.
        lasting: it does not go away by itself, so its text says since when it is there.
    """

    advice: str
    replayable: bool
    scale_moves: bool
    lasting: bool

    def __new__(
        cls, words: str, advice: str, replayable: bool, scale_moves: bool, lasting: bool
    ) -> "Cause":
        cause = object.__new__(cls)
        cause._value_ = words
        cause.advice = advice
        cause.replayable = replayable
        cause.scale_moves = scale_moves
        cause.lasting = lasting
        return cause

    DATA = _Facts("data", "Clean the data, or drop these samples.")
    FORWARD = _Facts(
        "forward fault",
        "A lower scale cannot help. Look in {where} for values above 65504, constants such as -1e9 "
        "or eps=1e-8 that float16 cannot hold, 0/0 and rows that are masked completely.",
        replayable=True,
    )
    SCALE = _Facts(
        "scale overflow",
        "The scale was lowered; single skips of this kind are how it finds its level.",
        scale_moves=True,
    )
    BACKWARD = _Facts(
        "backward fault",
        "A lower scale does not help: look in the backward of the last module named for sqrt and "
        "norms at 0, division by 0 behind a mask, and logarithms.",
        replayable=True,
    )
    PARAMETERS = _Facts(
        "bad parameters",
        "Skipped steps leave parameters alone, so something else wrote them: a loaded checkpoint, "
        "an initialisation, an averaged copy, or a weight above 65504 that float16 cannot hold. "
        "Load the last good checkpoint.",
        lasting=True,
    )
    EXHAUSTED = _Facts(
        "scale exhausted",
        "The scale is at its minimum, so the gradients overflow by themselves: look for inf and "
        "NaN in the backward of the last module named, or train it in FP32 with fp32_modules.",
        replayable=True,
    )


_FIXED = (
    "The scale is fixed, so it cannot back off: give a lower loss_scale, or 'dynamic', which finds "
    "its level by itself."
)
_REPLAY = (
    " on_nonfinite='explain', or amp.explain(replay=True) with the batch at hand, names the "
    "operation."
)

Batch = Sequence[tuple[str, Tensor]]
"""Tensors, and where they were among the arguments of a forward."""


class Skip(NamedTuple):
    """A skipped step as the device saw it.

    Attributes:
        outcome: FAULT or OVERFLOW.
        step: its number, from 1.
        exact: False: it was that step or one before, whose numbers nobody has read.
        skipped: how many steps were skipped so far, this one included.
        since: where bad parameters skipped the steps before, the number of the first of those;
            else ``step``.
        scale: the loss scale that the backward used.
        lowest: the scale below which it does not go.
        fixed: whether the scale never moves.
        amax: by name, the largest scaled gradient.
        before: the largest unscaled gradient of the last good step, 0 if there was none.
        limit: the largest number of the policy's half format.
        by_rank: where several ranks decided, for each the largest scaled gradient; under FAULT,
            whether its own loss was inf or NaN.
    """

    outcome: int
    step: int
    exact: bool
    skipped: int
    since: int
    scale: float
    lowest: float
    fixed: bool
    amax: Mapping[str, float]
    before: float
    limit: float
    by_rank: Mapping[int, float] = {}

    @property
    def ranks(self) -> str:
        """The ranks at fault, as "rank 3"; "" where there is only one rank."""
        found = [str(rank) for rank, largest in self.by_rank.items() if not self.is_good(largest)]
        if self.outcome == FAULT:
            found = [str(rank) for rank, nonfinite in self.by_rank.items() if nonfinite]
        return f"rank{'s' * (len(found) > 1)} {_listed(found)}" if found else ""

    def is_good(self, magnitude: float) -> bool:
        """Return whether a scaled gradient of that magnitude is finite, and stays so unscaled."""
        return math.isfinite(magnitude) and magnitude / self.scale <= _FP32_MAX


class Explanation(NamedTuple):
    """What became known about a skip.

    Attributes:
        skip: the skip it explains.
        cause: why the step was skipped.
        reason: why in words, and what to do.
        parameters: the names of those that were not finite.
    """

    skip: Skip
    cause: Cause
    reason: str
    parameters: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The skip in one line: "step 17 skipped (3 of 17): forward fault: ..."."""
        return self.line()

    def line(self, *facts: str) -> str:
        """Return ``text`` with more facts inside its parentheses."""
        step = self.skip.step
        number = f"{step}" if self.skip.exact else f"<= {step}"
        listed = ", ".join([f"{self.skip.skipped} of {step}", *facts])
        return f"step {number} skipped ({listed}): {self.cause.value}: {self.reason}"

    @property
    def hint(self) -> str:
        """How to find out more, to be appended to the text; "" where nothing would help."""
        return _REPLAY if self.cause.replayable else ""

    @property
    def needs_help(self) -> bool:
        """Whether it is more than the loss scale finding its level."""
        return not self.cause.scale_moves


def find_cause(
    skip: Skip, batches: Sequence[Batch], parameters: Mapping[Tensor, str]
) -> Explanation:
    """Find the cause of a skip. Waits for the device, but not where a scale merely finds its level.

    Args:
        skip: the skip.
        batches: the data of the forwards that led to it, as far as it is known.
        parameters: of the model, and buffers, with their names.
    """
    if skip.outcome == FAULT:
        fault = (
            _in_data(skip, batches)
            or _in_parameters(skip, parameters)
            or _in_forward(skip, bool(batches))
        )
        return fault._replace(reason=fault.reason + _buffers(parameters))
    names = tuple(name for name, amax in skip.amax.items() if not skip.is_good(amax))
    cause = _of_overflow(skip, names)
    found = None if cause.scale_moves else _in_parameters(skip, parameters)
    return found or Explanation(skip, cause, _why_overflow(skip, names, cause), names)


def _of_overflow(skip: Skip, names: Sequence[str]) -> Cause:
    if skip.scale <= skip.lowest and not (skip.fixed and skip.scale <= 1.0):
        return Cause.EXHAUSTED
    if skip.scale <= 1.0:
        return Cause.BACKWARD  # nothing was scaled up
    sudden = 0.0 < skip.before * skip.scale * _SUDDEN < skip.limit
    nan = any(math.isnan(skip.amax[name]) for name in names)
    return Cause.BACKWARD if sudden and nan else Cause.SCALE


def _why_overflow(skip: Skip, names: Sequence[str], cause: Cause) -> str:
    shown = [f"{name} ({'NaN' if math.isnan(skip.amax[name]) else 'inf'})" for name in names]
    others = f"{skip.ranks or 'some parameters'} were not. "
    return (
        f"the loss was finite, but at loss scale {skip.scale:g} the gradients of "
        + (f"{len(names)} parameter(s) were not: {_listed(shown)}. " if names else others)
        + (_FIXED if cause is Cause.EXHAUSTED and skip.fixed else cause.advice)
    )


def _in_forward(skip: Skip, knows_batch: bool) -> Explanation:
    batch = ", and the input batch was not" if knows_batch else ""
    if skip.ranks:
        batch = f" on {skip.ranks}{batch}"
    suspects = "the model and the loss" if knows_batch else "the batch, the model and the loss"
    advice = Cause.FORWARD.advice.format(where=suspects)
    reason = f"the loss itself was inf or NaN (loss scale {skip.scale:g}){batch}. {advice}"
    return Explanation(skip, Cause.FORWARD, reason)


def _in_data(skip: Skip, batches: Sequence[Batch]) -> Explanation | None:
    found = []
    for batch in batches:
        for path, tensor in batch:
            bad = _bad_samples(tensor)
            if bad:
                kind = "sample(s)" if tensor.dim() > 1 else "element(s)"
                shape = tuple(tensor.shape)
                found.append(f"input {path}: inf or NaN in {kind} {_listed(bad)} of shape {shape}")
    if not found:
        return None
    reason = (
        "the input batch itself held inf or NaN, and the loss became so, too: "
        f"{'; '.join(found[:_SHOWN])}. {Cause.DATA.advice}"
    )
    return Explanation(skip, Cause.DATA, reason)


def _bad_samples(tensor: Tensor) -> list[int]:
    bad = ~torch.isfinite(tensor.detach())
    if tensor.dim() > 1:
        bad = bad.flatten(1).any(1)
    found: list[int] = bad.reshape(-1).nonzero().flatten().tolist()
    return found


def _in_parameters(skip: Skip, parameters: Mapping[Tensor, str]) -> Explanation | None:
    names = _nonfinite((p, name) for p, name in parameters.items() if isinstance(p, nn.Parameter))
    if not names:
        return None
    when = f"since step {skip.since}" if skip.since < skip.step else f"at step {skip.step}"
    reason = (
        f"{len(names)} parameter(s) of the model were inf or NaN already, seen {when}: "
        f"{_listed(names)}. {Cause.PARAMETERS.advice}"
    )
    return Explanation(skip, Cause.PARAMETERS, reason, tuple(names))


def _buffers(parameters: Mapping[Tensor, str]) -> str:
    """Return what to add if running statistics, which a skip leaves as they are, are not finite."""
    running = ((t, name) for t, name in parameters.items() if name.rpartition(".")[2] in _RUNNING)
    names = _nonfinite(running)
    if not names:
        return ""
    return (
        " Running statistics are inf or NaN, too, and stay so until reset_running_stats(): "
        f"{_listed(names)}. Evaluation uses them."
    )


def _nonfinite(named: Iterable[tuple[Tensor, str]]) -> list[str]:
    dense = [
        (t.detach(), name)
        for t, name in named
        if t.is_floating_point() and t.layout is torch.strided
    ]
    flags = [torch.isfinite(t).all() for t, _ in dense]
    return [name for flag, (_, name) in zip(flags, dense, strict=True) if not flag]


def _listed(items: Sequence[Any]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(map(str, items[:_SHOWN])) + more
