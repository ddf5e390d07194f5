"""Epochs of training in one mode: time, memory and accuracy."""

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import images
import torch
from images import Images
from timing import now
from torch import Tensor, nn
from training import Step, apex_training_step, criterion, our_training_step, torchs_training_step

import tritonamp
from tritonamp.apex import amp as apex_amp

MODES = "FP32", "TF32", "torch.amp", "apex O1", "apex O2", "tritonamp O2"
SEED = 0
LR, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 5e-4  # the rate is the highest of a one-cycle schedule

Batches = Iterable[tuple[Tensor, Tensor]]


class Task(NamedTuple):
    """The training task, equal for all modes.

    Attributes:
        build: maker of the model.
        train: number of generated images to train on.
        test: number of generated images to test on.
        size: pixels along a side of generated images.
        batch: images in a step.
        epochs: number of epochs, of which the first is timed separately.
        data: folder of CIFAR-10; None generates images.
    """

    build: Callable[[], nn.Module]
    train: int
    test: int
    size: int
    batch: int
    epochs: int
    data: Path | None = None

    def images(self, device: torch.device) -> Images:
        if self.data:
            return images.cifar10(self.data, device)
        return images.generated(self.train, self.test, self.size, device)


class Trainer(NamedTuple):
    """Training step and evaluation of a model in one mode.

    Attributes:
        step: training step.
        forward: forward of an evaluation.
        close: function that undoes ``enable``.
    """

    step: Step
    forward: Callable[[Tensor], Tensor]
    close: Callable[[], None] = lambda: None


def trainer(mode: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainer:
    library, _, level = mode.partition(" ")
    if library == "apex":
        apex_amp.initialize(model, optimizer, opt_level=level)
        return Trainer(apex_training_step(optimizer, model), model)
    if library == "tritonamp":
        amp = tritonamp.enable(model, optimizer, level=level)
        step = our_training_step(amp, optimizer, lambda x, y: criterion(model(x), y))
        return Trainer(step, model, amp.disable)
    params, half = list(model.parameters()), mode == "torch.amp"

    def forward(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.float16, enabled=half):
            return model(x)

    return Trainer(torchs_training_step(params, optimizer, model, half), forward)


def train_epoch(step: Step, schedule: Any, batches: Batches) -> tuple[Tensor, Tensor]:
    """Take a step for each batch, without waiting for the device.

    Returns:
        mean loss and number of steps with non-finite gradients, on the device. A step with a loss
        scale is then skipped.
    """
    losses, overflows = [], []
    for x, y in batches:
        loss, norm = step(x, y)
        schedule.step()
        losses.append(loss.detach())
        overflows.append(~norm.isfinite())
    return torch.stack(losses).float().mean(), torch.stack(overflows).sum()


@torch.no_grad()
def accuracy(model: nn.Module, forward: Callable[[Tensor], Tensor], batches: Batches) -> float:
    """Return the share of right answers in percent."""
    model.eval()
    right = [forward(x).argmax(-1) == y for x, y in batches]
    return 100 * torch.cat(right).float().mean().item()


def measure(mode: str, task: Task, device: torch.device) -> dict[str, Any]:
    """Train in one mode; return times, peak memory, losses and accuracy."""
    torch.manual_seed(SEED)
    model = task.build().to(device)  # made on the CPU: equal weights on every device
    data = task.images(device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, fused=True
    )
    step, forward, close = trainer(mode, model, optimizer)
    steps = len(data.padded) // task.batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LR, task.epochs * steps, cycle_momentum=False
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds, losses, overflows = [], [], []
    for _ in range(task.epochs):
        start = now(device)
        loss, overflow = train_epoch(step, schedule, data.epoch(task.batch))
        seconds.append(now(device) - start)
        losses.append(loss.item())
        overflows.append(overflow.item())
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    typical = median(seconds[1:] or seconds)
    found = {
        "seconds_per_epoch": typical, "first_epoch_seconds": seconds[0],
        "images_per_second": steps * task.batch / typical, "peak_mib": peak,
        "accuracy": accuracy(model, forward, data.tests(task.batch)),
        "final_loss": losses[-1], "losses": losses, "skipped": sum(overflows),
        "images": len(data.padded), "test_images": len(data.test),
    }  # fmt: skip
    close()
    return found
