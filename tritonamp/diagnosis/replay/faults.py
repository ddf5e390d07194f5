"""The report about a fault: its place, its effect, its reason, and advice."""

import linecache
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tritonamp.diagnosis.replay.verdicts import REASONS, VERDICTS, Event
from tritonamp.names import short


class Remedy(NamedTuple):
    """The remedies under which a batch ran again without its fault. Without any, nothing helped."""

    modules: tuple[str, ...] = ()  # modules that computed in FP32
    bfloat16: bool = False  # whether the model computed in bfloat16 instead
    fp32: bool = False  # whether the whole model computed in FP32, where no few modules were enough

    @property
    def helps(self) -> bool:
        """Whether there is any remedy."""
        return bool(self.modules) or self.bfloat16 or self.fp32

    def words(self, by_hand: str) -> str:
        """Return advice in words. ``by_hand`` is the advice for the model itself."""
        if self.bfloat16:
            return (
                "train in bfloat16: dtype=torch.bfloat16 (tried: the batch passes; keeping "
                "single modules in FP32 does not help)"
            )
        if self.fp32 or "" in self.modules:
            return f"keep it in FP32: {by_hand} (tried: it passes with the whole model in FP32)"
        more = len(self.modules) > 1
        alone = f"; {self.modules[0]} alone only moves the fault" if more else ""
        which = "them" if more else "it"
        return (
            f"keep {which} in FP32: fp32_modules={list(self.modules)} (tried: the batch passes"
            f"{alone})"
        )


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
        replayed: whether the forward gave the same bits as the first time.
        remedy: result of the tried remedies; None: none was tried.
        rank: rank whose batch it was; None: there are no other ranks.
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
    replayed: str = "not checked"
    remedy: Remedy | None = None
    rank: int | None = None

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
        exact = self.event.exact
        return None if exact is None else exact / torch.finfo(self.event.dtype).max

    @property
    def why(self) -> str:
        """The reason of the fault, in one sentence."""
        return VERDICTS[self.kind].why.format(**self._words())

    @property
    def advice(self) -> str:
        """Advice, in one sentence."""
        advice = VERDICTS[self.kind].advice
        if self.remedy is not None and not self.remedy.helps:
            advice = _KEEP.sub(".", advice) + f" {NO_PRECISION_HELPS}"
        return advice.format(**self._words())

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
            "named": f"{', '.join(event.names)}: " if event.names else "",
            "names": listed(self.names),
            "samples": f", samples {listed(event.samples)} of dim 0" if event.samples else "",
            "scale": number(self.scale),
            "fits": number(self.fits),
            "init_scale": number(self.fits).replace("2^", "2.0**"),
            "keep": self._keep(),
        }

    def _keep(self) -> str:
        """Return advice: the modules to keep in FP32, or another remedy if FP32 did not help."""
        is_input = self.kind == "cast_overflow" and not self.event.place.file
        by_hand = _UNCAST if is_input else _BY_HAND
        if self.remedy is not None:
            return self.remedy.words(by_hand)
        module = self.module
        return f"keep it in FP32: {f'fp32_modules=[{module!r}]' if module else by_hand}"

    def _reason(self) -> str:
        if self.event.discarded:
            return "its result is not finite where the forward throws it away, and 0 * inf is NaN"
        return REASONS.get(self.op, "0 * inf, 0/0 or a slope that is infinite there")

    @property
    def heading(self) -> str:
        """Kind, phase, module, op, line and rank."""
        silent = "silent " if self.silent else "vanished " if self.harmless else ""
        rank = "" if self.rank is None else f", on rank {self.rank}"
        kind = self.kind.replace("_", " ")
        return f"{silent}{kind}, {self.event.phase}: {self.event.place}{rank}"

    def __str__(self) -> str:
        event = self.event
        lines = [self.heading]
        code = linecache.getline(event.place.file or "", event.place.number).strip()
        if code:
            lines.append(f"  code:    {code}")
        lines.append(f"  why:     {self.why}")
        if event.inputs:
            lines.append(f"  inputs:  {'; '.join(map(str, event.inputs))} ({event.aten})")
        aftermath = self._aftermath()
        if aftermath:
            lines.append(f"  then:    {aftermath}")
        if not (self.harmless and self._is_right()):
            lines.append(f"  to do:   {self.advice}")
        if self.replayed != "not checked":
            lines.append(f"  replay:  forward output {self.replayed}")
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


NOT_REPRODUCED = "not reproduced: run again, forward and backward are finite"
NO_PRECISION_HELPS = "FP32 does not help, nor does bfloat16: both were tried on this batch."
_KEEP = re.compile(r"(, or|; if .*,| If this .*,) \{keep\}\.")
_BY_HAND = "x.float() under tritonamp.disable_casts()"
_UNCAST = 'level="O2" and cast_inputs=False, with the modules that read it in fp32_modules'
"""For inputs that ``enable`` casts: at O3, or as ``cast_inputs`` says."""


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
