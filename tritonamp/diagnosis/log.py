"""Outcome and cause of each step, recorded on the device and read on the host later."""

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tritonamp.diagnosis.batches import data_in
from tritonamp.diagnosis.causes import find_cause
from tritonamp.diagnosis.device_record import DeviceRecord
from tritonamp.diagnosis.divergence import Fp32Run, Growth, WeightSizes, growth_of
from tritonamp.diagnosis.fault_counts import is_power_of_two
from tritonamp.diagnosis.history import History
from tritonamp.diagnosis.records import Attached, StepRecord
from tritonamp.diagnosis.replay import Snapshot
from tritonamp.diagnosis.skips import Explanation, Skip, Steps, Writer
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
    Record,
)
from tritonamp.kernels._loss_scale import ScaleRule
from tritonamp.kernels.device import is_distributed, rank
from tritonamp.readback import Reading

logger = logging.getLogger("tritonamp")

_LONG_RUN = 8  # skips in a row that are worth a warning


class NonFiniteError(RuntimeError):
    """Raised under ``on_nonfinite="raise"`` for skips that no lower scale could have avoided."""


class RunNames(Protocol):
    """Names in the models of a run. Each call looks them up, because parameters may be added."""

    def parameters(self) -> Mapping[Tensor, str]:
        """Return the full name of each parameter."""

    def tensors(self) -> Mapping[Tensor, str]:
        """Return the full name of each parameter and buffer, for the search for a cause."""

    def writers(self) -> Mapping[str, Writer]:
        """Return the optimizer that steps on each parameter, by name of the parameter."""


class StepLog:
    """Counts of all decisions, a history of the last ones, and the causes of skips.

    Args:
        names: names in the models.
        dtype: half dtype of the policy.
        log_skips: whether each skip becomes a line of the log once its numbers have arrived.
    """

    def __init__(self, names: RunNames, dtype: torch.dtype, log_skips: bool = False) -> None:
        self._model_names = names
        self._limit = torch.finfo(dtype).max
        self._log_skips = log_skips
        self._sizes = WeightSizes(names.tensors)
        read_all = functools.partial(self.collect, wait=True)
        self._device_record = DeviceRecord(names.parameters, read_all)
        self._rule: ScaleRule | None = None  # of the last decision
        self.history = History()
        self.last: Explanation | None = None  # of the last skip
        self.batches: Sequence[Snapshot] = ()  # its forwards
        # called after each decision, with the counts by outcome, on the device
        self.after_decision: Callable[[Tensor], None] | None = None

    # a decision

    def record(
        self, params: Sequence[list[Tensor]], device: torch.device, ranks: Sequence[int] = ()
    ) -> Record:
        """Return the record for a decision. Arguments are those of ``DeviceRecord.place``."""
        return self._device_record.place(params, device, ranks)

    def decided(
        self, rule: ScaleRule, batches: Sequence[Snapshot], untouched: bool = False
    ) -> None:
        """Process the results that have arrived, and start copying those of a new decision.

        ``untouched`` is that of ``Attached``.
        """
        self._rule = rule
        counts = self._device_record.counts
        assert counts is not None  # ``record`` came first
        if self.after_decision is not None:
            self.after_decision(counts)
        if self._device_record.is_captured:
            return
        self.collect()
        self._sizes.before_step(counts)
        self._device_record.start_reading(Attached(rule, batches, untouched))

    def undo(self) -> None:
        """Forget the last decision, which was undone."""
        self._device_record.cancel_last_reading()

    def decided_again(self, rule: ScaleRule) -> None:
        """Copy the results of the last decision again, after it was undone, perhaps made again."""
        if not self._device_record.is_captured:
            self._device_record.start_reading(Attached(rule, ()), again=True)

    def collect(self, wait: bool = False) -> None:
        """Process the results that have arrived. With ``wait``, wait for all that were started."""
        for reading in self._device_record.readings(wait):
            self._process(reading)

    # its results

    def _process(self, reading: Reading) -> None:
        values, attached = reading
        loss = values[LOSS] if math.isfinite(values[LOSS]) else None
        taken, skipped = self.history.update_counts(values[: len(COUNTS)])
        step = self.history.step
        if skipped:
            self.history.begin_skip(step, attached.untouched)
            found = self._explain(values, attached, loss, exact=not taken)
            self.last = found
            self.batches = attached.batches
            self.history.add_skip(found, values[SCALE])
            if self._log_skips:
                self._say(found)
        elif taken:
            self.history.add_step(StepRecord(step, None, values[SCALE], values[NORM], loss=loss))

    def _say(self, found: Explanation) -> None:
        # skips 1, 2, 4, 8...: a run that skips all the time must not fill the log
        is_news = is_power_of_two(found.skip.skipped)
        long_run = self.history.in_a_row == _LONG_RUN
        log = logger.warning if (found.needs_help and is_news) or long_run else logger.info
        facts = [f"the last {_LONG_RUN} in a row"] if long_run else []
        facts += [f"rank {rank()}"] if is_distributed() else []
        log(found.line(*facts) + found.hint)

    def _explain(
        self, values: Sequence[float], attached: Attached, loss: float | None, exact: bool
    ) -> Explanation:
        """Explain a skip from the numbers of the device, without the loss. See ``Skip``."""
        rule, step = attached.rule, int(sum(values[: len(COUNTS)]))
        skip = Skip(
            outcome=int(values[SKIPPED]),
            step=step,
            exact=exact,
            skipped=_skipped(values),
            since=self.history.since or step,
            scale=values[SKIPPED_SCALE],
            lowest=rule.min_scale,
            fixed=rule.min_scale == rule.max_scale,
            amax=self._device_record.by_name(values),
            before=values[AMAX],
            limit=self._limit,
            by_rank=self._device_record.by_rank(values),
            wrote=self.history.wrote,
            loss=loss,
            outlier=tuple(values[LIMITS:RECORD]),
        )
        return self._find_cause(skip, attached.batches)

    def _find_cause(
        self,
        skip: Skip,
        batches: Sequence[Snapshot],
        in_fp32: Callable[[], Fp32Run | None] | None = None,
    ) -> Explanation:
        growth = functools.partial(self._growth, skip.loss)
        steps = Steps(self._model_names.writers(), growth, in_fp32)
        return find_cause(skip, data_in(batches), self._model_names.tensors(), steps)

    def _growth(self, loss: float | None) -> Growth:
        good = [(r.step, r.loss, r.grad_norm) for r in self.history.records if r.cause is None]
        return growth_of(good, loss, self.history.taken, self._sizes)

    # questions about all decisions

    def explanation(self) -> Explanation | None:
        """Explain the last skip; None: no step was skipped. Reads the device."""
        self.collect(wait=True)
        values = self._device_record.values()
        unseen = _skipped(values) > self.history.skipped
        if values[SKIPPED] and self._rule is not None and (unseen or self.last is None):
            # left by a CUDA graph, whose decisions are not copied one by one
            exact = values[CLEAN] == self.history.taken
            return self._explain(values, Attached(self._rule, ()), None, exact)
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

    def drift(self) -> str:
        """Return a text if training has diverged while steps are taken; else "".

        Reads the device.
        """
        self.collect(wait=True)
        if self.history.last_taken < 0:
            return ""
        growth = self._growth(self.history.records[-1].loss)
        return growth.words(None) if growth.has_run_away else ""

    @property
    def any_taken(self) -> Tensor | None:
        """Whether any step was taken, 0-d bool on the device; None: there was no decision."""
        counts = self._device_record.counts
        return None if counts is None else counts[CLEAN] > 0

    def counts(self) -> dict[str, int]:
        """Return the number of decisions by outcome of ``COUNTS``. Reads the device."""
        values = self._device_record.values()
        return {name: int(values[slot]) for name, slot in COUNTS.items()}

    def stats(self) -> dict[str, Any]:
        """Return the numbers as plain values. Reads the device."""
        counts, last = self.counts(), self.explanation()
        return {
            "steps": counts.pop("clean"),
            "skipped": sum(counts.values()),
            **counts,
            "last_skip_reason": None if last is None else last.cause.value,
            "grad_norm": self.last_good()[0],
        }

    def last_good(self) -> tuple[float, float]:
        """Return norm and largest magnitude of the last good step's gradients. Reads the device."""
        values = self._device_record.values()
        return values[NORM], values[AMAX]

    def load_counts(self, counts: Mapping[str, int], last_good: Sequence[float]) -> None:
        """Continue from results of ``counts`` and ``last_good``."""
        self.collect(wait=True)
        by_outcome = [float(counts.get(name, 0)) for name in COUNTS]
        self._device_record.load([*by_outcome, *last_good])
        self.history.load(by_outcome)


def _skipped(values: Sequence[float]) -> int:
    """Return the number of decisions to skip, given the numbers of a record."""
    return int(sum(values[: len(COUNTS)]) - values[CLEAN])
