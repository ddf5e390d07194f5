"""Learning-rate schedulers follow the taken steps, without waiting for the device.

    call           step the scheduler, as if the step before it was taken; ask for its outcome
    a later call   that outcome has arrived: a skip -> this call does not step the scheduler

The CPU knows an outcome at once, so no scheduler is ever ahead there.
"""

import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.distributed.ranks import Ranks
from tritonamp.kernels.device import is_capturing
from tritonamp.readback import Readback
from tritonamp.step.decision_log import DecisionLog
from tritonamp.step.outcomes import NO_STEPS, StepOutcomes

# Calls with an unknown outcome, after which the host waits for the oldest one. Without a bound, a
# device far behind the host could let a schedule run ahead by any number of skips.
_MOST_UNKNOWN = 16


class SteppedScheduler:
    """One scheduler, with the difference between its steps and its optimizer's.

    A call steps the scheduler if its optimizer has taken a step since the call before.

    Args:
        scheduler: any object with ``step()``.
        outcomes: step outcomes of the scheduler's optimizer.
        log: log of all decisions.
        state: a result of ``state``, to continue from; None: the scheduler begins.
    """

    def __init__(
        self,
        scheduler: Any,
        outcomes: StepOutcomes,
        log: DecisionLog,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._outcomes = outcomes
        self._log = log
        self._ahead = 0  # steps of the scheduler beyond the known taken steps
        self._unknown = 0  # calls whose outcome has not arrived
        self._tried = 0  # steps of the optimizer at the last call
        self._taken = 0  # steps taken, at the last call whose outcome has arrived
        self._readback: Readback | None = None
        if state is not None:
            self._ahead = state["ahead"]
            self._tried = outcomes.tried_before - state["open"]
            self._taken = outcomes.known_taken - state["open"]

    def step(self, wait: bool) -> None:
        """Step the scheduler, unless it is ahead by a skip or no step was tried.

        Args:
            wait: wait for the outcomes of earlier calls.
        """
        outcomes = self._outcomes
        # ``any_taken`` costs an operation on the device, and only the first call needs it
        taken = outcomes.count_taken(None if outcomes.is_counting else self._log.any_taken)
        if taken is not None and is_capturing(taken.device):
            raise RuntimeError(
                "amp.step_schedulers: expected a call after each replay of a CUDA graph, got one "
                "inside of the capture: replays run no Python"
            )
        if outcomes.tried == self._tried and not outcomes.captured:
            return
        self._tried = outcomes.tried
        # Before this call's own outcome is asked for: the readback has room for ``_MOST_UNKNOWN``
        # copies, and would start no further one.
        self._settle_arrived(wait or self._unknown >= _MOST_UNKNOWN)
        self._read_outcome(taken)
        # An unknown outcome counts as a taken step. A scheduler that is ahead by more calls than
        # are unknown has stepped for a skip, and this call makes up for that.
        if self._ahead < self._unknown:
            self.scheduler.step()
            self._ahead += 1

    def _read_outcome(self, taken: Tensor | None) -> None:
        """Start to copy the number of taken steps to the host, for the present call."""
        self._unknown += 1
        if taken is None or self._outcomes.is_known:
            self._settle_oldest(self._outcomes.known_taken)
            return
        if self._readback is None:
            self._readback = Readback(taken, _MOST_UNKNOWN)
        self._readback.start(taken, None)
        # The CPU's copy has arrived already. Settled at once, it keeps the schedule exact there.
        if not taken.is_cuda:
            self._settle_arrived(wait=False)

    def _settle_arrived(self, wait: bool) -> None:
        if self._readback is not None:
            for reading in self._readback.ready(wait):
                self._settle_oldest(int(reading.values[0]))

    def _settle_oldest(self, taken: int) -> None:
        """Settle the oldest unknown call.

        Args:
            taken: number of steps that had been taken at that call.
        """
        self._unknown -= 1
        if taken > self._taken:
            self._ahead -= 1
        self._taken = taken

    def state(self, taken: int) -> dict[str, Any]:
        """Return the outstanding corrections as plain values. Waits for the device.

        Args:
            taken: number of steps that the optimizer has taken.
        """
        self._settle_arrived(wait=True)
        # A step was taken after the last call. The next call, in the resumed run, has to count it.
        is_open = taken > self._taken
        if not is_open:
            # every step since the last call was a skip, and the next call has nothing to count
            self._tried = self._outcomes.tried
        return {
            "kind": type(self.scheduler).__name__,
            "ahead": self._ahead,
            "open": int(is_open),
        }


class SchedulerSteps:
    """The schedulers of one ``Amp``.

    Args:
        outcomes: step outcomes by optimizer.
        log: log of all decisions.
        ranks: processes that train together, which must learn of an outcome at the same call.
    """

    def __init__(
        self, outcomes: Mapping[Optimizer, StepOutcomes], log: DecisionLog, ranks: Ranks
    ) -> None:
        self._outcomes = outcomes
        self._log = log
        self._ranks = ranks
        self._stepped: dict[Optimizer, list[SteppedScheduler]] = {o: [] for o in outcomes}
        # States that wait for their scheduler. A file does not hold schedulers, and the resumed run
        # names them with its first call.
        self._loaded: dict[Optimizer, list[dict[str, Any]]] = {o: [] for o in outcomes}

    def step(self, schedulers: Sequence[Any]) -> None:
        """Step the schedulers whose optimizer has stepped since the call before.

        Raises:
            ValueError: an argument is no scheduler of an enabled optimizer; none was stepped.
        """
        # all are looked up before one is stepped, so that an error changes nothing
        found = [
            self._stepped_scheduler(number, scheduler)
            for number, scheduler in enumerate(schedulers)
        ]
        # How soon an outcome arrives without waiting is a matter of time, not of the program.
        # Ranks, and repeated runs, would have different learning rates.
        wait = self._ranks.several or torch.are_deterministic_algorithms_enabled()
        for stepped in found:
            stepped.step(wait)

    def _stepped_scheduler(self, number: int, scheduler: Any) -> SteppedScheduler:
        for stepped in itertools.chain.from_iterable(self._stepped.values()):
            if stepped.scheduler is scheduler:
                return stepped
        _check_scheduler(number, scheduler)
        optimizer = self._optimizer_of(number, scheduler)
        loaded = self._pop_loaded(optimizer, scheduler)
        stepped = SteppedScheduler(scheduler, self._outcomes[optimizer], self._log, loaded)
        self._stepped[optimizer].append(stepped)
        return stepped

    def _optimizer_of(self, number: int, scheduler: Any) -> Optimizer:
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is None and len(self._outcomes) == 1:
            return next(iter(self._outcomes))
        if isinstance(optimizer, Optimizer) and optimizer in self._outcomes:
            return optimizer
        got = "none" if optimizer is None else f"another {type(optimizer).__name__}"
        raise ValueError(
            f"scheduler {number}: expected {type(scheduler).__name__} whose attribute optimizer "
            f"is one given to tritonamp.enable, got {got}: enable the optimizer with the model, or "
            "call the scheduler's step() yourself"
        )

    def _pop_loaded(self, optimizer: Optimizer, scheduler: Any) -> dict[str, Any] | None:
        """Return and forget the first loaded state for this kind of scheduler, or None."""
        loaded = self._loaded[optimizer]
        for i, state in enumerate(loaded):
            if state["kind"] == type(scheduler).__name__:
                return loaded.pop(i)
        return None

    def state(self) -> list[dict[str, Any]]:
        """Return the outstanding steps of each optimizer's schedulers. Waits for the device."""
        states = []
        any_taken = self._log.counts()["clean"] > 0
        for optimizer, outcomes in self._outcomes.items():
            steps = outcomes.state(any_taken)
            live = [stepped.state(steps["taken"]) for stepped in self._stepped[optimizer]]
            states.append({**steps, "schedulers": live + self._loaded[optimizer]})
        return states

    def load_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from a result of ``state``; schedulers are matched by kind and order.

        An optimizer without an entry has nothing outstanding.
        """
        for number, (optimizer, outcomes) in enumerate(self._outcomes.items()):
            state = states[number] if number < len(states) else {**NO_STEPS, "schedulers": []}
            outcomes.load_state(dict(state))
            if outcomes.tried:
                # Private (torch 2.11 to 2.15). Without this mark a scheduler warns that it was
                # called before the optimizer, which has stepped before the state was saved.
                optimizer._opt_called = True  # type: ignore[attr-defined]
            self._stepped[optimizer] = []
            self._loaded[optimizer] = list(state["schedulers"])


def _check_scheduler(number: int, scheduler: Any) -> None:
    """Raise ValueError if the object has no ``step`` that can be called without arguments."""
    kind, step = type(scheduler).__name__, getattr(scheduler, "step", None)
    if isinstance(scheduler, (type, Optimizer)) or not callable(step):
        raise ValueError(
            f"scheduler {number}: expected a learning-rate scheduler, an object with step(), got "
            f"{'the class ' + scheduler.__name__ if isinstance(scheduler, type) else kind}: "
            "give schedulers one by one"
        )
    try:
        inspect.signature(step).bind()
    except TypeError as error:
        raise ValueError(
            f"scheduler {number}: expected one whose step() takes no arguments, got {kind} "
            f"({error}): call its step yourself, where you know what it asks for"
        ) from None
