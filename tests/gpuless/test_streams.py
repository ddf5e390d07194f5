"""Memory that two streams use, and no stream waits for the other."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from gpuless.fake_cuda import FakeCuda
from torch import Tensor

from tritonamp import functional

RACE = "does not wait for"


def expect(work: Callable[[], Any], race: bool) -> None:
    expected: AbstractContextManager[Any] = nullcontext()
    if race:
        expected = pytest.raises(AssertionError, match=RACE)
    with expected:
        work()


def zeros() -> Tensor:
    return torch.zeros(3, device="cuda")


@pytest.mark.parametrize(
    ("first", "second", "is_race"),
    [
        (lambda x: x.add_(1), lambda x: x + 1, True),
        (lambda x: x + 1, lambda x: x.add_(1), True),
        (lambda x: x.add_(1), lambda x: x[:1].add_(1), True),
        (lambda x: torch._foreach_add_([x], 1), lambda x: x + 1, True),
        (lambda x: x + 1, lambda x: x + 1, False),
        (lambda x: x.add_(1), lambda x: x.view(1, 3), False),
        (lambda x: x.add_(1), lambda x: torch.zeros_like(x), False),
    ],
    ids=["read", "write", "a part", "a list", "two reads", "a view", "sizes"],
)
@pytest.mark.parametrize("waits", [False, True])
def test_two_uses(
    fake_cuda: FakeCuda,
    first: Callable[[Tensor], Any],
    second: Callable[[Tensor], Any],
    is_race: bool,
    waits: bool,
) -> None:
    stream = torch.cuda.Stream()
    x = zeros()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        first(x)
    if waits:
        torch.cuda.current_stream().wait_stream(stream)
    expect(lambda: second(x), is_race and not waits)


def test_memory_that_is_older_than_the_second_stream(fake_cuda: FakeCuda) -> None:
    x, stream = zeros(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() is stream
        expect(lambda: x + 1, race=True)
        expect(lambda: zeros().add_(1), race=False)
        stream.wait_stream(torch.cuda.default_stream())
        expect(lambda: x + 1, race=False)
    assert torch.cuda.current_stream() is torch.cuda.default_stream()


def recorded(stream: Any) -> Any:
    event = torch.cuda.Event()
    event.record(stream)
    return event


WAITS: dict[str, Callable[[Any, Any], Any]] = {
    "wait_stream": lambda here, there: here.wait_stream(there),
    "wait_event": lambda here, there: here.wait_event(recorded(there)),
    "Event.wait": lambda here, there: recorded(there).wait(),
    "Event.synchronize": lambda here, there: recorded(there).synchronize(),
    "Event.query": lambda here, there: recorded(there).query(),
    "Stream.synchronize": lambda here, there: there.synchronize(),
    "synchronize": lambda here, there: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("wait", WAITS)
def test_what_waits(fake_cuda: FakeCuda, wait: str) -> None:
    """For work that was given to the stream before, not for later work."""
    here, there = torch.cuda.current_stream(), torch.cuda.Stream()
    x = zeros()
    there.wait_stream(here)
    with torch.cuda.stream(there):
        x.add_(1)
    WAITS[wait](here, there)
    expect(lambda: x + 1, race=False)
    there.wait_stream(here)
    with torch.cuda.stream(there):
        x.add_(1)
    expect(lambda: x + 1, race=True)


def test_what_is_read_on_the_host_is_over(fake_cuda: FakeCuda) -> None:
    x, stream = zeros(), torch.cuda.Stream()
    x.sum().item()
    with torch.cuda.stream(stream):
        expect(lambda: x.add_(1), race=False)


def test_pinned_memory(fake_cuda: FakeCuda) -> None:
    """A copy that fills it, and one that reads it on another stream."""
    x, host, stream = zeros(), torch.empty(3, pin_memory=True), torch.cuda.Stream()
    host.copy_(x, non_blocking=True)
    with torch.cuda.stream(stream):
        expect(lambda: zeros().copy_(host, non_blocking=True), race=True)
        stream.wait_stream(torch.cuda.default_stream())
        expect(lambda: zeros().copy_(host, non_blocking=True), race=False)


def test_a_kernel(fake_cuda: FakeCuda, compiled: bool) -> None:
    if compiled:
        pytest.skip("the clocks do not see which memory a kernel uses that runs as PTX")
    x = torch.zeros(70, 1024, device="cuda", dtype=torch.float16)  # enough for a kernel
    target, stream = torch.zeros(70, dtype=torch.int64, device="cuda"), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(stream):
        functional.cross_entropy(x, target)
    with pytest.raises(AssertionError, match=f"{RACE} cross_entropy_kernel"):
        x.add_(1)


def test_a_backward_is_on_the_stream_of_its_caller(fake_cuda: FakeCuda) -> None:
    """In whatever thread it runs."""
    x, stream = zeros().requires_grad_(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        x.square().sum().backward()
        expect(lambda: x.grad + 1, race=False)
    expect(lambda: x.grad + 1, race=True)
