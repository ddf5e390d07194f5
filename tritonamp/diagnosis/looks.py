"""Numbers that are measured in a few steps of a run, and read when they have arrived."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels.device import is_capturing
from tritonamp.readback import Readback

_FIRST = 4  # each of the first steps is looked at, then steps 8, 16, 32...


class Looks:
    """Chooses steps to look at: the first four, then the 8th, 16th, 32nd...

    In a long run this costs nothing. The numbers of a look are read at a later step, so nothing
    waits for the device.

    Args:
        read: function called with the numbers of a look, and with the attached object of ``start``.

    Attributes:
        has_ended: whether no later step is looked at, because there is nothing more to say.
    """

    def __init__(self, read: Callable[[Sequence[float], Any], None]) -> None:
        self._read = read
        self._steps: defaultdict[Hashable, int] = defaultdict(int)
        self._readbacks: dict[Hashable, Readback] = {}
        self._under_way = 0
        self.has_ended = False

    def is_due(self, key: Hashable, device: torch.device) -> bool:
        """Return whether to look at this step. Call it once in each step.

        Args:
            key: name of a sequence of steps. Each sequence is counted by itself.
            device: device of the step. A step that a CUDA graph captures is not looked at.
        """
        if self.has_ended:
            return False
        self._steps[key] += 1
        step = self._steps[key]
        # a power of two, without a call: this runs at every step
        is_due = step <= _FIRST or not step & (step - 1)
        if not (is_due or self._under_way) or is_capturing(device):
            return False
        self._collect()
        return is_due

    def start(self, numbers: Tensor, attached: Any) -> None:
        """Start copying the numbers of a look to the host.

        Args:
            numbers: float64 of shape (n,).
            attached: object to hand to ``read`` with the numbers.
        """
        kind = len(numbers), numbers.device
        if kind not in self._readbacks:
            self._readbacks[kind] = Readback(numbers)
        self._readbacks[kind].start(numbers, attached)
        self._under_way += 1
        if numbers.device.type == "cpu":
            self._collect()

    def _collect(self) -> None:
        for readback in self._readbacks.values():
            for values, attached in readback.ready():
                self._under_way -= 1
                if not self.has_ended:
                    self._read(values, attached)
