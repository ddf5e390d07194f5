"""The two sides of a story: one experiment in the loop of torch.amp and in that of tritonamp."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm import tqdm

import tritonamp
from tritonamp.demo import data

Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Setting:
    """What the command line chose; ``steps`` None: as many as the story takes."""

    device: torch.device
    seed: int = 0
    steps: int | None = None
    quiet: bool = True


class Story(NamedTuple):
    """What a story measured and what it says about that.

    Attributes:
        rows: name of a run to its numbers, by column.
        words: paragraphs.
    """

    rows: dict[str, dict[str, Any]]
    words: list[str]


def power_of_two(scale: float) -> str:
    """Write a loss scale as people read it: 2^16; or 1; or 0.

    It is 0 where halving has gone below the smallest float32.
    """
    return f"{scale:g}" if scale in (0.0, 1.0) else f"2^{math.log2(scale):g}"


def classify(logits: Tensor, _: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy of half or FP32 logits, computed in FP32."""
    return F.cross_entropy(logits.float(), labels)


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Return how many images, in percent, the model gives their labels."""
    return {"accuracy": data.percent_right(model(images), labels).item()}


@dataclass(frozen=True)
class Experiment:
    """What both sides train.

    Attributes:
        build: makes the FP32 model, on the CPU.
        split: images and labels, on the CPU.
        batch_size: images of a training batch.
        optimizer: makes the optimizer of the parameters.
        criterion: (output, *batch) -> scalar loss, computed outside of autocast.
        score: (model, test images, test labels) -> numbers by column, without gradients.
        change: (batches, seed) -> batches that the model is trained on; the first tensor of each is
            its input.
        watch: called with the model between backward and step.
    """

    build: Callable[[], nn.Module]
    split: data.Split
    batch_size: int
    optimizer: Callable[[Iterator[nn.Parameter]], Optimizer]
    steps: int
    criterion: Callable[..., Tensor] = classify
    score: Callable[[nn.Module, Tensor, Tensor], dict[str, float]] = accuracy
    change: Callable[[Batches, int], Iterator[tuple[Tensor, ...]]] = lambda batches, seed: batches
    watch: Callable[[nn.Module], object] = lambda model: None

    def start(self, setting: Setting) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(setting.seed)  # equal weights on both sides
        model = self.build().to(setting.device)
        return model, self.optimizer(model.parameters())

    def batches(self, steps: int, setting: Setting) -> Iterator[tuple[Tensor, ...]]:
        drawn = data.batches(self.split, self.batch_size, steps, setting.seed, setting.device)
        return self.change(drawn, setting.seed)

    def loader(self, name: str, setting: Setting) -> Iterator[tuple[Tensor, ...]]:
        steps = setting.steps or self.steps
        yield from tqdm(
            self.batches(steps, setting), name, total=steps, disable=setting.quiet, leave=False
        )

    def test(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Return the score of a trained model."""
        return self.score(model.eval(), self.split.test_x.to(device), self.split.test_y.to(device))


@dataclass(frozen=True)
class Outcome:
    """How a training ended.

    Attributes:
        score: of the trained model, by column.
        losses: of every step.
        scale: the loss scale at the end.
        skipped: the steps that were skipped.
        stats: ``amp.stats()``; empty for torch.amp.
        explanation: ``amp.explain()``; empty for torch.amp.
    """

    score: dict[str, float]
    losses: list[float]
    scale: float
    skipped: int
    stats: dict[str, Any] = field(default_factory=dict)
    explanation: str = ""

    def row(self) -> dict[str, Any]:
        """Return what a story's table shows of it."""
        return {**self.score, "skipped": self.skipped, "loss scale": self.scale}


def train_torch(
    experiment: Experiment, setting: Setting, *, autocast: bool = True, scaling: bool = True
) -> Outcome:
    """Train in the loop that the documentation of torch.amp shows.

    Without ``autocast`` or ``scaling`` it is less of that loop.
    """
    model, optimizer = experiment.start(setting)
    scaler = torch.amp.GradScaler(setting.device.type, enabled=scaling)
    losses, taken = [], []
    optimizer.register_step_post_hook(lambda *_: taken.append(1))

    for batch in experiment.loader("torch.amp", setting):
        with torch.autocast(setting.device.type, torch.float16, enabled=autocast):
            output = model(batch[0])
        loss = experiment.criterion(output, *batch)
        scaler.scale(loss).backward()
        experiment.watch(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())

    with torch.no_grad(), torch.autocast(setting.device.type, torch.float16, enabled=autocast):
        score = experiment.test(model, setting.device)
    return Outcome(
        score, torch.stack(losses).tolist(), scaler.get_scale(), len(losses) - len(taken)
    )


def train_tritonamp(
    experiment: Experiment,
    setting: Setting,
    *,
    ask: Callable[[tritonamp.Amp, nn.Module], str] = lambda amp, model: amp.explain(),
    **policy: Any,
) -> Outcome:
    """Train in the loop of tritonamp.

    Args:
        experiment: what is trained, on what.
        setting: on which device, from which seed, for how many steps.
        ask: asked after the training, while the model is still enabled; the answer is the run's
            explanation.
        policy: level and fields of ``tritonamp.enable``.
    """
    model, optimizer = experiment.start(setting)
    amp = tritonamp.enable(model, optimizer, **policy)
    losses = []

    for batch in experiment.loader("tritonamp", setting):
        loss = experiment.criterion(model(batch[0]), *batch)
        amp.backward(loss)
        experiment.watch(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    with torch.no_grad():
        score = experiment.test(model, setting.device)
    stats, explanation = amp.stats(), ask(amp, model)
    amp.disable()
    return Outcome(
        score, torch.stack(losses).tolist(), stats["scale"], stats["skipped"], stats, explanation
    )
