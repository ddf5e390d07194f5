"""Streams of a GPU: which work comes before which, and memory that two of them use at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Clocks = dict["Stream", int]
"""How much of the work of each stream is over."""


class Stream:
    """The stand-in for ``torch.cuda.Stream``: work of a GPU that is done in order.

    Args:
        name: name in messages.
        waits_for: function that makes the host wait, given the wait's name and clocks.

    Attributes:
        clocks: progress of every stream that this stream has waited for.
    """

    device, cuda_stream = torch.device("cuda", 0), 0

    def __init__(self, name: str, waits_for: Callable[[str, Clocks], None]) -> None:
        self.name, self._waits_for = name, waits_for
        self.clocks: Clocks = {self: 0}

    @property
    def clock(self) -> int:
        """How much work the stream has been given."""
        return self.clocks[self]

    def wait_stream(self, stream: "Stream") -> None:
        join(self.clocks, stream.clocks)

    def wait_event(self, event: Any) -> None:
        join(self.clocks, event.clocks)

    def synchronize(self) -> None:
        self._waits_for("Stream.synchronize", self.clocks)


@dataclass
class Use:
    """A use of memory: name of the work, its stream, and the stream's clock."""

    what: str
    stream: Stream
    clock: int

    def is_before(self, stream: Stream) -> bool:
        """Return whether what the stream is given next waits for this."""
        return stream.clocks.get(self.stream, -1) >= self.clock


@dataclass
class _Memory:
    """The last uses of a storage: a write, and later reads, one of each stream."""

    storage: StorageWeakRef  # keeps its address from being another one's
    write: Use | None
    reads: dict[Stream, Use] = field(default_factory=dict)


class Streams:
    """The streams of a GPU, the uses of memory on them, and what the host has waited for.

    Uses are kept once there are two streams. Memory that is older counts as written by the first.

    Args:
        waits_for: function that makes the host wait, given the wait's name and clocks.

    Attributes:
        default: first stream.
        current: contexts of streams that are entered, innermost last. They are the process's, not a
            thread's: backwards run in another thread, on the streams of their forward.
        host: clocks that the host has waited for, for which all that it launches comes later.
    """

    def __init__(self, waits_for: Callable[[str, Clocks], None]) -> None:
        self.default = Stream("the default stream", waits_for)
        self.current = [self.default]
        self.host: Clocks = {}
        self._others: list[Stream] = []
        self._before_second: Use | None = None
        self._memories: dict[int, _Memory] = {}

    @property
    def has_several(self) -> bool:
        """Whether there are two streams."""
        return self._before_second is not None

    @property
    def clocks(self) -> Clocks:
        """How much work the streams have been given."""
        return {stream: stream.clock for stream in (self.default, *self._others)}

    def add(self, stream: Stream) -> None:
        """Note a stream that was made."""
        if self._before_second is None:
            self._before_second = Use("earlier work", self.default, self.default.clock)
        self._others.append(stream)

    def use(
        self,
        what: str,
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
        makes: Sequence[Tensor] = (),
    ) -> None:
        """Note work on the current stream.

        Args:
            what: name of the work.
            reads, writes: tensors whose memory it uses, on the GPU or pinned.
            makes: new tensors that it writes.

        Raises:
            AssertionError: It uses memory that another stream writes, or the other way round, and
                no stream waits for the other.
        """
        stream = self.current[-1]
        join(stream.clocks, self.host)
        stream.clocks[stream] += 1
        if not self.has_several:
            return
        now = Use(what, stream, stream.clock)
        for x in makes:
            storage = x.untyped_storage()
            self._memories[storage._cdata] = _Memory(StorageWeakRef(storage), now)
        for x in writes:
            memory = self._memory(x)
            _check(now, x, memory.write, *memory.reads.values())
            memory.write, memory.reads = now, {}
        for x in reads:
            memory = self._memory(x)
            if memory.write is not now:
                _check(now, x, memory.write)
                memory.reads[stream] = now

    def _memory(self, x: Tensor) -> _Memory:
        storage = x.untyped_storage()
        found = self._memories.get(storage._cdata)
        if found is None or found.storage.expired():
            write = self._before_second if x.is_cuda else None
            found = self._memories[storage._cdata] = _Memory(StorageWeakRef(storage), write)
        return found


def _check(now: Use, x: Tensor, *before: Use | None) -> None:
    for use in before:
        assert use is None or use.is_before(now.stream), (
            f"{now.what} on {now.stream.name} does not wait for {use.what} on {use.stream.name}: "
            f"both use the memory of a tensor {tuple(x.shape)}, and one writes it"
        )


def join(clocks: Clocks, others: Clocks) -> None:
    """Have what comes after ``clocks`` come after the others, too."""
    for stream, clock in others.items():
        if clocks.get(stream, -1) < clock:
            clocks[stream] = clock
