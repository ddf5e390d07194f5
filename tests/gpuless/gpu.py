"""What a GPU does while the host goes on: copies under way, waits, pinned memory, captured work."""

import contextlib
import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpuless.streams import Clocks, Streams, join
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

ROOT = f"{Path(__file__).parents[2]}{os.sep}"
OURS = {
    "driver.py", "fake_cuda.py", "gpu.py", "real_cuda.py", "streams.py", "tensors.py",
    "torch_cuda.py",
}  # fmt: skip


class Record(NamedTuple):
    """Something that a fast program would not do in a training step.

    Attributes:
        kind: "wait" (the host stands still until the GPU is done), "pageable" (a copy out of or
            into memory that is not pinned: the host does it in pieces), "query" of an event, or
            "pinning" of memory.
        what: the operation.
        where: the lines of this repository that led to it, the innermost first.
    """

    kind: str
    what: str
    where: str


class Observer:
    """Is shown the work of the GPU; this one ignores it."""

    def computed(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """See an operation of torch after its work was launched; views are operations, too."""

    def launched(self, kernel: str, tensors: tuple[Tensor, ...]) -> None:
        """See a kernel that Triton's interpreter runs, with its arguments that are tensors."""

    def attention(self, args: Any, kwargs: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context for the operations that stand for a kernel of attention."""
        return contextlib.nullcontext()


class _Copy:
    """A copy under way.

    Args:
        host: pinned memory.
        arrive: function that the arrival calls.
        sent: values on their way to the host; None for a copy to the GPU.

    Attributes:
        afterwards: function that a later copy to the same memory calls at once.
    """

    def __init__(
        self, host: Tensor, arrive: Callable[[], object], sent: Tensor | None = None
    ) -> None:
        self.host, self.sent, self._arrive = host, sent, arrive
        self.afterwards: Callable[[], object] = lambda: None

    def arrive(self) -> None:
        self._arrive()
        self.afterwards()


class Gpu:
    """One GPU.

    Work of all streams is done at once, in the order of its launch. Only copies to the host arrive
    late (``send``).

    Attributes:
        records: the waits and launches so far, as ``Record``.
        launches: names of the launched kernels.
        event_lag: number of times that an event answers "not done yet".
        raises_on_wait: whether a wait raises, as after ``torch.cuda.set_sync_debug_mode(2)``.
        graph: the work of a capture, which is recorded instead of done.
        generator: generator of random numbers on the GPU.
        streams: the order between work of different streams.
        observer: an object that is shown all work.
        has_float64: whether tensors of float64 can be on it.
    """

    def __init__(self) -> None:
        self.streams = Streams(self.waits_for)
        self.records: list[Record] = []
        self.launches: list[str] = []
        self.event_lag = 0
        self.raises_on_wait = False
        self.graph: list[Callable[[], object]] | None = None
        self.generator = torch.Generator()
        self.observer = Observer()
        self.has_float64 = True
        self._one_at_a_time = threading.RLock()  # threads share the stream
        self._pinned: dict[int, Tensor] = {}  # alive, so that no other tensor gets the address
        self._under_way: list[_Copy] = []
        self._arrived = 0

    # what the host did

    def note(self, kind: str, what: str) -> None:
        if self.graph is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
        self.records.append(Record(kind, what, _where()))

    def waits_for(self, what: str, clocks: Clocks | None = None) -> None:
        """The host waits here, and all copies arrive.

        Args:
            what: why it waits.
            clocks: for which work; by default for that of the current stream.
        """
        if self.raises_on_wait:
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
        self.note("wait", what)
        self.arrive(self.position)
        join(self.streams.host, self.streams.current[-1].clocks if clocks is None else clocks)

    def pin(self, tree: Any) -> None:
        if self.graph is None:  # since torch 2.11 what is pinned during a capture is the graph's
            self.note("pinning", "pinned memory")
        self._pinned |= {x.untyped_storage().data_ptr(): x for x in tree_leaves(tree)}

    def is_pinned(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self._pinned

    # copies under way

    @property
    def position(self) -> int:
        """How many copies have been started."""
        return self._arrived + len(self._under_way)

    def arrive(self, position: int) -> None:
        """Let the first so many copies arrive."""
        while self._arrived < position:
            self._arrived += 1
            self._under_way.pop(0).arrive()

    def send(self, target: Tensor, source: Tensor) -> None:
        """Copy to pinned memory, which holds other values until the host has waited."""
        values = source.clone()

        def scribble() -> None:
            target.flatten().view(torch.uint8).fill_(0xA5)

        before = self._under_way_in(target)
        if before:  # which come first
            before[-1].afterwards = scribble
        else:
            scribble()
        self._under_way.append(_Copy(target, lambda: target.copy_(values), values))

    def fetch(self, target: Tensor, source: Tensor) -> None:
        """Copy from pinned memory, which must not be written before the host has waited.

        The GPU first waits for copies to the same memory that are under way.
        """
        memory = source.untyped_storage().clone()

        def seen(x: Tensor) -> Tensor:
            return x.new_empty(0).set_(memory, x.storage_offset(), x.shape, x.stride())

        for copy in self._under_way_in(source):
            if copy.sent is not None:
                seen(copy.host).copy_(copy.sent)
        values = seen(source)
        target.copy_(values)

        def check() -> None:
            same = torch.equal(*(x.flatten().view(torch.uint8) for x in (source, values)))
            assert same, "pinned memory was written while it was on its way to the GPU"

        if self.graph is None:
            self._under_way.append(_Copy(source, check))

    def _under_way_in(self, host: Tensor) -> list["_Copy"]:
        """Return the copies out of and into the same memory that have not arrived."""
        memory = host.untyped_storage().data_ptr()
        return [c for c in self._under_way if c.host.untyped_storage().data_ptr() == memory]

    # work

    def use(self, what: str, **memory: Iterable[Tensor]) -> None:
        """Note what memory some work uses, see ``Streams.use``, unless it is captured."""
        if self.graph is None:
            self.streams.use(what, **memory)

    def do(self, work: Callable[[], object]) -> None:
        """Do something that writes to tensors, or capture it."""
        if self.graph is None:
            with self._one_at_a_time:
                work()
        else:
            self.graph.append(work)

    def compute(self, function: Callable[..., Any], args: Any) -> Any:
        """Return a result that shares no memory with the arguments.

        Captured, it has no meaning before a replay, and nothing else changes.
        """
        if self.graph is None:
            return function(*args)
        results = function(*tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, args))

        def again() -> None:
            for old, new in zip(tree_leaves(results), tree_leaves(function(*args)), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)

        self.graph.append(again)
        return results

    @contextlib.contextmanager
    def random_numbers(self) -> Iterator[None]:
        """Inside, torch's generator of the CPU is that of the GPU."""
        cpu = torch.get_rng_state()
        torch.set_rng_state(self.generator.get_state())
        yield
        self.generator.set_state(torch.get_rng_state())
        torch.set_rng_state(cpu)


def _where() -> str:
    places: list[str] = []
    frame = inspect.currentframe()
    while frame is not None and len(places) < 6:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and os.path.basename(file) not in OURS:
            places.append(f"{file.removeprefix(ROOT)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(places)
