"""A CUDA graph does not capture what a first step makes: each replay would begin with it anew."""

from typing import Any

import pytest
import torch
from covering import more
from gpuless.real_cuda import AnyCuda
from helpers import Net, same
from torch import nn

import tritonamp

LEVELS = pytest.mark.parametrize("level", ["O1", "O2", *more(["O0", "O3"])])
KINDS = pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, {}), (torch.optim.SGD, {}), (torch.optim.SGD, {"momentum": 0.9})],
)


def refused(message: str) -> Any:
    return pytest.raises(RuntimeError, match=message)


class Training:
    """A model in training."""

    def __init__(self, level: str, kind: type = torch.optim.AdamW, **options: float) -> None:
        torch.manual_seed(0)
        self.model = Net().cuda()
        self.optimizer = kind(self.model.parameters(), lr=0.125, **options)
        self.amp = tritonamp.enable(self.model, self.optimizer, level=level)
        self.x = torch.randn(4, 6, device="cuda")

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.amp.backward(self.model(self.x).float().square().mean())
        self.optimizer.step()

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().cpu() for p in self.model.parameters()]


@LEVELS
@KINDS
def test_a_first_step(gpu: AnyCuda, level: str, kind: type, options: dict[str, float]) -> None:
    captured, other = Training(level, kind, **options), Training(level, kind, **options)
    with refused("before a CUDA graph is captured"), gpu.capture():
        captured.step()
    for _ in range(2):  # the steps that it asks for
        captured.step()
        other.step()
    assert same(captured.weights(), other.weights())
    with gpu.capture() as graph:
        captured.step()
    for _ in range(2):
        graph.replay()
        other.step()
    assert same(captured.weights(), other.weights())


@LEVELS
def test_a_first_gradient(gpu: AnyCuda, level: str) -> None:
    """A parameter had none before: its state would be made in the capture."""
    captured, other = Training(level), Training(level)
    for training in (captured, other):
        training.model.first.weight.requires_grad_(False)
        training.step()
        training.model.first.weight.requires_grad_(True)
    with refused("expected the optimizer's state before a CUDA graph"), gpu.capture():
        captured.step()
    for training in (captured, other):
        training.step()
    with gpu.capture() as graph:
        captured.step()
    graph.replay()
    other.step()
    assert same(captured.weights(), other.weights())


def test_without_enable(gpu: AnyCuda) -> None:
    model = nn.Linear(3, 3).cuda()
    optimizer, scaler = tritonamp.optim.AdamW(model.parameters()), tritonamp.GradScaler("cuda")
    loss = model(torch.ones(2, 3, device="cuda")).sum()
    with refused("expected the loss scale before a CUDA graph"), gpu.capture():
        scaler.scale(loss)
    loss.backward()
    with refused("expected the optimizer's state before a CUDA graph"), gpu.capture():
        optimizer.step()
    assert not any(optimizer.state.values())
