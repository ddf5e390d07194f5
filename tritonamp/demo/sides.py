"""The two sides of a story: one experiment in the loop of torch.amp and in that of tritonamp."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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
    """The options of the command line; ``steps`` is None for the number that the story needs."""

    device: torch.device
    seed: int = 0
    steps: int | None = None
    quiet: bool = True


@dataclass(frozen=True)
class Experiment:
    """A classifier that both sides train.

    Attributes:
        build: function that returns the FP32 model, on the CPU.
        split: images and labels, on the CPU.
        batch_size: number of images in a training batch.
        optimizer: function from parameters to their optimizer.
        steps: number of training steps.
        change: function from the drawn batches to those for the training.
    """

    build: Callable[[], nn.Module]
    split: data.Split
    batch_size: int
    optimizer: Callable[[Iterator[nn.Parameter]], Optimizer]
    steps: int
    change: Callable[[Batches], Batches] = lambda batches: batches

    def start(self, setting: Setting) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(setting.seed)  # equal weights on both sides
        model = self.build().to(setting.device)
        return model, self.optimizer(model.parameters())

    def loader(self, name: str, setting: Setting) -> Iterator[tuple[Tensor, Tensor]]:
        steps = setting.steps or self.steps
        drawn = data.batches(self.split, self.batch_size, steps, setting.seed, setting.device)
        yield from tqdm(self.change(drawn), name, total=steps, disable=setting.quiet, leave=False)

    @torch.no_grad()
    def accuracy(self, model: nn.Module, device: torch.device) -> float:
        """Return the share of test images, in percent, to which the model gives their labels."""
        logits = model.eval()(self.split.test_x.to(device))
        return data.percent_right(logits, self.split.test_y.to(device)).item()


@dataclass(frozen=True)
class Outcome:
    """The end of a training.

    Attributes:
        accuracy: accuracy of the trained model, in percent.
        steps, skipped: number of steps, and of those that were skipped.
        scale: the loss scale.
        explanation: ``amp.explain()``; empty for torch.amp.
    """

    accuracy: float
    steps: int
    skipped: int
    scale: float
    explanation: str = ""

    @property
    def power(self) -> str:
        """The loss scale as people read it: 2^16, or 1, or 0 below the smallest FP32 number."""
        plain = self.scale in (0.0, 1.0)
        return f"{self.scale:g}" if plain else f"2^{math.log2(self.scale):g}"


def train_torch(experiment: Experiment, setting: Setting, *, enabled: bool = True) -> Outcome:
    """Train in the loop that the documentation of torch.amp shows; in FP32 if not ``enabled``."""
    model, optimizer = experiment.start(setting)
    device = setting.device.type
    scaler = torch.amp.GradScaler(device, enabled=enabled)
    steps, taken = 0, []
    optimizer.register_step_post_hook(lambda *_: taken.append(1))

    for images, labels in experiment.loader("torch.amp", setting):
        with torch.autocast(device, torch.float16, enabled=enabled):
            logits = model(images)
        loss = F.cross_entropy(logits.float(), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        steps += 1

    with torch.autocast(device, torch.float16, enabled=enabled):
        accuracy = experiment.accuracy(model, setting.device)
    return Outcome(accuracy, steps, steps - len(taken), scaler.get_scale())


def train_tritonamp(
    experiment: Experiment,
    setting: Setting,
    *,
    ask: Callable[[tritonamp.Amp], str] = lambda amp: amp.explain(),
    **policy: Any,
) -> Outcome:
    """Train in the loop of tritonamp, with level and policy fields for ``tritonamp.enable``.

    ``ask`` returns the explanation. It runs at the end, while the model is still enabled.
    """
    model, optimizer = experiment.start(setting)
    with tritonamp.enable(model, optimizer, **policy) as amp:
        for images, labels in experiment.loader("tritonamp", setting):
            loss = F.cross_entropy(model(images), labels)
            amp.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accuracy = experiment.accuracy(model, setting.device)
        stats, explanation = amp.stats(), ask(amp)
    steps = stats["steps"] + stats["skipped"]
    return Outcome(accuracy, steps, stats["skipped"], stats["scale"], explanation)
