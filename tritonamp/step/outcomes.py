"""Outcomes of one optimizer's steps, kept on the device so that the host does not wait."""

from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._transfer import transfer
from tritonamp.kernels.device import is_capturing, refuse_capture


class StepOutcomes:
    """Counts of one optimizer's steps: tried ones, taken ones, and whether the last was a skip.

    Taken steps are counted on the device from the first call of ``count_taken`` on.

    Attributes:
        tried: number of steps, skips included; replays of a CUDA graph are not counted.
        captured: whether a CUDA graph has captured a step.
        found_inf: 0-d flag on the device, not 0 if the last step was a skip; None: there was no
            step.
        tried_before: steps tried before the last ``state`` or ``load_state``.
        known_taken: number of taken steps among ``tried_before``.
        is_counting: whether taken steps are counted on the device.
    """

    def __init__(self) -> None:
        self.tried = 0
        self.captured = False
        self.found_inf: Tensor | None = None
        self.known_taken = 0
        self.tried_before = 0
        self.is_counting = False
        self._uncounted_graph = False  # whether the captured step counts nothing in its replays
        self._taken: Tensor | None = None  # int64 of shape (1,), on the device of the gradients

    def note_outcome(self, found_inf: Tensor) -> None:
        """Note the outcome of a step.

        Args:
            found_inf: 0-d flag, not 0 if the step was skipped.
        """
        if self.captured and self.found_inf is not None:
            # in place, because replays write to this tensor, and ``EMA`` reads it
            self.found_inf.copy_(found_inf)
        else:
            self.found_inf = found_inf
        if self.is_counting:
            if self._taken is None:
                # a replay would set the count back to its value at the capture
                refuse_capture(found_inf.device, "the count of steps that were taken")
                self._taken = found_inf.new_full((1,), self.known_taken, dtype=torch.int64)
            self._taken.add_(found_inf == 0)
        if is_capturing(found_inf.device):
            self.captured = True
            self._uncounted_graph = not self.is_counting
        else:
            # A capture only records. Its steps come with the replays.
            self.tried += 1

    @property
    def is_known(self) -> bool:
        """Whether ``known_taken`` counts all steps, because no step was tried since."""
        return self.tried == self.tried_before and not self.captured

    def count_taken(self, any_taken: Tensor | None) -> Tensor | None:
        """Return the number of taken steps, int64 of shape (1,), kept up to date on the device.

        Steps before the first call count as one at most.

        Args:
            any_taken: 0-d, whether any optimizer has taken a step before the first call. A single
                tried step is known without it.

        Returns:
            the count; None if no step was tried since the beginning, ``state`` or ``load_state``.

        Raises:
            RuntimeError: a CUDA graph has captured a step that does not count.
        """
        was_counting, self.is_counting = self.is_counting, True
        if self._uncounted_graph:
            raise RuntimeError(
                "amp.step_schedulers: expected a call before a CUDA graph captures "
                "optimizer.step(), got the first one after: run a step, and capture again"
            )
        if not was_counting and not self.is_known and self.found_inf is not None:
            self._taken = self.found_inf.new_zeros((1,), dtype=torch.int64)
            # Schedulers are called after a step, so a first call finds that step uncounted.
            self._taken.add_(
                self.found_inf == 0
                if self.tried == 1 or any_taken is None
                else transfer(any_taken, self._taken.device)
            )
        return self._taken

    def state(self, any_taken: bool) -> dict[str, Any]:
        """Return the counts as plain values, and remember them as known. Reads the device.

        Args:
            any_taken: whether any optimizer has taken a step. It counts if ``count_taken`` was
                never called and several steps were tried.
        """
        if self._taken is not None:
            self.known_taken = int(self._taken)
        elif not self.is_known:
            first = self.tried == 1 and self.found_inf is not None
            self.known_taken = int(self.found_inf == 0 if first else any_taken)
        self.tried_before = self.tried
        return {"tried": self.tried, "taken": self.known_taken, "counted": self.is_counting}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a result of ``state``."""
        self.tried = self.tried_before = state["tried"]
        self.known_taken = state["taken"]
        self.is_counting = state["counted"] or self._taken is not None
        # filled in place: a captured step adds to this tensor in its replays
        if self._taken is not None:
            self._taken.fill_(self.known_taken)
        if not self.captured:
            self.found_inf = None


NO_STEPS: dict[str, Any] = {"tried": 0, "taken": 0, "counted": False}
"""The result of ``StepOutcomes.state`` before any step."""
