"""A training run of one model at one level, and what it took."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import tritonamp
from tritonamp.demo import memory
from tritonamp.demo.data import Split, batches
from tritonamp.demo.train import criterion, predict, train

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
    """What one training run left behind.

    Attributes:
        seconds: of the training loop alone.
        scales: (step, loss scale) now and then.
        stats: those of the ``Amp`` after the last step.
    """

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


def measured(
    task: Task,
    level: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    steps: int,
    seed: int,
    quiet: bool,
) -> Run:
    """Train as ``train.py`` does, and measure it."""
    memory.forget_peak(device)
    torch.manual_seed(seed)  # equal weights at every level
    model = task.build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr)
    scales: list[tuple[int, float]] = []

    def data() -> Iterator[tuple[Tensor, Tensor]]:
        drawn = batches(task.split, task.batch_size, steps, seed, device)
        title = f"{task.name} {level}"
        for step, batch in enumerate(tqdm(drawn, title, steps, leave=False, disable=quiet), 1):
            yield batch
            if step % max(1, steps // SCALE_READS) == 0:  # the step has been taken
                scales.append((step, amp.stats()["scale"]))

    with tritonamp.enable(model, optimizer, level=level, dtype=dtype) as amp:
        start = time.perf_counter()
        losses = train(model, optimizer, amp, data()).tolist()  # waits for the last step
        seconds = time.perf_counter() - start
        stats, explanation = amp.stats(), amp.explain()
        score = evaluate(model, task, device)
        x, y = next(batches(task.split, task.batch_size, 1, seed, device))
        peak = memory.peak(device, model, optimizer, lambda: amp.backward(criterion(model(x), y)))
    return Run(task, level, score, seconds, peak, losses, scales, stats, explanation)


def evaluate(model: nn.Module, task: Task, device: torch.device) -> float:
    """Return the task's score of the model."""
    logits = predict(model, task.split.test_x, device, task.batch_size)
    return task.score(logits, task.split.test_y).item()
