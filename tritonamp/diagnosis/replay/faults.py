"""The report about a fault: its place, its effect, its reason, and advice."""

import linecache
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tritonamp.diagnosis.replay.known_ops import family
from tritonamp.diagnosis.replay.verdicts import REASONS, VERDICTS, Event
from tritonamp.names import short

BY_FUNCTION = "print(amp.explain(replay=lambda: criterion(model(x), y)))"
"""The call that runs a loss again."""
WHOLE, BFLOAT16 = 'level="O0"', "dtype=torch.bfloat16"
"""Advice: compute the whole model in FP32, or in bfloat16."""


class Remedy(NamedTuple):
    """The remedies that were tried on the batch of a fault, one at a time.

    Attributes:
        modules: modules that computed in FP32 in a run that passed.
        results: modules that had FP32 results in that run.
        bfloat16: whether the model passed in bfloat16.
        fp32: whether the whole model passed in FP32, where a few modules did not.
        edits: edits of the code and the policy that passed, as advice.
        vain: all remedies that did not pass.
        too_large: whether a result is too large for its format, so that ``modules`` are the first
            advice.
        forward_only: whether these runs had no backward.
        costs: the cost of ``results`` and ``modules`` in words; "" if it is not known.
    """

    modules: tuple[str, ...] = ()
    bfloat16: bool = False
    fp32: bool = False
    edits: tuple[str, ...] = ()
    vain: tuple[str, ...] = ()
    too_large: bool = False
    forward_only: bool = False
    results: tuple[str, ...] = ()
    costs: str = ""

    @property
    def helps(self) -> bool:
        """Whether the batch passes in another precision."""
        return bool(self.in_tiers) or self.bfloat16 or self.fp32

    @property
    def in_tiers(self) -> tuple[str, ...]:
        """Modules with FP32 results, then modules in FP32."""
        return (*self.results, *self.modules)

    @property
    def fields(self) -> str:
        """The fields of a policy that ask for ``results`` and ``modules``."""
        results = f"fp32_results={[*self.results]}" if self.results else ""
        modules = f"fp32_modules={[*self.modules]}" if self.modules else ""
        return ", ".join(filter(None, [results, modules]))

    @property
    def knows_precision(self) -> bool:
        """Whether other precisions were tried."""
        return self.helps or WHOLE in self.vain

    @property
    def _passes(self) -> str:
        return f"tried: the {'forward' if self.forward_only else 'batch'} passes"

    def _in_fp32(self) -> Iterator[str]:
        """Yield the advice for wider modules, or the whole model in FP32, if that passed."""
        if self.results:
            also = f", and keep {listed(self.modules)} in FP32" if self.modules else ""
            yield f"let products have FP32 results{also}: {self.fields} ({self._passes})"
        elif self.modules and "" not in self.modules:
            alone = f"; {self.modules[0]} alone only moves the fault"
            which, more = ("it", "") if len(self.modules) == 1 else ("them", alone)
            names = list(self.modules)
            yield f"keep {which} in FP32: fp32_modules={names} ({self._passes}{more})"
        elif self.modules or self.fp32:
            yield f"compute the whole model in FP32: {WHOLE} ({self._passes})"

    @property
    def words(self) -> str:
        """Advice: all remedies that passed; "" if none did."""
        edits = [
            e if e.endswith(")") and "(tried" in e else f"{e} ({self._passes})" for e in self.edits
        ]
        in_fp32 = list(self._in_fp32())
        found = [*in_fp32, *edits] if self.too_large else [*edits, *in_fp32]
        if self.bfloat16:
            found.append(f"train in bfloat16: {BFLOAT16} ({self._passes})")
        text = "; or ".join(found)
        return f"{text[:1].upper()}{text[1:]}." if found else ""

    @property
    def tried_edits(self) -> bool:
        """Whether edits were tried in vain, apart from those that only compute in FP32."""
        precision = (WHOLE, BFLOAT16, "fp32_modules", "fp32_results", "set ")
        return any(not v.startswith(precision) and "float()" not in v for v in self.vain)

    @property
    def in_vain(self) -> str:
        """The remedies that did not pass, in words; "" if all did, or none was tried."""
        precision = WHOLE in self.vain and (BFLOAT16 in self.vain or not self.bfloat16)
        names = [tried for tried in self.vain if not precision or tried not in (WHOLE, BFLOAT16)]
        words = f"{'; '.join(names)}. " if names else ""
        if precision and BFLOAT16 in self.vain:
            words += NO_PRECISION_HELPS
        elif precision:
            words += "FP32 does not help: it was tried on this batch."
        return words.strip()


@dataclass(frozen=True)
class FaultReport:
    """The first op that made inf or NaN out of finite numbers. ``str()`` is the report.

    Attributes:
        kind: a key of ``VERDICTS``: "matmul_overflow", "masked_row", "scale_too_high"...
        event: observations at the op, with its ``place``.
        outcome: effect on the loss or the gradients.
        silent: whether the result of the forward is finite, and wrong.
        harmless: whether the overflow vanished, and made no later op wrong.
        difference: largest difference of the result from FP32's, and the largest number in FP32's;
            None: not compared.
        scale: loss scale of the backward.
        fits: largest loss scale that works.
        names: names of the parameters, inputs or gradients that are not finite.
        has_backward: whether the run has a backward, if its forward has no fault.
        replayed: whether the forward gave the same bits as the first time.
        remedy: result of the tried remedies; None: none was tried.
        untried: why no remedy was tried, if ``remedy`` is None.
        rank: rank whose batch it was; None: there are no other ranks.
        reproduced: whether a skipped step had this fault, too, so that batch or model is to blame.
    """

    kind: str
    event: Event
    outcome: str = ""
    silent: bool = False
    harmless: bool = False
    difference: tuple[float, float] | None = None
    scale: float = 1.0
    fits: float | None = None
    names: tuple[str, ...] = ()
    has_backward: bool = False
    replayed: str = "not checked"
    remedy: Remedy | None = None
    untried: str = "the batch could not run again"
    rank: int | None = None
    reproduced: bool = False

    @property
    def module(self) -> str | None:
        """Full name of the module to blame, as ``fp32_modules`` takes it.

        "" is the model; None: the fault is outside the model.
        """
        return self.event.place.module

    @property
    def op(self) -> str:
        """The op that the user called."""
        return self.event.place.op

    @property
    def amax(self) -> float:
        """The largest finite magnitude among the op's inputs."""
        return max((operand.amax for operand in self.event.inputs), default=math.nan)

    @property
    def multiple(self) -> float | None:
        """The exact result in units of the format's maximum."""
        return self.event.multiple

    @property
    def why(self) -> str:
        """The reason of the fault, in one sentence."""
        return VERDICTS[self.kind].why.format(**self._words())

    @property
    def advice(self) -> str:
        """Advice: remedies that were tried, else those that could not be, and why."""
        hint = VERDICTS[self.kind].hint.format(**self._words())
        if self.kind == "scale_too_high":
            more = self.remedy.words if self.remedy is not None else ""
            return f"{hint} Or: {more[0].lower()}{more[1:]}" if more else hint
        if self.remedy is None:
            return f"{hint} (Not tried: {_UNTRIED.get(self.kind, self.untried)}.)"
        if self.remedy.words:
            return self.remedy.words
        return _NONE_HELPS if self.remedy.tried_edits else f"{hint} (Not tried: {_NO_EDIT}.)"

    def _words(self) -> dict[str, str]:
        event = self.event
        constants = [s for s in event.scalars if abs(s) > torch.finfo(event.dtype).max]
        return {
            "value": number(event.exact),
            "multiple": number(self.multiple),
            "limit": number(torch.finfo(event.dtype).max),
            "format": short(event.dtype),
            "amax": number(self.amax),
            "scalar": number(constants[0] if constants else None),
            "eps": number(event.eps and event.eps[0]),
            "eps_format": short(event.eps[1]) if event.eps else "",
            "op": self.op,
            "argument": "zero" if event.zero else "out of its range",
            "reason": self._reason(),
            "softmax": f" ({event.softmax})" if event.softmax else "",
            "read_format": short(event.inputs[0].dtype if event.inputs else event.dtype),
            "divisor": number(event.divisor),
            "divider": event.divider or self.op,
            "logarithm": ", and their logarithm is finite" if _is_log(self.op) else "",
            "mend_softmax": _LOG_SOFTMAX if _is_log(self.op) else _CLAMPED_SOFTMAX,
            "made": f" ({event.maker})" if event.maker else "",
            "named": f"{', '.join(event.names)}: " if event.names else "",
            "names": listed(self.names),
            "samples": f", samples {listed(event.samples)} of dim 0" if event.samples else "",
            "scale": number(self.scale),
            "fits": number(self.fits),
            "init_scale": number(self.fits).replace("2^", "2.0**"),
        }

    def _reason(self) -> str:
        if self.event.discarded:
            return "its result is not finite where the forward throws it away, and 0 * inf is NaN"
        return REASONS.get(self.op, "0 * inf, 0/0 or a slope that is infinite there")

    @property
    def title(self) -> str:
        """The kind in words."""
        return self.kind.replace("_", " ")

    @property
    def heading(self) -> str:
        """Kind, phase, module, op, line and rank."""
        silent = "silent " if self.silent else "vanished " if self.harmless else ""
        rank = "" if self.rank is None else f", on rank {self.rank}"
        return f"{silent}{self.title}, {self.event.phase}: {self.event.place}{rank}"

    def __str__(self) -> str:
        event = self.event
        lines = [self.heading]
        code = linecache.getline(event.place.file or "", event.place.number).strip()
        if code:
            inside = event.place.inside
            called = f"  ({self.op} is called in {inside})" if inside else ""
            lines.append(f"  code:    {code}{called}")
        lines.append(f"  why:     {self.why}")
        if event.inputs:
            lines.append(f"  inputs:  {'; '.join(map(str, event.inputs))} ({event.aten})")
        aftermath = self._aftermath()
        if aftermath:
            lines.append(f"  then:    {aftermath}")
        again = ["reproduced"] if self.reproduced else []
        if self.replayed != "not checked":
            again.append(f"forward output {self.replayed}")
        if again:
            lines.append(f"  replay:  {', '.join(again)}")
        if not (self.harmless and self._is_right()):
            lines.append(f"  to do:   {self.advice}")
            if self.remedy is not None and self.remedy.costs:
                lines.append(f"  cost:    {self.remedy.costs}")
            if self.remedy is not None and self.remedy.in_vain:
                lines.append(f"  in vain: {self.remedy.in_vain}")
        return "\n".join(lines)

    def _aftermath(self) -> str:
        event = self.event
        parts = []
        if event.later:
            parts.append(f"{event.later} later ops not finite")
        if event.first_nan:
            parts.append(f"first NaN in {event.first_nan}")
        if self.silent and event.absorbed:
            parts.append(f"inf became a wrong finite number in {event.absorbed}")
        if self.harmless:
            became = f"became a finite number in {event.vanished}"
            parts.append(f"inf {became if event.vanished else 'reached no result'}")
        if self.outcome:
            parts.append(self.outcome)
        if self.difference is not None:
            by, largest = map(number, self.difference)
            parts.append(f"the result differs from FP32's by up to {by}, the largest is {largest}")
        if self.harmless and self._is_right():
            parts.append("it was harmless")
        return "; ".join(parts)

    def _is_right(self) -> bool:
        """Return whether the result is FP32's within 1 %; False where none was compared."""
        return self.difference is not None and self.difference[0] <= 0.01 * self.difference[1]


NOT_REPRODUCED = (
    "not reproduced: run again, nothing is inf or NaN (was it another batch, or micro-batch, or "
    "the half sum of micro-batches, which grad_dtype=torch.float32 makes FP32?)"
)
NO_PRECISION_HELPS = "FP32 does not help, nor does bfloat16: both were tried on this batch."
_NONE_HELPS = "No remedy that was tried helps: look where its inputs come from."
_UNTRIED = {
    "parameters": "no other weights are at hand",
    "data": "no other values could be put in their place",
    "own_backward": "it is your own code",
    "propagated": "no op of this run made it",
}
"""Why nothing could be tried, by kind of fault."""
_LOG_SOFTMAX = "Write log_softmax(x, dim) in place of log(softmax(x, dim))."
_CLAMPED_SOFTMAX = "Clamp the result of the softmax from below."
_NO_EDIT = "no edit of this call alone does it"


def _is_log(op: str) -> bool:
    return "log" in family(op)


def number(value: float | None) -> str:
    """Return a number as texts show it: powers of two as powers, else four digits."""
    if value is None:
        return "an unknown value"
    exponent = math.frexp(value)[1] - 1 if value and math.isfinite(value) else 0
    if abs(exponent) > 3 and value == 2.0**exponent:
        return f"2^{exponent}"
    return f"{value:.4g}" if abs(value) != 65504 else f"{value:.0f}"


def listed(items: Sequence[Any]) -> str:
    """Return the first eight items in words, and how many more there are."""
    more = f" and {len(items) - 8} more" if len(items) > 8 else ""
    return ", ".join(map(str, items[:8])) + more
