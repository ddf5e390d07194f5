"""Copies of device numbers to the host, which are read once they have arrived, without waiting."""

import ctypes
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_IN_C: dict[torch.dtype, Any] = {
    torch.float64: ctypes.c_double,
    torch.float32: ctypes.c_float,
    torch.int64: ctypes.c_int64,
}


class Reading(NamedTuple):
    """Numbers with the values that they had when the copy ran.

    Attributes:
        values: the numbers, valid until the next ``Readback.start``.
        attached: object that was given to ``start`` with the numbers.
    """

    values: Sequence[float]
    attached: Any


class _HostBuffer(NamedTuple):
    """A piece of main memory for numbers; it is pinned only if the numbers are on a GPU.

    A CPU tensor therefore does not initialise CUDA.

    Attributes:
        numbers: the memory as a tensor.
        values: the memory as a sequence; reading it bypasses torch, so it costs no operation.
        filled: event after the last copy; None: the numbers are not on a GPU of CUDA or ROCm, and
            the host waits for copies.
    """

    numbers: Tensor
    values: Sequence[float]
    filled: Any


class Readback:
    """Copies of one tensor on their way to the host, in order.

    Args:
        numbers: the tensor, or one like it: float64, float32 or int64 of shape (n,), on any device.
        most: largest number of copies under way; further ones are not started.
    """

    def __init__(self, numbers: Tensor, most: int = 4) -> None:
        self._free = [_buffer_for(numbers) for _ in range(most)]
        self._started: deque[tuple[_HostBuffer, Any]] = deque()
        self._last: _HostBuffer | None = None  # of the last start; None: there was no room

    def start(self, numbers: Tensor, attached: Any) -> None:
        """Start to copy the numbers that the tensor holds when the device comes to the copy.

        Args:
            numbers: tensor of the shape and dtype that the constructor was given.
            attached: any object; the ``Reading`` has it.
        """
        self._last = None
        if self._free:
            self._last = buffer = self._free.pop()
            # the host does not wait for numbers on a GPU; elsewhere nothing tells when they arrived
            buffer.numbers.copy_(numbers, non_blocking=buffer.filled is not None)
            if buffer.filled is not None:
                buffer.filled.record(torch.cuda.current_stream(numbers.device))
            self._started.append((buffer, attached))

    def restart(self, numbers: Tensor, attached: Any) -> None:
        """Start the last copy again, with its own ``attached``.

        If that copy was read, or had no room, this is ``start(numbers, attached)``.
        """
        if self._is_last_under_way:
            buffer, attached = self._started.pop()
            self._free.append(buffer)
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
        while self._started:
            buffer, attached = self._started[0]
            if buffer.filled is not None:
                if wait:
                    buffer.filled.synchronize()
                if not buffer.filled.query():
                    return
            self._started.popleft()
            self._free.append(buffer)
            yield Reading(buffer.values, attached)


def _buffer_for(numbers: Tensor) -> _HostBuffer:
    """Return main memory for a copy of ``numbers``."""
    pinned = numbers.is_cuda
    copies = torch.zeros(numbers.shape, dtype=numbers.dtype, pin_memory=pinned)
    memory: Any = (_IN_C[numbers.dtype] * len(numbers)).from_address(copies.data_ptr())
    return _HostBuffer(copies, memory, torch.cuda.Event() if pinned else None)
