"""The copy bandwidth of a GPU, and each kernel's fraction of it."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tritonamp.commands.selftest.check import Check, Found, NotHereError
from tritonamp.kernels._implementations import Implementations, operations

COPY_BYTES = 1 << 28
WARM_UP, SAMPLES, CALLS = 3, 5, 10


def checks(device: torch.device, backend: str) -> Iterator[Check]:
    """Yield the copy, then a call of each operation that moves more than a few numbers."""
    if device.type != "cuda" or backend != "triton":
        return
    bandwidth: list[float] = []
    yield Check("copy", functools.partial(_copy, device, bandwidth))
    for operation in operations().values():
        calls = (sample.large(device, torch.float16) for sample in operation.samples)
        call = next((call for call in calls if call.moves), None)
        if call is not None:
            run = functools.partial(_time, operation, call, device, bandwidth)
            yield Check(operation.name, run)


def _copy(device: torch.device, bandwidth: list[float]) -> Found:
    source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _seconds(lambda: target.copy_(source))
    bandwidth.append(2 * COPY_BYTES / seconds)
    return Found(f"{bandwidth[0] / 1e9:.0f} GB/s", {"gb_per_s": bandwidth[0] / 1e9})


def _time(
    operation: Implementations, call: Any, device: torch.device, bandwidth: list[float]
) -> Found:
    try:
        args = call.args()
        seconds = _seconds(lambda: operation.triton_function(*args))
    except torch.OutOfMemoryError as error:
        raise NotHereError("too little memory is free") from error
    if not bandwidth:  # a process that ended has measured it
        _copy(device, bandwidth)
    us, rate = seconds * 1e6, call.moves / seconds
    share = rate / bandwidth[0]
    detail = f"{call.what}: {us:.0f} us, {rate / 1e9:.0f} GB/s, {share:.2f} of copy"
    return Found(detail, {"us": us, "gb_per_s": rate / 1e9, "fraction_of_copy": share})


def _seconds(call: Callable[[], Any]) -> float:
    """Return the seconds of a call on the device: the least mean of several rounds."""
    for _ in range(WARM_UP):
        call()
    means = []
    for _ in range(SAMPLES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        means.append(begin.elapsed_time(end) / CALLS / 1e3)
    return min(means)
