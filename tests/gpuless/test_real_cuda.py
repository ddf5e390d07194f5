"""The fixture ``gpu``: in software, on a real GPU, and the real GPU's class on the software one."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpuless.fake_cuda import FakeCuda
from gpuless.real_cuda import EMPTY, PROTOTYPE, WAITS, AnyCuda, in_a_stream

from tritonamp.kernels import softmax

WARNED_OF = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "copy to the GPU": lambda x: x.copy_(torch.ones(3)),
    "copy to the CPU": lambda x: torch.ones(3).copy_(x),
    "tensor": lambda x: torch.tensor([1.0], device="cuda"),
    "as_tensor": lambda x: torch.as_tensor([1.0], device="cuda"),
    "cuda": lambda x: torch.ones(3).cuda(),
    "equal": lambda x: torch.equal(x, x + 1),
    "Stream.synchronize": lambda x: torch.cuda.current_stream().synchronize(),
}
NOT_WARNED_OF = {
    "torch.cuda.synchronize": lambda x: torch.cuda.synchronize(),
    "Event.synchronize": lambda x: recorded().synchronize(),
}


def recorded() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


@contextlib.contextmanager
def like_cuda(software: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the GPU in software warn of waits, and of empty graphs, as torch does."""
    modes: list[Any] = ["default"]

    def note(kind: str, what: str) -> None:
        FakeCuda.note(software, kind, what)
        if kind == "wait" and modes[-1] == "warn" and what not in NOT_WARNED_OF:
            warnings.warn(WAITS, stacklevel=1)

    def set_mode(mode: Any) -> None:
        modes.append(mode)
        warnings.warn(PROTOTYPE, stacklevel=1)

    def end(graph: Any) -> None:
        software.graph = None
        if not graph._work:
            warnings.warn(EMPTY, stacklevel=1)

    monkeypatch.setattr(software, "note", note)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", end)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    yield
    assert modes[-1] == "default"


@pytest.fixture(params=["the GPU that is here", "the class for a real one"])
def gpu(
    request: pytest.FixtureRequest, gpu: AnyCuda, monkeypatch: pytest.MonkeyPatch
) -> Iterator[AnyCuda]:
    if request.param == "the GPU that is here":
        yield gpu
    elif not isinstance(gpu, FakeCuda):
        pytest.skip("it is the GPU that is here")
    else:
        with like_cuda(gpu, monkeypatch), in_a_stream() as real:
            yield real


@pytest.mark.parametrize("name", [*WARNED_OF, *NOT_WARNED_OF])
def test_waits_are_seen(gpu: AnyCuda, name: str) -> None:
    x, wait = torch.ones(3, device="cuda"), (WARNED_OF | NOT_WARNED_OF)[name]
    with gpu.watch() as records:
        wait(x)
    assert {record.kind for record in records} == {"wait"}
    assert all(record.where.startswith("tests/gpuless/test_real_cuda.py:") for record in records)
    with gpu.watch("pinning") as records:
        wait(x)
    assert records == []


def test_work_on_the_gpu_does_not_wait(gpu: AnyCuda) -> None:
    x, pinned = torch.ones(3, device="cuda"), torch.ones(3, pin_memory=True)
    there = torch.zeros(3, pin_memory=True)
    with gpu.watch() as records:
        torch.where(x > 0, x, 2.0).softmax(0).add_(x).view(3, 1)
        x.copy_(pinned, non_blocking=True)
        x[x > 2] = 0.0
        there.copy_(x, non_blocking=True)
        recorded().query()
    assert records == []
    torch.cuda.synchronize()
    assert there.tolist() == [1.0, 1.0, 1.0]


def test_other_warnings_are_what_they_were(gpu: AnyCuda) -> None:
    with gpu.watch() as records, pytest.raises(UserWarning, match="something else"):
        warnings.warn("something else", stacklevel=1)
    assert records == []
    with pytest.warns(UserWarning, match="expected"), gpu.watch() as records:
        warnings.warn("expected", stacklevel=1)
    assert records == []


def test_a_graph_is_captured_and_replayed(gpu: AnyCuda) -> None:
    x, total = torch.ones(3, device="cuda"), torch.zeros((), device="cuda")
    with gpu.capture() as graph:
        assert torch.cuda.is_current_stream_capturing()
        doubled = x * 2
        total += doubled.sum()
    assert total.item() == 0  # captured, not done
    for expected in (6.0, 12.0):
        graph.replay()
        assert total.item() == expected
    x.fill_(2)
    graph.replay()
    assert (total.item(), doubled.tolist()) == (24.0, [4.0, 4.0, 4.0])


def test_a_capture_in_which_nothing_is_launched(gpu: AnyCuda) -> None:
    with pytest.raises(ValueError, match="refused"), gpu.capture():
        raise ValueError("refused")
    assert not torch.cuda.is_current_stream_capturing()


def test_gradients_are_captured_after_eager_steps(gpu: AnyCuda) -> None:
    """Their accumulation belongs to the stream of the step in which it began."""
    x = torch.ones(3, device="cuda", requires_grad=True)
    loss = (x * 2).sum()  # kept, and with it where gradients accumulate
    loss.backward(retain_graph=True)
    with gpu.capture() as graph:
        (x * 3).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
    graph.replay()
    assert x.grad.tolist() == [5.0, 5.0, 5.0]


def test_launches_are_counted(gpu: AnyCuda) -> None:
    x = torch.ones(2, 3, device="cuda")

    def run() -> None:
        softmax.softmax(x, 1, torch.float32, False, "triton")

    run()
    run()
    with gpu.capture() as graph:
        run()
    graph.replay()
    assert gpu.launches == 3 * ["softmax_kernel"]
    gpu.launches.clear()
    run()
    assert gpu.launches == ["softmax_kernel"]
