"""The fixture ``gpu`` on a real GPU: the interface of ``FakeCuda``, answered by CUDA."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from gpuless.fake_cuda import FakeCuda
from gpuless.gpu import Record, _where

from tritonamp.kernels import _launch

WAITS = "called a synchronizing CUDA operation"
"""Torch's warning, and its error, of an operation for which the host waits."""
PROTOTYPE = "Synchronization debug mode is a prototype"
"""Torch's other warning, when that mode is first set."""
EMPTY = "The CUDA Graph is empty"
"""Torch's warning of a capture that raised before anything was launched."""


class RealCuda:
    """The GPU, as tests see it.

    Its records are waits alone: those that torch's sync debug mode warns of, and calls of
    ``torch.cuda.synchronize`` and ``Event.synchronize``, which that mode does not know.

    Attributes:
        launches: names of the kernels of this project that were launched.
        event_lag: ignored; real events lag by themselves.
    """

    def __init__(self) -> None:
        self.launches: list[str] = []
        self.event_lag = 0

    @contextlib.contextmanager
    def watch(self, *kinds: str) -> Iterator[list[Record]]:
        """Yield a list that holds, after the block, where its code waited for the GPU.

        Args:
            kinds: see ``Record``; none but "wait" is seen.
        """
        records: list[Record] = []
        found: list[Record] = []
        with waits_noted(lambda what: records.append(Record("wait", what, _where()))):
            yield found
        found += [record for record in records if not kinds or record.kind in kinds]

    @contextlib.contextmanager
    def capture(self) -> Iterator[Any]:
        """Capture the work of the block in the graph that is yielded; ``replay`` does it.

        The stream stays, so that autograd accumulates gradients on the stream of earlier steps.
        """
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", EMPTY)
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                yield graph


@contextlib.contextmanager
def waits_noted(note: Callable[[str], object]) -> Iterator[None]:
    """Call ``note`` with the operation whenever the host waits for the GPU inside of the block."""

    def noted(name: str, wait: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            note(name)
            wait(*args, **kwargs)

        return call

    show = warnings.showwarning

    def shown(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if WAITS in str(message):
            note(WAITS)
        else:
            show(message, *args, **kwargs)

    synchronize, Event = torch.cuda.synchronize, torch.cuda.Event
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", PROTOTYPE)
        warnings.filterwarnings("always", WAITS)
        stack.enter_context(mock.patch.object(warnings, "showwarning", shown))
        for owner, wait in (torch.cuda, synchronize), (Event, Event.synchronize):
            name = f"{owner.__name__}.synchronize"
            stack.enter_context(mock.patch.object(owner, "synchronize", noted(name, wait)))
        stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
        torch.cuda.set_sync_debug_mode("warn")
        yield


class CountedKernel:
    """A compiled kernel whose launches are noted."""

    def __init__(self, compiled: Any, name: str, launches: list[str]) -> None:
        self._compiled, self._name, self._launches = compiled, name, launches

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        run = self._compiled[grid]

        def noted(*args: Any, **kwargs: Any) -> None:
            self._launches.append(self._name)
            run(*args, **kwargs)

        return noted


@contextlib.contextmanager
def launches_noted(launches: list[str]) -> Iterator[None]:
    """Append the names of the kernels that are launched inside of the block."""
    compile_ = _launch._compile

    def compiled(kernel: Any, *args: Any) -> CountedKernel:
        return CountedKernel(compile_(kernel, *args), kernel.__name__, launches)

    with (
        mock.patch.object(_launch, "_compile", compiled),
        mock.patch.object(_launch, "_compiled", {}),
    ):
        yield


@contextlib.contextmanager
def in_a_stream() -> Iterator[RealCuda]:
    """Inside, work goes to a stream of its own, because CUDA captures none of the default one."""
    gpu, stream = RealCuda(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), launches_noted(gpu.launches):
        _warm_up()
        yield gpu
    torch.cuda.current_stream().wait_stream(stream)


def _warm_up() -> None:
    """Have cuBLAS make handles, for this thread and autograd's, which it cannot do in a capture."""
    for dtype in (torch.float32, torch.float16):
        x = torch.ones(8, 8, device="cuda", dtype=dtype, requires_grad=True)
        torch.nn.functional.linear(x, x, x[0]).sum().backward()


AnyCuda = FakeCuda | RealCuda
