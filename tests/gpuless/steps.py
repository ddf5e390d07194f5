"""Training on a GPU in which no step waits for it, so that a CUDA graph can capture the steps."""

from typing import Any

import torch
from gpuless.real_cuda import AnyCuda
from helpers import Net, same
from runs import Training
from torch import Tensor, nn


class OnGpu(Training):
    """A model on the GPU; gradients are zeroed before a step, and stay where they are after it."""

    def __init__(self, level: str | None, optimizer: Any = "AdamW", **fields: Any) -> None:
        super().__init__(Net, optimizer, level, "cuda", **{"lr": 0.125, **fields})

    def step(self, *args: Any, **fields: Any) -> Any:
        self.optimizer.zero_grad()
        self.take()

    def take(self) -> None:
        """Run one iteration, from the loss to the optimizer's step."""
        self.backward(self.loss())
        self.optimizer.step()

    def clip(self) -> None:
        """Clip by torch's own function."""
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, 0.5)

    def weights(self) -> list[Tensor]:
        return [p.detach().cpu() for p in self.model.parameters()]


def plain(t: Any) -> None:
    t.amp.backward(t.loss())
    t.optimizer.step()


def clipped(t: Any) -> None:
    t.amp.backward(t.loss())
    t.amp.clip_grad_norm_(0.5)
    t.optimizer.step()


def unscaled(t: Any) -> None:
    t.amp.backward(t.loss())
    t.amp.unscale_()
    t.clip()
    t.optimizer.step()


def by_scaler(t: Any) -> None:
    """As code for torch.amp does."""
    t.amp.scaler.scale(t.loss()).backward()
    t.amp.scaler.unscale_(t.optimizer)
    t.clip()
    t.amp.scaler.step(t.optimizer)
    t.amp.scaler.update()


def replays_like_eager(gpu: AnyCuda, eager: OnGpu, captured: OnGpu, before: int = 2) -> None:
    """Assert that replays of a captured step have the weights of eager steps.

    before: how many eager steps both take first.
    """
    for training in (eager, captured):
        for _ in range(before):
            training.step()
    with gpu.capture() as graph:
        captured.step()
    for _ in range(2):
        eager.step()
        graph.replay()
    assert same(captured.weights(), eager.weights())


def fed(x: Tensor, number: int, factor: float = 1.0) -> None:
    """Write random numbers times ``factor`` into the inputs that a graph reads."""
    values = torch.randn(x.shape, generator=torch.Generator().manual_seed(number))
    x.copy_(factor * values)
