"""Outcome and cause of each step, found from the numbers that the device has written."""

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tritonamp.diagnosis.batches import data_in
from tritonamp.diagnosis.causes import find_cause
from tritonamp.diagnosis.clipping import WHY_ZERO
from tritonamp.diagnosis.divergence import Fp32Run, Growth, WeightSizes, growth_of
from tritonamp.diagnosis.fault_counts import is_power_of_two
from tritonamp.diagnosis.history import History
from tritonamp.diagnosis.odd_values import odd_moments, odd_weights, told
from tritonamp.diagnosis.records import StepRecord
from tritonamp.diagnosis.skips import Cause, Explanation, Overflow, Skip, Steps, Writer
from tritonamp.diagnosis.terms import IN_A_LOOP, Terms
from tritonamp.kernels._decision import (
    AMAX,
    CLEAN,
    COUNTS,
    LIMITS,
    LOSS,
    NORM,
    RECORD,
    SCALE,
    SKIPPED,
    SKIPPED_SCALE,
)
from tritonamp.kernels.device import is_distributed, rank
from tritonamp.step.decision_log import DecisionLog
from tritonamp.step.outcome import Outcome
from tritonamp.step.snapshots import Snapshot

logger = logging.getLogger("tritonamp")

_LONG_RUN = 8  # skips in a row that are worth a warning
_NORMAL = " That is normal in the first steps."
_ONCE = (
    " Later skips of this kind are INFO lines: logging.basicConfig(); "
    "logging.getLogger('tritonamp').setLevel('INFO') shows them, 'ERROR' hides all warnings."
)


class RunNames(Protocol):
    """Names in the models of a run. Each call looks them up, because parameters may be added."""

    def parameters(self) -> Mapping[Tensor, str]:
        """Return the full name of each parameter."""

    def tensors(self) -> Mapping[Tensor, str]:
        """Return the full name of each parameter and buffer, for the search for a cause."""

    def writers(self) -> Mapping[str, Writer]:
        """Return the optimizer that steps on each parameter, by name of the parameter."""


class StepLog:
    """A history of the last steps, and the causes of skips.

    Args:
        decisions: log of all decisions, whose numbers are explained here.
        names: names in the models.
        dtype: half dtype of the policy.
        log_skips: whether each skip becomes a line of the log once its numbers have arrived.

    Attributes:
        sizes: sizes of the weights in some steps.
        history: outcomes of the last steps.
        clips: function that returns whether the loop clips gradients.
        tells_first: whether the first skip of a kind that needs no help is a WARNING, so that
            users who have set up no logging see it, too.
        terms: how texts name the handle and its settings.
        last: explanation of the last skip; None: no step was skipped.
        batches: forwards of the last skip.
    """

    def __init__(
        self, decisions: DecisionLog, names: RunNames, dtype: torch.dtype, log_skips: bool = False
    ) -> None:
        self._decisions = decisions
        self._model_names = names
        self._limit = torch.finfo(dtype).max
        self._log_skips = log_skips
        self.sizes = WeightSizes(names.tensors)
        self.history = History()
        self.clips: Callable[[], bool] = bool
        self.tells_first = True
        self.terms: Terms = IN_A_LOOP
        self.last: Explanation | None = None
        self.batches: Sequence[Snapshot] = ()
        self._said: dict[Cause, tuple[Explanation, int]] = {}  # last long texts, and their levels

    def collect(self, wait: bool = False) -> None:
        """Process the numbers that have arrived. With ``wait``, wait for all that were started."""
        self._decisions.collect(wait)
        self._add_taken()

    def _add_taken(self) -> None:
        """Note the taken steps whose numbers have arrived."""
        while self._decisions.taken:
            values = self._decisions.taken.popleft()
            taken, _ = self.history.update_counts(values[: len(COUNTS)])
            if taken:
                step, scale, norm = self.history.step, values[SCALE], values[NORM]
                loss = _finite(values[LOSS])
                self.history.add_step(StepRecord(step, None, scale, norm, loss=loss))

    def skipped(self, values: Sequence[float], outcome: Outcome) -> None:
        """Note a decision whose numbers show other skips than the one before.

        Args:
            values: numbers of the record.
            outcome: the decision.
        """
        self._add_taken()
        taken, skipped = self.history.update_counts(values[: len(COUNTS)])
        if not skipped:  # a skip was taken back
            return
        self.history.begin_skip(self.history.step, outcome.untouched)
        row = tuple(self.history.overflows)
        found = self._explain(values, outcome, _finite(values[LOSS]), exact=not taken, row=row)
        self.last = found
        self.batches = outcome.forwards
        self.history.add_skip(found, values[SCALE])
        if self._log_skips:
            self._say(found)

    def _say(self, found: Explanation) -> None:
        # skips 1, 2, 4, 8... of a cause: a run that skips all the time must not fill the log
        is_news = is_power_of_two(self.history.causes[found.cause.value])
        long_run = self.history.in_a_row == _LONG_RUN
        level, end = self._expected(found)
        if long_run or (found.needs_help and is_news):
            level = logging.WARNING
        facts = [f"the last {_LONG_RUN} in a row"] if long_run else []
        facts += [f"rank {rank()}"] if is_distributed() else []
        earlier, its_level = self._said.get(found.cause, (found, level))
        in_this_row = 0 < found.skip.step - earlier.skip.step < self.history.in_a_row
        if in_this_row and level <= its_level and found.repeats(earlier):
            logger.log(level, found.short_line(earlier, *facts))
            return
        self._said[found.cause] = found, level
        logger.log(level, found.line(*facts) + found.hint + end)

    def say_expected(self, found: Explanation, text: str) -> None:
        """Log the text of the last skip, which needs no help."""
        level, end = self._expected(found)
        logger.log(level, text + end)

    def _expected(self, found: Explanation) -> tuple[int, str]:
        """Return the level of a skip's line if it needs no help, and the end of the line.

        The first of a kind is a WARNING of rank 0, because no INFO is shown by default.
        """
        is_first = self.tells_first and self.history.causes[found.cause.value] == 1
        if found.needs_help or not is_first or rank() != 0:
            return logging.INFO, ""
        return logging.WARNING, _NORMAL * (found.cause is Cause.SCALE) + _ONCE

    def _explain(
        self,
        values: Sequence[float],
        outcome: Outcome,
        loss: float | None,
        exact: bool,
        row: Sequence[Overflow] = (),
    ) -> Explanation:
        """Explain a skip from the numbers of the device, without the loss. See ``Skip``."""
        rule, step = outcome.rule, int(sum(values[: len(COUNTS)]))
        skip = Skip(
            outcome=int(values[SKIPPED]),
            step=step,
            exact=exact,
            skipped=_skipped(values),
            since=self.history.since or step,
            scale=values[SKIPPED_SCALE],
            lowest=rule.min_scale,
            fixed=rule.min_scale == rule.max_scale,
            amax=self._decisions.device_record.by_name(values),
            before=values[AMAX],
            limit=self._limit,
            by_rank=self._decisions.device_record.by_rank(values),
            wrote=self.history.wrote,
            loss=loss,
            outlier=tuple(values[LIMITS:RECORD]),
            row=row,
            hysteresis=rule.hysteresis,
            has_gradient_in_loss=outcome.has_gradient_in_loss,
        )
        found = self._find_cause(skip, outcome.forwards)
        if found.cause is Cause.VETO and outcome.veto_reason:
            return found._replace(reason=f"{outcome.veto_reason} {Cause.VETO.advice}")
        return found

    def _find_cause(
        self,
        skip: Skip,
        batches: Sequence[Snapshot],
        in_fp32: Callable[[], Fp32Run | None] | None = None,
    ) -> Explanation:
        growth = functools.partial(self._growth, skip.loss)
        steps = Steps(self._model_names.writers(), growth, in_fp32, self.clips())
        found = find_cause(skip, data_in(batches), self._model_names.tensors(), steps)
        return found._replace(terms=self.terms)

    def _growth(self, loss: float | None) -> Growth:
        good = [(r.step, r.loss, r.grad_norm) for r in self.history.records if r.cause is None]
        return growth_of(good, loss, self.history.taken, self.sizes)

    # questions about all decisions

    def explanation(self) -> Explanation | None:
        """Explain the last skip; None: no step was skipped. Reads the device."""
        self.collect(wait=True)
        values = self._decisions.device_record.values()
        unseen = _skipped(values) > self.history.skipped
        if values[SKIPPED] and self._decisions.rule is not None and (unseen or self.last is None):
            # left by a CUDA graph, whose decisions are not copied one by one
            exact = values[CLEAN] == self.history.taken
            return self._explain(values, Outcome(self._decisions.rule), None, exact)
        return self.last

    def reconsidered(self, in_fp32: Callable[[], Fp32Run | None]) -> Explanation | None:
        """Explain the last skip again, where ``in_fp32`` may run its batch in FP32.

        If a step was taken since, the result is that of ``explanation``.
        """
        last = self.explanation()
        if last is None or not self._is_newest(last):
            return last
        return self._find_cause(last.skip, self.batches, in_fp32)

    def explain_by(self, found: Explanation) -> None:
        """Give the last skip another explanation. Does nothing if a step was taken since."""
        last = self.last
        if last is not None and last is not found and self._is_newest(last):
            self.last = found
            self.history.replace_last(last, found)

    def _is_newest(self, found: Explanation) -> bool:
        records = self.history.records
        return bool(records) and records[-1].step == found.skip.step

    def scale(self) -> float:
        """Return the loss scale of the last skip; without a skip, of the last step; 1 before it."""
        if self.last is not None:
            return self.last.skip.scale
        self.collect(wait=True)
        return self.history.records[-1].scale if self.history.records else 1.0

    def drift(self) -> str:
        """Return a text if the last steps trained nothing or have diverged; else "".

        Values out of all proportion have such a text, too. Reads the device.
        """
        self.collect(wait=True)
        if self.history.last_taken < 0:
            return ""
        writers = self._model_names.writers()
        odd = odd_weights(writers, self._model_names.tensors()) + odd_moments(writers)
        if odd:
            return told(odd, writers)
        if self.history.zeros:
            steps = f"{self.history.zeros} steps" if self.history.zeros > 1 else "step"
            return f"all gradients of the last {steps} were 0, which trained nothing. {WHY_ZERO}."
        growth = self._growth(self.history.records[-1].loss)
        return growth.words(None) if growth.has_run_away else ""

    def stats(self) -> dict[str, Any]:
        """Return the numbers as plain values. Reads the device."""
        counts, last = self._decisions.counts(), self.explanation()
        return {
            "steps": counts.pop("clean"),
            "skipped": sum(counts.values()),
            **counts,
            "last_skip_reason": None if last is None else last.cause.value,
            "grad_norm": self._decisions.last_good()[0],
        }

    def load_counts(self, counts: Mapping[str, int], last_good: Sequence[float]) -> None:
        """Continue from results of ``DecisionLog.counts`` and ``DecisionLog.last_good``."""
        self.collect(wait=True)
        self._decisions.load_counts(counts, last_good)
        self.history.load([float(counts.get(name, 0)) for name in COUNTS])


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def _skipped(values: Sequence[float]) -> int:
    """Return the number of decisions to skip, given the numbers of a record."""
    return int(sum(values[: len(COUNTS)]) - values[CLEAN])
