"""The decisions of one ``Amp``, by the numbers that the device has written about them."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from tritonamp.kernels._decision import AMAX, CLEAN, COUNTS, NORM, RECORD
from tritonamp.kernels._loss_scale import ScaleRule
from tritonamp.kernels.device import is_capturing
from tritonamp.readback import Reading
from tritonamp.step.decision import Decision
from tritonamp.step.device_record import DeviceRecord
from tritonamp.step.outcome import Observer, Outcome

MOST = 1000  # taken steps whose numbers wait for a reader
_FIRST = 4  # each of the first steps is looked at, then steps 8, 16, 32...


class DecisionLog:
    """Counts of all decisions, and their numbers, read without waiting for the device.

    ::

        note         -> the device's record is copied to the host
        a later note -> the copy has arrived: taken steps wait in ``taken`` for a reader,
                        a skip goes to the observer at once

    Args:
        names: function that returns the full name of each parameter.

    Attributes:
        observer: add-on that explains skips; None: nothing does.
        after_decision: function that is called after each decision, with the counts by outcome, on
            the device; None: nothing is called.
        rule: rule of the loss scale in the last decision; None: there was none.
        taken: numbers of taken steps that have arrived and were not read, the oldest first.
        device_record: record of the last decision.
    """

    def __init__(self, names: Callable[[], Mapping[Tensor, str]]) -> None:
        self.observer: Observer | None = None
        self.after_decision: Callable[[Tensor], None] | None = None
        self.rule: ScaleRule | None = None
        self.taken: deque[Sequence[float]] = deque(maxlen=MOST)
        self.device_record = DeviceRecord(names, self._collect_all)
        # skips by outcome, by the last numbers that have arrived
        self._skips: Sequence[float] = [0.0] * (len(COUNTS) - 1)
        self._decisions: defaultdict[tuple[int, ...], int] = defaultdict(int)  # by who waited
        self._looks_on_way = False

    # a decision

    def look(self, decision: Decision) -> bool:
        """Let the observer look at a decision that is about to be made, in a few steps.

        Optimizers that take turns are counted by themselves.

        Returns:
            whether the observer has looked.
        """
        if self.observer is None:
            return False
        waiting = tuple(map(id, decision.waiting))
        number = self._decisions[waiting] = self._decisions[waiting] + 1
        is_due = number <= _FIRST or not number & (number - 1)
        if not (is_due or self._looks_on_way) or is_capturing(decision.scale.device):
            return False
        self._looks_on_way = self.observer.collect_looks()
        if is_due:
            self._looks_on_way |= self.observer.look(decision)
        return is_due

    def note(self, outcome: Outcome, looked: bool = False) -> None:
        """Process the numbers that have arrived, and start copying those of a new decision.

        Args:
            outcome: the decision.
            looked: whether the observer has looked at the decision.
        """
        self.rule, record = outcome.rule, self.device_record
        assert record.counts is not None  # ``DeviceRecord.place`` came first
        if self.after_decision is not None:
            self.after_decision(record.counts)
        if is_capturing(record.counts.device):
            return  # a read of the device would become part of the CUDA graph
        self._process(record.arrived())
        if looked and self.observer is not None:
            self.observer.measure(record.counts)
        record.start_reading(outcome)

    def undo(self) -> None:
        """Forget the last decision, which was undone."""
        self.device_record.cancel_last_reading()

    def note_again(self, rule: ScaleRule) -> None:
        """Copy the numbers again, because the last decision was undone, and perhaps made again."""
        if not self.device_record.is_captured:
            self.device_record.start_reading(Outcome(rule), again=True)

    def collect(self, wait: bool = False) -> None:
        """Process the numbers that have arrived. With ``wait``, wait for all that were started."""
        if wait or not self.device_record.is_captured:
            self._process(self.device_record.arrived(wait))

    def _process(self, readings: Iterable[Reading]) -> None:
        for values, outcome in readings:
            skips = values[CLEAN + 1 : len(COUNTS)]
            if skips == self._skips or self.observer is None:
                self.taken.append(values[:RECORD])
            else:
                self._skips = skips
                self.observer.skipped(values, outcome)

    def _collect_all(self) -> None:
        self.collect(wait=True)

    # all decisions

    @property
    def any_taken(self) -> Tensor | None:
        """Whether any step was taken, 0-d bool on the device; None: there was no decision."""
        counts = self.device_record.counts
        return None if counts is None else counts[CLEAN] > 0

    def counts(self) -> dict[str, int]:
        """Return the number of decisions by outcome of ``COUNTS``. Reads the device."""
        values = self.device_record.values()
        return {name: int(values[slot]) for name, slot in COUNTS.items()}

    def last_good(self) -> tuple[float, float]:
        """Return norm and largest magnitude of the last good step's gradients. Reads the device."""
        values = self.device_record.values()
        return values[NORM], values[AMAX]

    def load_counts(self, counts: Mapping[str, int], last_good: Sequence[float]) -> None:
        """Continue from results of ``counts`` and ``last_good``."""
        self.collect(wait=True)
        by_outcome = [float(counts.get(name, 0)) for name in COUNTS]
        self.device_record.load([*by_outcome, *last_good])
        self._skips = by_outcome[CLEAN + 1 :]
