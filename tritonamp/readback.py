"""Numbers on their way from the device, without waiting: read when they have arrived."""

import ctypes
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Letter(NamedTuple):
    """Numbers as they were, float64, and what the sender enclosed."""

    values: Sequence[float]
    enclosed: Any


class Mailbox:
    """Copies of one tensor on their way, in order.

    Args:
        numbers: float64 of shape (n,), on any device: what will be sent.
        most: letters under way; while there are so many no more are sent.
    """

    def __init__(self, numbers: Tensor, most: int = 4) -> None:
        self._free = [_Envelope(numbers) for _ in range(most)]
        self._sent: deque[tuple[_Envelope, Any]] = deque()

    def send(self, numbers: Tensor, enclosed: Any) -> None:
        """Sends the numbers as they are when the device comes to it."""
        if self._free:
            envelope = self._free.pop()
            envelope.fill(numbers)
            self._sent.append((envelope, enclosed))

    def take_back(self) -> None:
        """Destroys the last letter that was sent, if it has not been read."""
        if self._sent:
            self._free.append(self._sent.pop()[0])

    def arrived(self, wait: bool = False) -> Iterator[Letter]:
        """Those that have arrived, or all of them; the values are gone with the next letter."""
        while self._sent and self._sent[0][0].is_here(wait):
            envelope, enclosed = self._sent.popleft()
            self._free.append(envelope)
            yield Letter(envelope.values, enclosed)


class _Envelope:
    """A piece of main memory, pinned where there is a GPU."""

    def __init__(self, numbers: Tensor) -> None:
        pinned = torch.cuda.is_available()
        self._numbers = torch.zeros(numbers.shape, dtype=torch.float64, pin_memory=pinned)
        memory: Any = (ctypes.c_double * len(numbers)).from_address(self._numbers.data_ptr())
        self.values: Sequence[float] = memory
        self._here = torch.cuda.Event() if pinned else None

    def fill(self, numbers: Tensor) -> None:
        self._numbers.copy_(numbers, non_blocking=True)
        if self._here is not None and numbers.is_cuda:
            self._here.record(torch.cuda.current_stream(numbers.device))

    def is_here(self, wait: bool) -> bool:
        if self._here is None:
            return True
        if wait:
            self._here.synchronize()
        return self._here.query()
