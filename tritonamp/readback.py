"""Copies of device numbers to the host, which are read once they have arrived, without waiting."""

import ctypes
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Reading(NamedTuple):
    """Numbers with the values that they had when the copy ran.

    Attributes:
        values: float64 numbers, valid until the next ``Readback.start``.
        attached: object that was given to ``start`` with the numbers.
    """

    values: Sequence[float]
    attached: Any


class Readback:
    """Copies of one tensor on their way to the host, in order.

    Args:
        numbers: the tensor, or one like it: float64 of shape (n,), on any device.
        most: largest number of copies under way; further ones are not started.
    """

    def __init__(self, numbers: Tensor, most: int = 4) -> None:
        self._free = [_HostBuffer(numbers) for _ in range(most)]
        self._started: deque[tuple[_HostBuffer, Any]] = deque()
        self._last: _HostBuffer | None = None  # of the last start; None: there was no room

    def start(self, numbers: Tensor, attached: Any) -> None:
        """Start to copy the numbers that the tensor holds when the device comes to the copy.

        Args:
            numbers: float64 of the shape that the constructor was given.
            attached: any object; the ``Reading`` has it.
        """
        self._last = None
        if self._free:
            self._last = buffer = self._free.pop()
            buffer.fill(numbers)
            self._started.append((buffer, attached))

    def restart(self, numbers: Tensor, attached: Any) -> None:
        """Copy the numbers into the copy that was started last, which keeps its ``attached``.

        If that copy was read, or had no room, this is ``start(numbers, attached)``.
        """
        if self._last is not None and self._is_last_under_way:
            self._last.fill(numbers)
        else:
            self.start(numbers, attached)

    def cancel_last(self) -> None:
        """Drop the copy of the last start, unless it was read or had no room."""
        if self._is_last_under_way:
            self._free.append(self._started.pop()[0])

    @property
    def _is_last_under_way(self) -> bool:
        return bool(self._started) and self._started[-1][0] is self._last

    def ready(self, wait: bool = False) -> Iterator[Reading]:
        """Yield the copies that have arrived, the oldest first.

        Args:
            wait: wait for all copies.
        """
        while self._started and self._started[0][0].is_filled(wait):
            buffer, attached = self._started.popleft()
            self._free.append(buffer)
            yield Reading(buffer.values, attached)


class _HostBuffer:
    """A piece of main memory for numbers; it is pinned only if the numbers are on a GPU.

    A CPU tensor therefore does not initialise CUDA.

    Attributes:
        values: the memory as a sequence; reading it bypasses torch, so it costs no operation.
    """

    def __init__(self, numbers: Tensor) -> None:
        pinned = numbers.is_cuda
        self._numbers = torch.zeros(numbers.shape, dtype=torch.float64, pin_memory=pinned)
        memory: Any = (ctypes.c_double * len(numbers)).from_address(self._numbers.data_ptr())
        self.values: Sequence[float] = memory
        self._filled = torch.cuda.Event() if pinned else None

    def fill(self, numbers: Tensor) -> None:
        """Copy the numbers here, without waiting if they are on a GPU."""
        self._numbers.copy_(numbers, non_blocking=True)
        if self._filled is not None:
            self._filled.record(torch.cuda.current_stream(numbers.device))

    def is_filled(self, wait: bool) -> bool:
        """Return whether the last ``fill`` is done.

        Args:
            wait: wait until it is done.
        """
        if self._filled is None:
            return True
        if wait:
            self._filled.synchronize()
        return self._filled.query()
