"""Two gloo ranks on CPU train the stages of one model by ``torch.distributed.pipelining``.

The ranks are this file run as a script, see two_ranks.py.
"""

import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from two_ranks import RANKS, Pair, on_ranks, serve

import tritonamp

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed"),
]

STEPS = 4
MICRO = 4  # micro-batches
WIDE = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.norm(x)).tanh()


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(4)])


def batches(steps: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2 * MICRO, WIDE, generator=generator) for _ in range(steps)]


def criterion(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@on_ranks
def run() -> Any:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    model = blocks()[2 * rank : 2 * rank + 2]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    amp = tritonamp.enable(model, optimizer, level="O2", scaler=tritonamp.GradScaler("cpu", init_scale=2.0**10))
    stage = PipelineStage(model, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO, loss_fn=amp.pipeline_loss(criterion))
    found, norms = [], []
    for x in batches():
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x, losses=losses)
        norms.append(float(amp.clip_grad_norm_(100.0)))
        optimizer.step()
        optimizer.zero_grad()
        found.append([float(l.detach()) for l in losses])
    stats = amp.stats()
    amp.disable()
    model = blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    amp = tritonamp.enable(model, optimizer, level="O2", scaler=tritonamp.GradScaler("cpu", init_scale=2.0**10))
    alone, alone_norms = [], []
    for x in batches():
        losses = []
        for part in x.chunk(MICRO):
            losses.append(criterion(model(part), part))
            amp.backward(losses[-1] / MICRO)
        alone_norms.append(float(amp.clip_grad_norm_(100.0)))
        optimizer.step()
        optimizer.zero_grad()
        alone.append([float(l.detach()) for l in losses])
    amp.disable()
    return found, norms, alone, alone_norms, stats


def test_it(pair):
    for a in run(pair):
        for r in a:
            print(r)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    ranks = Pair(tmp_path_factory.mktemp("ranks"), __file__)
    yield ranks
    ranks.stop()


if __name__ == "__main__":
    serve(*sys.argv[1:])
