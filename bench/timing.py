"""The clock of all rows: device time of a call.

On a GPU a time is the median of samples on random data, after a warm-up, with device events around
one call. Before each sample, four times the size of the L2 is read to flush it. Writing would leave
dirty lines, which the measured call would have to write back. Very small calls are captured in a
CUDA graph, on several inputs in turn, because events would measure their launch. The same process
measures the copy bandwidth.

On a CPU a time is the median of a host clock. It keeps the code tested and means nothing. Host time
is measured elsewhere, without a GPU, by ``host_stubs.least_us``.
"""

import gc
import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

L2_TIMES = 4
MIN_SAMPLES, MAX_SAMPLES = 10, 500
HOST_SAMPLES = 20
WARM_UP = 3


class Work(NamedTuple):
    """A call to measure.

    Attributes:
        calls: the same call on different inputs, used in turn.
        close: function that undoes changes of making the work, such as FlagGems' patches.
    """

    calls: Sequence[Callable[[], Any]]
    close: Callable[[], None] = lambda: None


class Timing(NamedTuple):
    """The measured times and memory of a call.

    Attributes:
        us: median time on the device, in microseconds.
        host_us: median time until the call returns on an idle device, in microseconds; None on a
            CPU.
        peak_bytes: most bytes allocated at once, inputs included; None on a CPU, and for a graph,
            whose many inputs would count.
        clock: "events", "graph" or "host".
    """

    us: float
    host_us: float | None
    peak_bytes: int | None
    clock: str
    samples: int


class Stopwatch:
    """Measures on one device.

    Args:
        seconds: time for the samples of a call.
        copy_bytes: size of the copy that gives the bandwidth.

    Attributes:
        copy_bandwidth: bytes that a copy reads and writes per second.
    """

    def __init__(self, device: torch.device, seconds: float, copy_bytes: int = 1 << 30) -> None:
        self.device, self._seconds = device, seconds
        source = torch.randint(256, (copy_bytes,), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        self._flushed = source[: L2_TIMES * _l2_bytes(device)].view(torch.int32)
        self.copy_bandwidth = 2e6 * copy_bytes / self._time([lambda: target.copy_(source)])[0]
        if device.type == "cuda":
            self._flushed = self._flushed.clone()  # lets go of the large source

    def measure(self, make: Callable[[], Work], graph: bool = False) -> Timing:
        """Time the calls of ``make()``.

        Args:
            make: maker of the work.
            graph: whether to capture the calls, because they are too small for events.
        """
        gpu = self.device.type == "cuda"
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device) if gpu else 0
        work = make()
        try:
            host_us = self._host_us(work.calls) if gpu else None
            peak = torch.cuda.max_memory_allocated(self.device) - before if gpu else None
            if gpu and graph:
                us, samples = self._time([_captured(work.calls).replay])
                return Timing(us / len(work.calls), host_us, None, "graph", samples)
            us, samples = self._time(work.calls)
            return Timing(us, host_us, peak, "events" if gpu else "host", samples)
        finally:
            work.close()

    def flush(self) -> None:
        """Fill the L2 cache with other data."""
        if self.device.type == "cuda":
            self._flushed.amax()

    def _time(self, calls: Sequence[Callable[[], Any]]) -> tuple[float, int]:
        """Return the median microseconds of a call, and the number of samples."""
        for i in range(WARM_UP):
            calls[i % len(calls)]()
        start = now(self.device)
        calls[0]()
        count = min(MAX_SAMPLES, max(MIN_SAMPLES, int(self._seconds / (now(self.device) - start))))
        if self.device.type != "cuda":
            return self._time_on_host(calls, min(count, MIN_SAMPLES))
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for i, (begin, end) in enumerate(events):
            self.flush()
            begin.record()
            calls[i % len(calls)]()
            end.record()
        torch.cuda.synchronize(self.device)
        return median(1e3 * begin.elapsed_time(end) for begin, end in events), count

    def _time_on_host(self, calls: Sequence[Callable[[], Any]], count: int) -> tuple[float, int]:
        samples = []
        for i in range(count):
            start = time.perf_counter()
            calls[i % len(calls)]()
            samples.append(time.perf_counter() - start)
        return 1e6 * median(samples), count

    def _host_us(self, calls: Sequence[Callable[[], Any]]) -> float:
        samples: list[float] = []
        end = now(self.device) + self._seconds
        for i in range(WARM_UP + HOST_SAMPLES):
            if i > 2 * WARM_UP and time.perf_counter() > end:
                break  # a training step takes too long for all of them
            start = now(self.device)
            calls[i % len(calls)]()
            samples.append(time.perf_counter() - start)
        return 1e6 * median(samples[WARM_UP:])


def now(device: torch.device) -> float:
    """Return seconds, after the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def sets_beyond_l2(device: torch.device, bytes_per_call: int) -> int:
    """Return the number of sets of inputs that together exceed the L2 cache."""
    return min(1024, max(1, math.ceil(L2_TIMES * _l2_bytes(device) / bytes_per_call)))


def _l2_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def _captured(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph
