"""What became of each step, and why: kept on the device, and on the host when its numbers have
arrived there.
"""

import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.diagnosis.causes import (
    PARAMETERS,
    REASONS,
    Explanation,
    Skip,
    find_cause,
    tensors_in,
)
from tritonamp.diagnosis.replay import BatchGoneError, Snapshot
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
from tritonamp.readback import Readback, Reading

logger = logging.getLogger("tritonamp")

HISTORY = 1000  # steps
_KEPT = AMAX + 1  # numbers in front that a checkpoint holds: counts, norm, largest magnitude
_LONG_RUN = 8  # skips in a row that are worth a warning


class NonFiniteError(RuntimeError):
    """Steps were skipped that no lower scale could have helped, and the policy says
    ``on_nonfinite="raise"``.
    """


class StepRecord(NamedTuple):
    """What became of one step.

    Attributes:
        step: its number, from 1, skipped ones included.
        cause: why it was skipped ("data", "forward fault", "scale overflow", "backward fault", "bad
            parameters", "scale exhausted"), or None: it was not.
        scale: the loss scale that its backward used.
        grad_norm: of the unscaled gradients; None for a skipped one.
        parameters: names of those whose gradients (under "bad parameters" whose values) were not
            finite.
        detail: the cause in words, "" for a step.
    """

    step: int
    cause: str | None
    scale: float
    grad_norm: float | None
    parameters: tuple[str, ...] = ()
    detail: str = ""


class Attached(NamedTuple):
    """What is known on the host about a decision: the rule of its scale, and the arguments of its
    forwards.
    """

    rule: ScaleRule
    batches: Sequence[Snapshot]


class StepLog:
    """Counts of decisions, the last of them one by one, and the causes of those that were skipped.

    Args:
        names: gives parameter of the model to its full name; asked again when parameters are added.
        tensors: the same with buffers, which a cause may be looked for in.
        dtype: the half format.
        speaks: a line is logged for each skip, when its numbers have arrived: the device is not
            waited for.
    """

    def __init__(
        self,
        names: Callable[[], Mapping[Tensor, str]],
        tensors: Callable[[], Mapping[Tensor, str]],
        dtype: torch.dtype,
        speaks: bool = False,
    ) -> None:
        self._ask_names, self._ask_tensors = names, tensors
        self._names = dict(names())
        self._ranks: Sequence[int] = ()  # whose magnitudes come before those by name
        self._limit, self._speaks = torch.finfo(dtype).max, speaks
        self._loaded = [0.0] * _KEPT
        self._numbers: Tensor | None = None  # see kernels.decide.Record
        self._positions: dict[
            tuple[int, ...], Tensor
        ] = {}  # by the ids of a decision's lists of parameters
        self._params: dict[tuple[int, ...], Sequence[list[Tensor]]] = {}
        self._readback: Readback | None = None
        self._known = [0.0, 0.0, 0.0]  # counts when the last reading was written
        self._run: list[int] = []  # numbers of the skips in a row that the last readings told of
        # number of the first of the last steps that bad parameters skipped; 0: the last was not
        self._bad_since = 0
        self._rule: ScaleRule | None = None  # of the last decision
        self.history: deque[StepRecord] = deque(maxlen=HISTORY)
        self.last: Explanation | None = None  # of the last skip
        self.last_scale = 1.0  # that its backward used
        self.batches: Sequence[Snapshot] = ()  # the snapshots of its forwards

    def record(
        self, params: Sequence[list[Tensor]], device: torch.device, ranks: Sequence[int] = ()
    ) -> Record:
        """Where the decision about the gradients of ``params``, one list for each optimizer, is to
        be noted.

        The lists do not change: other parameters come in other lists. Behind them is a magnitude
        for each of ``ranks``.
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
            values, first = self._values(), RECORD + len(self._ranks)
            by_rank = values[RECORD:first] if ranks == self._ranks else [0.0] * len(ranks)
            before = values[:RECORD] + by_rank + values[first:]
            numbers = torch.tensor(before + [0.0] * (size - len(before)), dtype=torch.float64)
            self._numbers, self._readback, self._ranks = (
                numbers.to(device),
                Readback(numbers),
                ranks,
            )
            self._positions, self._params = {}, {}
        found = [
            *range(len(params), len(params) + len(ranks)),
            *(positions.get(p, -1) for p in self._names),
        ]
        self._positions[key] = torch.tensor(found, dtype=torch.int64).to(device)

    def decided(self, rule: ScaleRule, batches: Sequence[Snapshot]) -> None:
        """A decision was made: hears what has arrived of earlier ones, and sends for its numbers."""
        self._rule = rule
        if self._numbers is None or self._readback is None:
            return
        if self._numbers.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # neither question nor answer may become part of a CUDA graph
        self.collect()
        self._readback.start(self._numbers, Attached(rule, batches))

    def undo(self) -> None:
        """The last decision was unmade."""
        if self._readback is not None:
            self._readback.cancel_last()

    def collect(self, wait: bool = False) -> None:
        """Takes in what has arrived from the device, or, waiting for it, all that was sent for."""
        if self._readback is not None:
            for reading in self._readback.ready(wait):
                self._process(reading)

    def _process(self, reading: Reading) -> None:
        values, attached = reading
        counts = list(values[:3])
        clean, *skips = (int(now - before) for now, before in zip(counts, self._known, strict=True))
        self._known = counts
        step = int(sum(counts))
        if (
            clean or sum(skips) != 1
        ):  # some readings were not sent: what this one tells is the last skip
            self._run.clear()
        if sum(skips):
            self._run.append(step)
            self._process_skip(step, values, attached)
        elif clean:
            self._bad_since = 0
            self.history.append(StepRecord(step, None, values[SCALE], values[NORM]))

    def _process_skip(self, step: int, values: Sequence[float], attached: Attached) -> None:
        explanation = self.last = self._explain(step, values, attached)
        self._bad_since = (self._bad_since or step) if explanation.cause == PARAMETERS else 0
        self.batches, self.last_scale = attached.batches, values[SKIPPED_SCALE]
        self.history.append(
            StepRecord(
                step,
                explanation.cause,
                values[SCALE],
                None,
                explanation.parameters,
                explanation.text,
            )
        )
        if self._speaks:
            skipped = values[OVERFLOW] + values[FAULT]
            news = (
                math.frexp(skipped)[0] == 0.5
            )  # 1, 2, 4, 8...: a run that skips all the time says so now and then
            long_run = len(self._run) == _LONG_RUN
            log = logger.warning if (explanation.needs_help and news) or long_run else logger.info
            log(
                f"{_rank()}{skipped:.0f} of {step} steps skipped{self._of_run(long_run)}. {explanation.text}{explanation.hint}"
            )

    def _of_run(self, long_run: bool) -> str:
        return f", the last {_LONG_RUN} of them in a row" if long_run else ""

    def _explain(self, step: int, values: Sequence[float], attached: Attached) -> Explanation:
        rule, first = attached.rule, RECORD + len(self._ranks)
        skip = Skip(
            int(values[SKIPPED]),
            step,
            self._bad_since or step,
            values[SKIPPED_SCALE],
            rule.min_scale,
            rule.min_scale == rule.max_scale,
            dict(zip(self._names.values(), values[first:], strict=True)),
            values[AMAX],
            self._limit,
            dict(zip(self._ranks, values[RECORD:first], strict=True)),
        )
        return find_cause(skip, list(_data(attached.batches)), self._ask_tensors())

    def _values(self) -> list[float]:
        return (
            [*self._loaded, *[0.0] * (RECORD - _KEPT)]
            if self._numbers is None
            else self._numbers.tolist()
        )

    def counts(self) -> tuple[int, int, int]:
        """Decisions that were clean, scale overflows, forward faults. Reads the device."""
        clean, overflow, fault = self._values()[:3]
        return int(clean), int(overflow), int(fault)

    def stats(self) -> dict[str, Any]:
        """The numbers as plain values. Reads the device."""
        values, explanation = self._values(), self.explanation()
        return {
            "steps": int(values[CLEAN]),
            "skipped": int(values[OVERFLOW] + values[FAULT]),
            "scale_overflows": int(values[OVERFLOW]),
            "forward_faults": int(values[FAULT]),
            "last_skip_reason": None if explanation is None else explanation.cause,
            "grad_norm": values[NORM],
        }

    def last_good(self) -> tuple[float, float]:
        """Norm and largest magnitude of the gradients of the last step that was not skipped. Reads
        the device.
        """
        values = self._values()
        return values[NORM], values[AMAX]

    def load_counts(
        self, counts: tuple[int, int, int], last_good: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        """Continues from a checkpoint."""
        self.collect(wait=True)
        self._loaded = [float(n) for n in (*counts, *last_good)]
        self._known = self._loaded[:3]
        self._run.clear()
        if self._numbers is not None:
            self._numbers[:_KEPT] = torch.tensor(self._loaded, dtype=torch.float64)

    def explanation(self) -> Explanation | None:
        """The cause of the last skip; None: no step was skipped. Reads the device."""
        self.collect(wait=True)
        values = self._values()
        unseen = values[OVERFLOW] + values[FAULT] > self._known[OVERFLOW] + self._known[FAULT]
        if (
            int(values[SKIPPED]) in REASONS
            and self._rule is not None
            and (unseen or self.last is None)
        ):
            return self._explain(
                int(sum(values[:3])), values, Attached(self._rule, ())
            )  # a CUDA graph left it
        return self.last


def _data(batches: Sequence[Snapshot]) -> Iterator[list[tuple[str, Tensor]]]:
    """What came into the forwards from outside, with where it was among the arguments."""
    for batch in batches:
        with contextlib.suppress(BatchGoneError):  # somebody has written to it since
            yield list(tensors_in(batch.arguments(), batch.made))


def _rank() -> str:
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return f"rank {torch.distributed.get_rank()}: " if initialized else ""
