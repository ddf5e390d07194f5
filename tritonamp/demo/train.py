"""Trains one model at one level: the example to read."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import tritonamp
from tritonamp.demo import memory
from tritonamp.demo.data import Split, batches

SCALE_READS = 50  # stats() may wait for the GPU: that often a run, not every step


@dataclass(frozen=True)
class Task:
    """A model, its data and how it trains; the same at every level.

    Attributes:
        score: (logits, targets) of the whole test -> the number in the table.
        shown_as: format of that number.
    """

    name: str
    title: str
    build: Callable[[], nn.Module]
    split: Split
    batch_size: int
    lr: float
    steps: int
    score: Callable[[Tensor, Tensor], Tensor]
    shown_as: str


@dataclass(frozen=True)
class Run:
    """What one training run left behind. ``scales``: (step, loss scale) now and then."""

    task: Task
    level: str
    score: float
    seconds: float
    peak_bytes: int
    losses: list[float]
    scales: list[tuple[int, float]]
    stats: dict[str, Any]
    explanation: str

    @property
    def shown_score(self) -> str:
        return self.task.shown_as.format(self.score)


def train(
    task: Task,
    level: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    steps: int,
    seed: int,
    quiet: bool,
) -> Run:
    memory.forget_peak(device)
    torch.manual_seed(seed)  # equal weights at every level
    model = task.build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr)
    amp = tritonamp.enable(model, optimizer, level=level, dtype=dtype)

    losses, scales = [], []
    loader = batches(task.split, task.batch_size, steps, seed, device)
    start = time.perf_counter()
    for x, y in tqdm(loader, f"{task.name} {level}", total=steps, disable=quiet, leave=False):
        loss = criterion(model(x), y)
        amp.backward(loss)
        amp.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

        losses.append(loss.detach())  # on the device: reading the value would wait for it
        if len(losses) % max(1, steps // SCALE_READS) == 0:
            scales.append((len(losses), amp.stats()["scale"]))
    curve = torch.stack(losses).tolist()  # waits for the last step, so the clock may stop
    seconds = time.perf_counter() - start

    stats, explanation = amp.stats(), amp.explain()
    score = evaluate(model, task, device)
    peak = memory.peak(device, model, optimizer, lambda: amp.backward(criterion(model(x), y)))
    amp.disable()
    return Run(task, level, score, seconds, peak, curve, scales, stats, explanation)


def criterion(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of (N, C) or (N, T, C) logits."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, device: torch.device) -> float:
    model.eval()
    logits = torch.cat(
        [model(x.to(device)).float().cpu() for x in task.split.test_x.split(task.batch_size)]
    )
    model.train()
    return task.score(logits, task.split.test_y).item()
