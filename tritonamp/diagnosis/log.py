"""What became of each step, and why: first on the device, later on the host."""

import functools
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.diagnosis.batches import data_in
from tritonamp.diagnosis.causes import find_cause
from tritonamp.diagnosis.divergence import Fp32Run, Growth, WeightSizes, growth_of
from tritonamp.diagnosis.records import Attached, StepRecord
from tritonamp.diagnosis.replay import Snapshot
from tritonamp.diagnosis.skips import Explanation, Skip, Steps, Writer
from tritonamp.kernels._transfer import upload
from tritonamp.kernels.decide import (
    AMAX,
    CLEAN,
    FAULT,
    NORM,
    OVERFLOW,
    RECORD,
    SCALE,
    SKIPPED,
    SKIPPED_SCALE,
    Record,
    ScaleRule,
)
from tritonamp.kernels.device import is_capturing, is_distributed, rank, refuse_capture
from tritonamp.readback import Readback, Reading

logger = logging.getLogger("tritonamp")

HISTORY = 1000  # steps
COUNTS = {"clean": CLEAN, "scale_overflows": OVERFLOW, "forward_faults": FAULT}
"""Outcomes of decisions, as states name them, to where they are counted."""
_KEPT = AMAX + 1  # numbers in front that a checkpoint holds: counts, norm, largest magnitude
_LONG_RUN = 8  # skips in a row that are worth a warning


class NonFiniteError(RuntimeError):
    """Raised under ``on_nonfinite="raise"`` for skips that no lower scale could have avoided."""


InFp32 = Callable[[Sequence[Snapshot]], Fp32Run | None]
"""Runs forwards again in FP32."""


class StepLog:
    """Counts of decisions, the last of them one by one, and the causes of those that were skipped.

    Args:
        names: gives parameter of the model to its full name; asked again when parameters are added.
        tensors: the same with buffers, which a cause may be looked for in.
        dtype: the half format.
        log_skips: a line is logged for each skip, when its numbers have arrived: the device is not
            waited for.
        writers: gives by name of a parameter which optimizer steps on it.

    Attributes:
        history: the last steps, oldest first.
        last: the explanation of the last skip.
        last_scale: the loss scale that its backward used.
        batches: the snapshots of its forwards.
        causes: how many skips had which cause, of those that were read one by one.
        in_fp32: runs forwards again in FP32, where causes may be looked for in that way.
    """

    def __init__(
        self,
        names: Callable[[], Mapping[Tensor, str]],
        tensors: Callable[[], Mapping[Tensor, str]],
        dtype: torch.dtype,
        log_skips: bool = False,
        writers: Callable[[], Mapping[str, Writer]] = dict,
    ) -> None:
        self._ask_names = names
        self._ask_tensors = tensors
        self._limit = torch.finfo(dtype).max
        self._log_skips = log_skips
        self._ask_writers = writers
        self._sizes = WeightSizes(tensors)
        self._names = dict(names())
        self._ranks: Sequence[int] = ()  # whose magnitudes come before those by name
        self._loaded = [0.0] * _KEPT
        self._numbers: Tensor | None = None  # see kernels.decide.Record
        self._copied: Tensor | None = None  # the same with the loss behind; NaN: not known
        self._counts: Tensor | None = None  # the beginning of that
        self._loss: Tensor | None = None  # its end
        self._knows_loss = False
        # both by the ids of a decision's lists of parameters
        self._positions: dict[tuple[int, ...], Tensor] = {}
        self._params: dict[tuple[int, ...], Sequence[list[Tensor]]] = {}
        self._outgrown: list[Any] = []  # where the replays of a CUDA graph may still write
        self._readback: Readback | None = None
        self._known = [0.0, 0.0, 0.0]  # counts at the last reading
        self._run: list[int] = []  # numbers of the skips in a row, by the last readings
        # number of the first of the last steps that a lasting cause skipped; 0: the last was not
        self._since = 0
        self._wrote = 0  # see skips.Skip
        self._rule: ScaleRule | None = None  # of the last decision
        self.history: deque[StepRecord] = deque(maxlen=HISTORY)
        self.last: Explanation | None = None
        self.last_scale = 1.0
        self.batches: Sequence[Snapshot] = ()
        self.causes: Counter[str] = Counter()
        self.in_fp32: InFp32 | None = None

    def record(
        self, params: Sequence[list[Tensor]], device: torch.device, ranks: Sequence[int] = ()
    ) -> Record:
        """Return where the decision about the gradients of ``params`` is to be noted.

        Args:
            params: one list for each optimizer. The lists do not change: other parameters come in
                other lists.
            device: where the decision is made.
            ranks: behind the parameters the decision has a magnitude for each of these.
        """
        key = tuple(map(id, params))
        known = key in self._positions and ranks == self._ranks
        if not known or self._numbers is None or self._numbers.device != device:
            self._learn(key, [param for part in params for param in part], device, ranks)
            self._params[key] = params  # as long as these live, nothing else has their ids
        assert self._numbers is not None
        return Record(self._numbers, self._positions[key])

    def _learn(
        self, key: tuple[int, ...], params: list[Tensor], device: torch.device, ranks: Sequence[int]
    ) -> None:
        self.collect(wait=True)  # readings under way know the names of before
        positions = {param: i for i, param in enumerate(params)}
        if not positions.keys() <= self._names.keys():
            later, new = self._ask_names(), positions.keys() - self._names.keys()
            self._names |= {p: later.get(p, f"a parameter of shape {tuple(p.shape)}") for p in new}
        size = RECORD + len(ranks) + len(self._names)
        numbers = self._numbers
        if (
            numbers is None
            or len(numbers) != size
            or numbers.device != device
            or ranks != self._ranks
        ):
            self._make_room(size, device, ranks)
        found = [
            *range(len(params), len(params) + len(ranks)),
            *(positions.get(p, -1) for p in self._names),
        ]
        self._positions[key] = _uploaded(torch.tensor(found, dtype=torch.int64), device)

    def _make_room(self, size: int, device: torch.device, ranks: Sequence[int]) -> None:
        """Make a new record, which begins with what the one before holds."""
        refuse_capture(device, "the record of steps")
        before, first = self._values(), RECORD + len(self._ranks)
        by_rank = before[RECORD:first] if ranks == self._ranks else [0.0] * len(ranks)
        kept = before[:RECORD] + by_rank + before[first:]
        values = kept + [0.0] * (size - len(kept))
        copied = _uploaded(torch.tensor([*values, math.nan], dtype=torch.float64), device)
        readback = Readback(copied)  # takes memory: nothing is half-way if there is none
        self._outgrown += [(self._numbers, self._positions)]
        self._numbers, self._copied, self._readback = copied[:-1], copied, readback
        self._counts, self._loss = copied[: len(COUNTS)], copied[-1]
        self._knows_loss = False
        self._ranks = ranks
        self._positions, self._params = {}, {}

    def decided(
        self,
        rule: ScaleRule,
        batches: Sequence[Snapshot],
        loss: Tensor | None = None,
        untouched: bool = False,
    ) -> None:
        """Process the results that have arrived, and start copying those of a new decision.

        Args:
            rule: of its loss scale.
            batches: the forwards that led to it.
            loss: 0-d on the device; None: not known.
            untouched: nobody but the last step has written to the parameters since.
        """
        self._rule = rule
        if self._copied is None or self._readback is None:
            return
        assert self._counts is not None and self._loss is not None
        if loss is not None or self._knows_loss:
            self._loss.fill_(math.nan) if loss is None else self._loss.copy_(loss)
            self._knows_loss = loss is not None
        if self._is_captured():
            return
        self.collect()
        self._sizes.before_step(self._counts)
        self._readback.start(self._copied, Attached(rule, batches, untouched))

    def undo(self) -> None:
        """Forget the last decision, which was undone."""
        if self._readback is not None:
            self._readback.cancel_last()

    def collect(self, wait: bool = False) -> None:
        """Process the results that have arrived; with ``wait`` wait for all that were asked for."""
        if self._readback is not None and (wait or not self._is_captured()):
            for reading in self._readback.ready(wait):
                self._process(reading)

    def _is_captured(self) -> bool:
        """Tell whether a question, or its answer, would become part of a CUDA graph."""
        return self._numbers is not None and is_capturing(self._numbers.device)

    @property
    def skipped(self) -> int:
        """How many decisions were skips, by the last result that was processed."""
        return int(self._known[OVERFLOW] + self._known[FAULT])

    def _process(self, reading: Reading) -> None:
        values, attached = reading
        counts, loss = list(values[:3]), _finite(values[-1])
        clean, *skips = (int(now - before) for now, before in zip(counts, self._known, strict=True))
        self._known = counts
        step = int(sum(counts))
        if clean or sum(skips) != 1:  # decisions between were not read
            self._run.clear()
        if sum(skips):
            self._run.append(step)
            self._process_skip(step, not clean, values[:-1], attached, loss)
        elif clean:
            self._since = 0
            known = values[SCALE], values[NORM]
            self.history.append(StepRecord(step, None, *known, loss=loss))

    def _process_skip(
        self,
        step: int,
        exact: bool,
        values: Sequence[float],
        attached: Attached,
        loss: float | None,
    ) -> None:
        if not self._since:
            ours = attached.untouched and self._last_taken() == step - 1
            self._wrote = step - 1 if ours else 0
        found = self.last = self._explain(step, exact, values, attached, loss)
        self._since = (self._since or step) if found.cause.lasting else 0
        self.batches, self.last_scale = attached.batches, values[SKIPPED_SCALE]
        record = StepRecord(
            step, found.cause.value, values[SCALE], None, found.parameters, found.text, loss
        )
        self.history.append(record)
        self.causes[found.cause.value] += 1
        if self._log_skips:
            # 1, 2, 4, 8...: a run that skips all the time is not to fill the log
            news = math.frexp(found.skip.skipped)[0] == 0.5
            long_run = len(self._run) == _LONG_RUN
            log = logger.warning if (found.needs_help and news) or long_run else logger.info
            facts = [f"the last {_LONG_RUN} in a row"] if long_run else []
            facts += [f"rank {rank()}"] if is_distributed() else []
            log(found.line(*facts) + found.hint)

    def _last_taken(self) -> int:
        """Return the number of the last step that was seen, if it was taken; else -1."""
        taken = self.history and self.history[-1].cause is None
        return self.history[-1].step if taken else -1

    def _explain(
        self,
        step: int,
        exact: bool,
        values: Sequence[float],
        attached: Attached,
        loss: float | None = None,
    ) -> Explanation:
        rule, first = attached.rule, RECORD + len(self._ranks)
        skip = Skip(
            outcome=int(values[SKIPPED]),
            step=step,
            exact=exact,
            skipped=int(values[OVERFLOW] + values[FAULT]),
            since=self._since or step,
            scale=values[SKIPPED_SCALE],
            lowest=rule.min_scale,
            fixed=rule.min_scale == rule.max_scale,
            amax=dict(zip(self._names.values(), values[first:], strict=True)),
            before=values[AMAX],
            limit=self._limit,
            by_rank=dict(zip(self._ranks, values[RECORD:first], strict=True)),
            wrote=self._wrote,
            loss=loss,
        )
        return self._find_cause(skip, attached.batches, self.in_fp32)

    def _find_cause(
        self, skip: Skip, batches: Sequence[Snapshot], in_fp32: InFp32 | None
    ) -> Explanation:
        growth = functools.partial(self._growth, skip.loss)
        again = None if in_fp32 is None else functools.partial(in_fp32, batches)
        steps = Steps(self._ask_writers(), growth, again)
        return find_cause(skip, data_in(batches), self._ask_tensors(), steps)

    def _growth(self, loss: float | None) -> Growth:
        good = [(r.step, r.loss, r.grad_norm) for r in self.history if r.cause is None]
        return growth_of(good, loss, int(self._known[CLEAN]), self._sizes)

    def drift(self) -> str:
        """Return that training has diverged if it has, though steps are taken; else "".

        Reads the device.
        """
        self.collect(wait=True)
        if self._last_taken() < 0:
            return ""
        growth = self._growth(self.history[-1].loss)
        return growth.words(None) if growth.has_run_away else ""

    def reconsider(self, in_fp32: InFp32) -> None:
        """Look for the cause of the last skip again, now that its batch may run in FP32.

        Nothing is done where a step was taken since.
        """
        last = self.explanation()
        if last is None or not self.history or self.history[-1].step != last.skip.step:
            return
        found = self._find_cause(last.skip, self.batches, in_fp32)
        if found.cause is not last.cause:
            self.causes[last.cause.value] -= 1
            self.causes[found.cause.value] += 1
        self.last = found
        self.history[-1] = self.history[-1]._replace(
            cause=found.cause.value, parameters=found.parameters, detail=found.text
        )

    def _values(self) -> list[float]:
        if self._numbers is None:
            return [*self._loaded, *[0.0] * (RECORD - _KEPT)]
        return self._numbers.tolist()

    @property
    def any_taken(self) -> Tensor | None:
        """Whether any decision was to step, 0-d bool on the device; None: there was none."""
        return None if self._numbers is None else self._numbers[CLEAN] > 0

    def counts(self) -> dict[str, int]:
        """Return how many decisions had each outcome of ``COUNTS``. Reads the device."""
        values = self._values()
        return {name: int(values[slot]) for name, slot in COUNTS.items()}

    def stats(self) -> dict[str, Any]:
        """Return the numbers as plain values. Reads the device."""
        values, last = self._values(), self.explanation()
        return {
            "steps": int(values[CLEAN]),
            "skipped": int(values[OVERFLOW] + values[FAULT]),
            "scale_overflows": int(values[OVERFLOW]),
            "forward_faults": int(values[FAULT]),
            "last_skip_reason": None if last is None else last.cause.value,
            "grad_norm": values[NORM],
        }

    def last_good(self) -> tuple[float, float]:
        """Return norm and largest magnitude of the last good step's gradients. Reads the device."""
        values = self._values()
        return values[NORM], values[AMAX]

    def load_counts(
        self, counts: Mapping[str, int], last_good: Sequence[float] = (0.0, 0.0)
    ) -> None:
        """Continue from what ``counts`` and ``last_good`` returned."""
        self.collect(wait=True)
        self._loaded = [float(n) for n in (*(counts[name] for name in COUNTS), *last_good)]
        self._known = self._loaded[:3]
        self._run.clear()
        if self._numbers is not None:
            self._numbers[:_KEPT] = torch.tensor(self._loaded, dtype=torch.float64)

    def explanation(self) -> Explanation | None:
        """Explain the last skip; None: no step was skipped. Reads the device."""
        self.collect(wait=True)
        values, known = self._values(), self._known
        unseen = values[OVERFLOW] + values[FAULT] > known[OVERFLOW] + known[FAULT]
        if values[SKIPPED] and self._rule is not None and (unseen or self.last is None):
            # a CUDA graph left it, whose decisions are not copied one by one
            exact = values[CLEAN] == known[CLEAN]
            return self._explain(int(sum(values[:3])), exact, values, Attached(self._rule, ()))
        return self.last


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def _uploaded(values: Tensor, device: torch.device) -> Tensor:
    target = torch.empty_like(values, device=device)
    upload(values, target)
    return target
