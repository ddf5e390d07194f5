"""A run on the CPU leaves CUDA alone on a machine that has a GPU: a context takes memory there, and
a forked worker may not make one.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from gpuless import torch_cuda
from gpuless.fake_cuda import FakeCuda
from helpers import Net

import tritonamp
from tritonamp.readback import Readback

ASKS_NOTHING_OF_A_DEVICE = {"is_available", "is_initialized"}


class Own(torch.optim.Optimizer):
    """Steps by itself; torch's own ask CUDA whether it captures."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param -= group["lr"] * param.grad


@pytest.fixture
def forbidden(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a GPU, and whoever touches it fails."""

    def touches(name: str) -> Callable[..., NoReturn]:
        def fail(*args: Any, **kwargs: Any) -> NoReturn:
            raise AssertionError(f"torch.cuda.{name} in a run on the CPU")

        return fail

    names = {*torch_cuda.functions(fake_cuda), *torch_cuda.stream_classes(fake_cuda)}
    for name in names - ASKS_NOTHING_OF_A_DEVICE:
        monkeypatch.setattr(torch.cuda, name, touches(name))
    monkeypatch.setattr(fake_cuda, "pin", touches("pinned memory"))


@pytest.mark.parametrize("on_nonfinite", ["skip", "explain"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, tritonamp.optim.Lion, Own])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_training(forbidden: None, level: str, kind: Any, on_nonfinite: str) -> None:
    model = Net()
    optimizer = kind(model.parameters(), lr=0.01)
    amp = tritonamp.enable(model, optimizer, level=level, on_nonfinite=on_nonfinite)
    for factor in (1.0, 1.0, float("nan")):
        amp.backward(model(torch.ones(4, 6)).square().mean() * factor)
        amp.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert amp.stats()["skipped"] == 1
    amp.explain()
    state, _, _ = amp.state_dict(), model.state_dict(), optimizer.state_dict()
    amp.load_state_dict(state)
    amp.disable()


def test_a_scaler_of_its_own(forbidden: None) -> None:
    model, scaler = Net(), tritonamp.GradScaler("cpu")
    optimizer = tritonamp.optim.AdamW(model.parameters())
    for _ in range(2):
        scaler.scale(model(torch.ones(4, 6)).square().mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


def test_readback(forbidden: None) -> None:
    numbers = torch.zeros(2, dtype=torch.float64)
    readback = Readback(numbers)
    readback.start(numbers, None)
    assert [list(reading.values) for reading in readback.ready()] == [[0.0, 0.0]]
