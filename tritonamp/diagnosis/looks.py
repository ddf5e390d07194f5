"""Numbers that are measured in a few steps of a run, and read when they have arrived."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from tritonamp.readback import Readback


class Looks:
    """Numbers of looks on their way to the host. They are read at a later step without a wait.

    Args:
        read: function called with the numbers of a look, and with the attached object of ``start``.

    Attributes:
        has_ended: whether no later look is read, because there is nothing more to say.
    """

    def __init__(self, read: Callable[[Sequence[float], Any], None]) -> None:
        self._read = read
        self._readbacks: dict[Hashable, Readback] = {}
        self._under_way = 0
        self.has_ended = False

    @property
    def is_under_way(self) -> bool:
        """Whether numbers are on their way."""
        return self._under_way > 0

    def start(self, numbers: Tensor, attached: Any) -> None:
        """Start copying the numbers of a look to the host.

        Args:
            numbers: tensor of shape (n,), in the ``wide_dtype`` of its device.
            attached: object to hand to ``read`` with the numbers.
        """
        kind = len(numbers), numbers.device
        if kind not in self._readbacks:
            self._readbacks[kind] = Readback(numbers)
        self._readbacks[kind].start(numbers, attached)
        self._under_way += 1
        if numbers.device.type == "cpu":
            self.collect()

    def collect(self) -> bool:
        """Read the numbers that have arrived; return whether others are on their way."""
        for readback in self._readbacks.values():
            for values, attached in readback.ready():
                self._under_way -= 1
                if not self.has_ended:
                    self._read(values, attached)
        return self.is_under_way
