"""The observer of a run's decisions: it explains skips, and looks for common mistakes."""

from collections.abc import Sequence

from torch import Tensor

from tritonamp.diagnosis.clipping import ClippedGradients
from tritonamp.diagnosis.log import StepLog
from tritonamp.diagnosis.unseen_writes import UnseenWrites
from tritonamp.step.decision import Decision
from tritonamp.step.outcome import Outcome


class StepObserver:
    """An ``Observer`` of one ``Amp``.

    Args:
        log: log of the steps.
        unseen: detector of writes to weights that torch does not count.
        clipped: detector of gradients that were clipped with their loss scale, or are all 0.
    """

    def __init__(self, log: StepLog, unseen: UnseenWrites, clipped: ClippedGradients) -> None:
        self._log = log
        self._unseen = unseen
        self._clipped = clipped

    def look(self, decision: Decision) -> bool:
        """Look at the weights and gradients of a decision that is about to be made.

        Raises:
            RuntimeError: a cast of a module has made trained parameters half.
        """
        waiting = tuple(decision.waiting)
        for w in waiting:
            w.masters.check_dtypes()
            self._unseen.look(*w.masters.unlike())
        # Only gradients that still carry the scale: clipping true gradients is right.
        scaled = [w.gradients().lists for w in waiting if w.decision is decision]
        params, grads = (
            [x for lists in scaled for x in lists[name]] for name in ("copies", "grads")
        )
        self._clipped.look(waiting, params, grads, decision.scale)
        return self._unseen.looks.is_under_way or self._clipped.looks.is_under_way

    def collect_looks(self) -> bool:
        """Read numbers of looks that have arrived; return whether others are on their way."""
        of_weights, of_gradients = self._unseen.looks.collect(), self._clipped.looks.collect()
        return of_weights or of_gradients

    def measure(self, counts: Tensor) -> None:
        """Measure the weights before the step of a decision, with the counts by outcome."""
        self._log.sizes.measure(counts)

    def skipped(self, values: Sequence[float], outcome: Outcome) -> None:
        """Explain a skip whose numbers have arrived."""
        self._log.skipped(values, outcome)
