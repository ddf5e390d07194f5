"""Copies of device numbers to the host, without waiting: read when they have arrived."""

import ctypes
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Reading(NamedTuple):
    """Numbers as they were when the copy ran.

    Attributes:
        values: float64, valid until the next ``Readback.start``.
        attached: what ``start`` was given along with them.
    """

    values: Sequence[float]
    attached: Any


class Readback:
    """Copies of one tensor on their way to the host, in order.

    Args:
        numbers: float64 of shape (n,), on any device: what will be copied, or a tensor like it.
        most: copies under way; while there are so many, no more are started.
    """

    def __init__(self, numbers: Tensor, most: int = 4) -> None:
        self._free = [_HostBuffer(numbers) for _ in range(most)]
        self._started: deque[tuple[_HostBuffer, Any]] = deque()
        self._last: _HostBuffer | None = None  # of the last start; None: there was no room

    def start(self, numbers: Tensor, attached: Any) -> None:
        """Start copying the numbers, as they are when the device comes to it."""
        self._last = None
        if self._free:
            self._last = buffer = self._free.pop()
            buffer.fill(numbers)
            self._started.append((buffer, attached))

    def restart(self, numbers: Tensor, attached: Any) -> None:
        """Copy the numbers into the copy that was started last, which keeps what it has attached.

        If that was read, or had no room, it is a ``start`` with ``attached``.
        """
        if self._last is not None and self._started and self._started[-1][0] is self._last:
            self._last.fill(numbers)
        else:
            self.start(numbers, attached)

    def cancel_last(self) -> None:
        """Drop the copy that was started last, if it has not been read."""
        if self._started:
            self._free.append(self._started.pop()[0])

    def ready(self, wait: bool = False) -> Iterator[Reading]:
        """Yield the copies that have arrived, oldest first; with ``wait`` all of them."""
        while self._started and self._started[0][0].is_filled(wait):
            buffer, attached = self._started.popleft()
            self._free.append(buffer)
            yield Reading(buffer.values, attached)


class _HostBuffer:
    """A piece of main memory; pinned if the numbers are on a GPU, else CUDA is not initialised.

    Attributes:
        values: the memory as a sequence: reading it goes past torch, so it costs no op.
    """

    def __init__(self, numbers: Tensor) -> None:
        pinned = numbers.is_cuda
        self._numbers = torch.zeros(numbers.shape, dtype=torch.float64, pin_memory=pinned)
        memory: Any = (ctypes.c_double * len(numbers)).from_address(self._numbers.data_ptr())
        self.values: Sequence[float] = memory
        self._filled = torch.cuda.Event() if pinned else None

    def fill(self, numbers: Tensor) -> None:
        """Copy the numbers here, without waiting where they are on a GPU."""
        self._numbers.copy_(numbers, non_blocking=True)
        if self._filled is not None:
            self._filled.record(torch.cuda.current_stream(numbers.device))

    def is_filled(self, wait: bool) -> bool:
        """Return whether the last ``fill`` is done, after waiting for it if asked to."""
        if self._filled is None:
            return True
        if wait:
            self._filled.synchronize()
        return self._filled.query()
