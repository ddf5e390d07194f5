"""A skipped step: its facts, its possible causes, and the words for each."""

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.diagnosis.divergence import Fp32Run, Growth
from tritonamp.diagnosis.replay.faults import listed
from tritonamp.diagnosis.terms import IN_A_LOOP, Terms
from tritonamp.kernels._decision import HUGE, OVERFLOW
from tritonamp.kernels._squares import LARGEST_SQUARE
from tritonamp.names import short

_FP32_MAX = torch.finfo(torch.float32).max
_HALF_MAX = torch.finfo(torch.float16).max
MANY = 3  # overflows in a row from which on the scale may not be the cause
_BY_FUNCTION = (
    " print(amp.explain(replay=lambda: criterion(model(x), y))), with that batch and your own "
    "loss, names the operation."
)
_REPLAY = f" on_nonfinite='explain', or{_BY_FUNCTION}"


class Cause(enum.Enum):
    """Why a step was skipped. The value is the name that users see."""

    DATA = "data"
    FORWARD = "forward fault"
    SCALE = "scale overflow"
    BACKWARD = "backward fault"
    PARAMETERS = "bad parameters"
    DIVERGENCE = "divergence"
    EXHAUSTED = "scale exhausted"
    OUTLIER = "outlier"
    VETO = "veto"
    HUGE = "huge gradient"

    @property
    def advice(self) -> str:
        """Advice, as for float16. "{where}" stands for the suspects."""
        return _ADVICE[self]

    def advice_of(self, skip: "Skip") -> str:
        """Return ``advice`` for the format that the step was in."""
        return self.advice if skip.in_float16 else _WITHOUT_HALF.get(self, self.advice)

    @property
    def replayable(self) -> bool:
        """Whether running the batch again may name the operation."""
        return self in (Cause.FORWARD, Cause.BACKWARD, Cause.EXHAUSTED)


_WITHOUT_HALF = {
    Cause.FORWARD: (
        "Look in {where} for 0/0, logarithms and roots of 0 or less, and rows that are masked "
        "completely."
    ),
    Cause.PARAMETERS: (
        "Skipped steps leave parameters alone, so something else wrote them: a loaded checkpoint, "
        "an initialisation, or an averaged copy. Load the last good checkpoint."
    ),
}
"""Advice where nothing is in float16."""

_ADVICE = {
    Cause.DATA: "Clean the data, or drop these samples.",
    Cause.FORWARD: (
        "A lower scale cannot help. Look in {where} for values above 65504, constants such as -1e9 "
        "or eps=1e-8 that float16 cannot hold, 0/0, logarithms and roots of 0 or less, and rows "
        "that are masked completely."
    ),
    Cause.SCALE: "single skips of this kind are how it finds its level.",
    Cause.BACKWARD: (
        "Look in the loss, and in the backward of the last module named, for sqrt and norms at 0, "
        "division by 0 behind a mask, and logarithms."
    ),
    Cause.PARAMETERS: (
        "Skipped steps leave parameters alone, so something else wrote them: a loaded checkpoint, "
        "an initialisation, an averaged copy, or a weight above 65504 that float16 cannot hold. "
        "Load the last good checkpoint."
    ),
    Cause.DIVERGENCE: "The weights are spoilt: begin again, or from the last good checkpoint.",
    Cause.EXHAUSTED: (
        "The scale is at its minimum, so the gradients overflow by themselves: look for inf and "
        "NaN in the backward of the last module named, or train it in FP32 with fp32_modules."
    ),
    Cause.OUTLIER: (
        "Look at the batch; a run that really changes its level goes on after 4 such skips. "
        "skip_outliers=None takes every step."
    ),
    Cause.VETO: "The loss scale, parameters and optimizer state are as they were.",
    Cause.HUGE: (
        "A step would leave inf in the state for ever, and these weights would never move again. A "
        "lower scale cannot help: look at the batch, and in the backward of the last module named "
        "for a division by nearly 0."
    ),
}


_EACH_HAS_NUMBERS = Cause.DATA, Cause.OUTLIER, Cause.HUGE
"""Causes whose texts differ from skip to skip by facts that matter."""


class Writer(NamedTuple):
    """The optimizer that steps on a parameter."""

    name: str  # name of the class
    lr: float | None  # for that parameter; None: the optimizer has none
    dtype: torch.dtype  # dtype of the values that the optimizer steps on
    zero_eps: float | None = None  # eps of the optimizer, if its step divides by an eps of zero
    least_eps: float = 1e-8  # an eps that its step can divide by
    decay: float | None = None  # weight_decay, if each step takes lr * weight_decay of a weight
    master: Tensor | None = None  # the FP32 values of a half parameter
    optimizer: Any = None  # None: not known
    stepped: Tensor | None = None  # the tensor in the groups of the optimizer

    def __str__(self) -> str:
        return self.name if self.lr is None else f"{self.name}, lr={self.lr:g}"

    @property
    def decays_away(self) -> bool:
        """Whether weight decay alone makes weights grow at each step."""
        return self.decay is not None and self.lr is not None and self.lr * self.decay > 2.0

    @property
    def can_be_clipped(self) -> bool:
        """Whether clipped gradients make its steps small: not so for Adam, or a rate above 1."""
        return self.name in ("SGD", "ASGD") and self.lr is not None and self.lr <= 1.0

    @property
    def fault(self) -> str:
        """The mistake in steps that have written inf or NaN, and advice."""
        if self.zero_eps is None and self.lr is not None and not math.isfinite(self.lr):
            return "The learning rate is not finite: look in its scheduler"
        if self.zero_eps is None:
            in_fp32 = ", or take level='O2', which steps in FP32 and skips what overflows"
            return f"Lower the learning rate{in_fp32 if self.dtype.itemsize < 4 else ''}"
        least = f"Give an eps of {self.least_eps:g} or more"
        if self.zero_eps == 0.0:
            return f"eps=0, so a gradient that is 0 is divided by 0. {least}"
        return (
            f"eps={self.zero_eps:g} is 0 in {short(self.dtype)}, so a small gradient is divided by "
            f"0. {least}, or level='O2', which steps in FP32"
        )


class Steps(NamedTuple):
    """The known facts about the steps before a skip."""

    writers: Mapping[str, Writer] = {}  # by name of a parameter
    growth: Callable[[], Growth] = Growth  # in these steps
    in_fp32: Callable[[], Fp32Run | None] | None = None  # runs the batch again; None: not allowed
    clips: bool = False  # whether the loop clips gradients already


NO_STEPS = Steps()


class Overflow(NamedTuple):
    """The facts of an overflow that explain later ones."""

    scale: float
    nan: frozenset[str]  # names of the parameters with NaN; empty where inf was among gradients


class Skip(NamedTuple):
    """A skipped step as the device recorded it."""

    outcome: int  # FAULT, OVERFLOW, OUTLIER, VETO or HUGE
    step: int  # number of the step, from 1
    exact: bool  # False: it was that step or one before it, whose numbers were not read
    skipped: int  # number of steps skipped so far, this one included
    # where bad parameters skipped the steps before, the number of the first of those; else ``step``
    since: int
    scale: float  # the loss scale that the backward used
    lowest: float  # smallest scale that the rule allows
    fixed: bool  # whether the scale never moves
    amax: Mapping[str, float]  # by name, the largest scaled gradient
    before: float  # the largest unscaled gradient of the last good step, 0 if there was none
    limit: float  # the largest number of the policy's half format
    # if several ranks decided, the largest scaled gradient of each; under FAULT, whether its
    # own loss was inf or NaN; under VETO, whether it had one of these, or a veto
    by_rank: Mapping[int, float] = {}
    wrote: int = 0  # number of the step that wrote the parameters last; 0: not known, or no step
    loss: float | None = None  # None: it is inf, NaN or not known
    # the loss, the usual one and its limit, the same of the norm, and how many standard deviations
    # the limits are away
    outlier: tuple[float, ...] = ()
    row: Sequence[Overflow] = ()  # overflows directly before this one, the oldest first
    hysteresis: int = 1  # number of overflows without a step between that lower the scale once
    has_gradient_in_loss: bool = False  # the loss contains the gradient of a scaled tensor

    @property
    def in_float16(self) -> bool:
        """Whether the policy computes in float16."""
        return self.limit == _HALF_MAX

    @property
    def nan(self) -> frozenset[str]:
        """Names of the parameters with NaN in the gradient; empty where inf was among gradients."""
        bad = {name: amax for name, amax in self.amax.items() if not self.is_good(amax)}
        return frozenset(bad) if all(map(math.isnan, bad.values())) else frozenset()

    @property
    def is_one_of_many(self) -> bool:
        """Whether it is at least the third overflow in a row."""
        return len(self.row) + 1 >= MANY

    @property
    def scales(self) -> str:
        """The loss scales of the overflows in a row, this one included, in words."""
        scales = *(overflow.scale for overflow in self.row), self.scale
        tried = list(dict.fromkeys(f"{scale:g}" for scale in scales))
        if len(tried) > MANY:
            return f"loss scales from {tried[0]} to {tried[-1]}"
        *others, last = tried
        return f"loss scales {', '.join(others)} and {last}" if others else f"loss scale {last}"

    @property
    def at_fault(self) -> list[int]:
        """The ranks at fault; none where there is only one rank."""
        if self.outcome == HUGE:
            return [rank for rank, largest in self.by_rank.items() if self.is_huge(largest)]
        if self.outcome != OVERFLOW:
            return [rank for rank, nonfinite in self.by_rank.items() if nonfinite]
        return [rank for rank, largest in self.by_rank.items() if not self.is_good(largest)]

    @property
    def ranks(self) -> str:
        """The ranks at fault, as "rank 3"; "" where there is only one rank."""
        return ranks_in_words(self.at_fault) if self.at_fault else ""

    def is_good(self, magnitude: float) -> bool:
        """Return whether a scaled gradient of that magnitude is finite, and stays so unscaled."""
        return math.isfinite(magnitude) and magnitude / self.scale <= _FP32_MAX

    def is_huge(self, magnitude: float) -> bool:
        """Return whether the square of that scaled gradient, unscaled, is beyond FP32."""
        return (magnitude / self.scale) ** 2 > LARGEST_SQUARE


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 3, 4"."""
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"


class Explanation(NamedTuple):
    """The explanation of a skip."""

    skip: Skip
    cause: Cause
    reason: str  # the reason in words, and advice
    parameters: tuple[str, ...] = ()  # whose gradients, or values, were not finite
    terms: Terms = IN_A_LOOP  # of its text
    search: str = ""  # the part of ``reason`` that says where to look

    @property
    def text(self) -> str:
        """The skip in one line: "step 17 skipped (3 of 17): forward fault: ..."."""
        return self.line()

    def line(self, *facts: str) -> str:
        """Return ``text`` with more facts inside its parentheses."""
        return f"{self._start(facts)}: {self.terms.told(self.reason)}"

    def with_place(self) -> "Explanation":
        """Return the explanation without advice where to look, because a report names the place."""
        if not self.search:
            return self
        return self._replace(reason=self.reason.replace(f" {self.search}", ""), search="")

    def without_advice(self) -> "Explanation":
        """Return the explanation without advice, because neither batch nor code is to blame."""
        found = self.with_place()
        advice = self.cause.advice
        reason = found.reason.replace(f"; {advice}", ".").replace(f" {advice}", "")
        return found._replace(reason=reason)

    def with_report(self, report: str) -> str:
        """Return ``text``, and the report of a replay below it."""
        return f"{self.text}\n{self.terms.told(report)}"

    def short_line(self, earlier: "Explanation", *facts: str) -> str:
        """Return a line that refers to an earlier explanation, which this one ``repeats``."""
        return (
            f"{self._start(facts)}, as in step {earlier.skip.step} (loss scale {self.skip.scale:g})"
        )

    def _start(self, facts: Sequence[str]) -> str:
        step = self.skip.step
        number = f"{step}" if self.skip.exact else f"<= {step}"
        all_facts = ", ".join([f"{self.skip.skipped} of {step}", *facts])
        return f"step {number} skipped ({all_facts}): {self.cause.value}"

    def repeats(self, earlier: "Explanation") -> bool:
        """Return whether an earlier explanation differs in steps and scales at most."""
        if self.cause is not earlier.cause or self.skip.outcome != earlier.skip.outcome:
            return False
        if self.cause is Cause.SCALE:
            return len(self.skip.row) + 1 != MANY
        if self.cause in _EACH_HAS_NUMBERS:
            return self.reason == earlier.reason
        return self.parameters == earlier.parameters

    @property
    def hint(self) -> str:
        """Advice on how to find out more, to append to the text; "" where nothing would help."""
        if self.cause is Cause.SCALE and self.skip.is_one_of_many:
            return self.terms.told(_BY_FUNCTION)
        if not self.cause.replayable:
            return ""
        return self.terms.told(_REPLAY if self.terms.handle == "amp" else _BY_FUNCTION)

    @property
    def needs_help(self) -> bool:
        """Whether the user has to act: not for a scale that finds its level, or a wanted skip."""
        return self.cause not in (Cause.SCALE, Cause.OUTLIER, Cause.VETO)
