"""A training run of one model at one level, and its measurements."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import tritonamp
from tritonamp.demo.data import Split, batches
from tritonamp.demo.train import predict, train

SCALE_READS = 50  # per run, because each may wait for the GPU


@dataclass(frozen=True)
class Task:
    """A model with its data and its training, which are the same at every level.

    Attributes:
        score: function from (logits, targets) of the whole test to the number in the table.
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
    """The results of one training run.

    Attributes:
        seconds: time of the training loop alone.
        scales: (step, loss scale) for some of the steps.
        stats: ``amp.stats()`` after the last step.
    """

    task: Task
    level: str
    score: float
    seconds: float
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
    """Train a task in the loop of ``train.py``, and measure it."""
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
    return Run(task, level, score, seconds, losses, scales, stats, explanation)


def evaluate(model: nn.Module, task: Task, device: torch.device) -> float:
    """Return the task's score of the model."""
    logits = predict(model, task.split.test_x, device, task.batch_size)
    return task.score(logits, task.split.test_y).item()
