"""A training run of one model, in the loop of ``train.py`` or in that of torch.amp."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from tqdm import tqdm

import tritonamp
from tritonamp.demo import data
from tritonamp.demo.train import criterion, predict, train

SCALE_READS = 50  # per run, because each may wait for the GPU

Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Setting:
    """The options of the command line; ``steps`` is None for the number that the task needs."""

    device: torch.device
    seed: int = 0
    steps: int | None = None


@dataclass(frozen=True)
class Task:
    """A model with its data and its training, which are the same in every run.

    Attributes:
        score: function from (logits, targets) of the whole test to the number in the table.
        shown_as: format of that number.
        change: function from the drawn batches to those for the training.
    """

    name: str
    title: str
    build: Callable[[], nn.Module]
    split: data.Split
    batch_size: int
    lr: float
    steps: int
    score: Callable[[Tensor, Tensor], Tensor] = data.percent_right
    shown_as: str = "accuracy {:.2f} %"
    change: Callable[[Batches], Batches] = lambda batches: batches

    def start(self, setting: Setting) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(setting.seed)  # equal weights in every run
        model = self.build().to(setting.device)
        return model, AdamW(model.parameters(), lr=self.lr)

    def batches(
        self,
        setting: Setting,
        title: str,
        scale: Callable[[], float],
        scales: list[tuple[int, float]],
    ) -> Batches:
        """Yield the batches. At first and after some steps append (step, scale) to ``scales``."""
        steps = setting.steps or self.steps
        drawn = data.batches(self.split, self.batch_size, steps, setting.seed, setting.device)
        shown = tqdm(self.change(drawn), title, steps, leave=False, disable=None)
        scales.append((0, scale()))
        for step, batch in enumerate(shown, 1):
            yield batch
            if step % max(1, steps // SCALE_READS) == 0:  # the step has been taken
                scales.append((step, scale()))


@dataclass(frozen=True)
class Run:
    """The results of one training run.

    Attributes:
        scales: (step, loss scale) before the first step, and after some of the steps.
        skips: numbers of the skipped steps, from 1; for tritonamp among the last 1000 steps.
        stats: ``amp.stats()`` after the last step; for torch.amp only "skipped" and "scale".
        explanation: text of ``amp.explain()``; empty for torch.amp.
    """

    task: Task
    name: str
    score: float
    losses: list[float]
    scales: list[tuple[int, float]]
    skips: list[int]
    stats: dict[str, Any]
    explanation: str = ""

    @property
    def shown_score(self) -> str:
        return self.task.shown_as.format(self.score)


def measured(
    task: Task,
    setting: Setting,
    *,
    explain: Callable[[tritonamp.Amp], str] = tritonamp.Amp.explain,
    level: str = "O2",
    **policy: Any,
) -> Run:
    """Train a task in the loop of ``train.py``, with level and policy fields for ``enable``.

    ``explain`` runs after the training, while the model is still enabled.
    """
    model, optimizer = task.start(setting)
    scales: list[tuple[int, float]] = []
    with tritonamp.enable(model, optimizer, level=level, **policy) as amp:
        batches = task.batches(
            setting, f"{task.name} {level}", lambda: amp.stats()["scale"], scales
        )
        losses = train(model, optimizer, amp, batches).tolist()
        stats, explanation = amp.stats(), explain(amp)
        skips = [record.step for record in amp.history if record.cause]
        score = evaluate(model, task, setting.device)
    return Run(task, level, score, losses, scales, skips, stats, explanation)


def measured_torch(task: Task, setting: Setting) -> Run:
    """Train a task in the loop that the documentation of torch.amp shows, in float16."""
    model, optimizer = task.start(setting)
    device = setting.device.type
    scaler = torch.amp.GradScaler(device)
    losses: list[float] = []
    scales: list[tuple[int, float]] = []
    taken: list[int] = []
    optimizer.register_step_post_hook(lambda *_: taken.append(len(losses) + 1))

    for x, y in task.batches(setting, f"{task.name} torch.amp", scaler.get_scale, scales):
        with torch.autocast(device, torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())

    with torch.autocast(device, torch.float16):
        score = evaluate(model, task, setting.device)
    skips = sorted({*range(1, len(losses) + 1)} - {*taken})
    stats = {"skipped": len(skips), "scale": scaler.get_scale()}
    return Run(task, "torch.amp", score, losses, scales, skips, stats)


def evaluate(model: nn.Module, task: Task, device: torch.device) -> float:
    """Return the task's score of the model."""
    logits = predict(model, task.split.test_x, device, task.batch_size)
    return task.score(logits, task.split.test_y).item()
