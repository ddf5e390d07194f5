"""Training on a GPU in which no step waits for it, so that a CUDA graph can capture the steps."""

from typing import Any

import torch
from gpuless.real_cuda import AnyCuda
from helpers import Net, same
from runs import Training
from torch import Tensor


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

    def weights(self) -> list[Tensor]:
        return [p.detach().cpu() for p in self.model.parameters()]


def replays_like_eager(gpu: AnyCuda, eager: OnGpu, captured: OnGpu) -> None:
    """Assert that replays of a captured step have the weights of eager steps."""
    for training in (eager, captured):
        for _ in range(2):
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
