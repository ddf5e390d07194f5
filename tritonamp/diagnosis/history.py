"""The outcomes of the steps whose numbers were read, one by one."""

import itertools
from collections import Counter, deque
from collections.abc import Sequence

from tritonamp.diagnosis.records import StepRecord
from tritonamp.diagnosis.skips import Cause, Explanation, Overflow
from tritonamp.kernels._decision import CLEAN, NORM, OVERFLOW

MOST = 1000  # steps
_MOST_OVERFLOWS = 64  # kept of one row: enough from any scale down to the lowest


class History:
    """The last steps, with the causes of those that were skipped."""

    def __init__(self) -> None:
        self.records: deque[StepRecord] = deque(maxlen=MOST)  # oldest first
        self.causes: Counter[str] = Counter()  # number of skips by cause
        self.counts = [0.0] * NORM  # of decisions by outcome, at the last reading
        self.in_a_row = 0  # skips since the last step, as far as each was read
        self.overflows: deque[Overflow] = deque(maxlen=_MOST_OVERFLOWS)  # the last of these
        # number of the first of the last steps that a lasting cause skipped; 0: the last was not
        self.since = 0
        # number of the step that wrote the parameters last; 0: not known, or no step
        self.wrote = 0

    @property
    def step(self) -> int:
        """Number of the last decision, from 1, by the last reading."""
        return int(sum(self.counts))

    @property
    def taken(self) -> int:
        """Number of decisions to step, by the last reading."""
        return int(self.counts[CLEAN])

    @property
    def skipped(self) -> int:
        """Number of decisions to skip, by the last reading."""
        return self.step - self.taken

    @property
    def last_taken(self) -> int:
        """Number of the last recorded step, if it was taken; else -1."""
        taken = self.records and self.records[-1].cause is None
        return self.records[-1].step if taken else -1

    @property
    def zeros(self) -> int:
        """Number of the last steps whose gradients were all 0."""
        latest = itertools.takewhile(lambda record: record.grad_norm == 0.0, reversed(self.records))
        return sum(1 for _ in latest)

    def load(self, counts: Sequence[float]) -> None:
        """Continue from other counts."""
        self.counts = list(counts)
        self.in_a_row = 0
        self.overflows.clear()

    def update_counts(self, counts: Sequence[float]) -> tuple[int, int]:
        """Store the counts of a reading. Return the numbers of new steps, taken and skipped."""
        clean, *skips = (int(now - then) for now, then in zip(counts, self.counts, strict=True))
        if min(clean, *skips) < 0:  # a decision was read, then vetoed and made again, or given up
            self._forget_after(min(self.step - 1, int(sum(counts))))
            clean, *skips = (max(n, 0) for n in (clean, *skips))
        self.counts = list(counts)
        if clean or sum(skips) > 1:  # decisions between were not read
            self.in_a_row = 0
            self.overflows.clear()
        self.in_a_row += sum(skips) > 0
        return clean, sum(skips)

    def _forget_after(self, step: int) -> None:
        while self.records and self.records[-1].step > step:
            cause = self.records.pop().cause
            if cause is not None:
                self.causes[cause] -= 1

    def add_step(self, record: StepRecord) -> None:
        """Note a step that was taken."""
        self.since = 0
        self.records.append(record)

    def begin_skip(self, step: int, untouched: bool) -> None:
        """Note a skip before its cause is known; ``untouched`` as in ``Outcome``."""
        if not self.since:
            self.wrote = step - 1 if untouched and self.last_taken == step - 1 else 0

    def add_skip(self, found: Explanation, scale: float) -> None:
        """Note a skip, and the loss scale of its decision."""
        skip, cause = found.skip, found.cause
        # parameters stay inf or NaN, so their text names the step that saw it first
        self.since = (self.since or skip.step) if cause is Cause.PARAMETERS else 0
        self.causes[cause.value] += 1
        if skip.outcome == OVERFLOW:
            self.overflows.append(Overflow(skip.scale, skip.nan))
        else:
            self.overflows.clear()
        self.records.append(
            StepRecord(skip.step, cause.value, scale, None, found.parameters, found.text, skip.loss)
        )

    def replace_last(self, before: Explanation, found: Explanation) -> None:
        """Give the last skip another explanation."""
        if found.cause is not before.cause:
            self.causes[before.cause.value] -= 1
            self.causes[found.cause.value] += 1
        self.records[-1] = self.records[-1]._replace(
            cause=found.cause.value, parameters=found.parameters, detail=found.text
        )
