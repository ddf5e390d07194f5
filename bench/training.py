"""Training steps of whole models: forward, loss, backward, clipped AdamW. Time and memory."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import models
import torch
from case import Case
from timing import Work
from torch import Tensor, nn

import tritonamp
from tritonamp import functional
from tritonamp.apex import amp as apex_amp
from tritonamp.demo.train import criterion

MODES = "fp32", "torch.amp", "compile", "tritonamp O1", "tritonamp O2"
OF_TOKENS = (*MODES, "tritonamp O2, linear loss")
MAX_NORM = 1.0


class Stepped(NamedTuple):
    """The result of a training step, on the device.

    Attributes:
        loss: loss without the loss scale.
        norm: norm of the unscaled gradients before clipping. If it is not finite, a step with a
            loss scale was skipped.
    """

    loss: Tensor
    norm: Tensor


Step = Callable[[Tensor, Tensor], Stepped]
"""Takes inputs and targets."""


class Training(NamedTuple):
    """A model and its data.

    Attributes:
        shape: shape of one input.
        tokens: number of different tokens, each input having a target per token; 0 for images.
        classes: number of classes of a target.
    """

    build: Callable[[], nn.Module]
    batch: int
    shape: tuple[int, ...]
    tokens: int
    classes: int


REAL = {
    "GPT-2 small, batch 8x1024, fused attention": Training(
        lambda: models.GPT(True), 8, (1024,), 50257, 50257
    ),
    "ResNet-50, 32x32 images, batch 256": Training(models.ResNet, 256, (3, 32, 32), 0, 10),
    "GPT-2 small, batch 8x1024, softmax attention": Training(
        lambda: models.GPT(False), 8, (1024,), 50257, 50257
    ),
    "ViT-B/16, 224x224 images, batch 64": Training(models.ViT, 64, (3, 224, 224), 0, 1000),
}
FIRST = tuple(REAL)[:2]
"""Cases of the first tier."""
TOYS = [
    Training(lambda: models.GPT(True, 16, 4, 8, 1, 2), 2, (4,), 16, 16),
    Training(lambda: models.ResNet((1, 1), 4), 2, (3, 8, 8), 0, 10),
    Training(lambda: models.GPT(False, 16, 4, 8, 1, 2), 2, (4,), 16, 16),
    Training(lambda: models.ViT(4, 2, 8, 1, 2), 2, (3, 4, 4), 0, 1000),
]


def data(training: Training, device: torch.device) -> tuple[Tensor, Tensor]:
    shape = (training.batch, *training.shape)
    if training.tokens:
        return tuple(torch.randint(training.tokens, shape, device=device) for _ in range(2))
    targets = torch.randint(training.classes, (training.batch,), device=device)
    return torch.randn(shape, device=device), targets


def our_training_step(
    amp: Any, optimizer: torch.optim.Optimizer, loss_of: Callable[[Tensor, Tensor], Tensor]
) -> Step:
    def step(x: Tensor, y: Tensor) -> Stepped:
        loss = loss_of(x, y)
        amp.backward(loss)
        norm = amp.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return Stepped(loss, norm)

    return step


def apex_training_step(optimizer: torch.optim.Optimizer, model: nn.Module) -> Step:
    """Return the loop of apex, after ``amp.initialize``."""

    def step(x: Tensor, y: Tensor) -> Stepped:
        loss = criterion(model(x), y)
        with apex_amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        norm = nn.utils.clip_grad_norm_(apex_amp.master_params(optimizer), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return Stepped(loss, norm)

    return step


def torchs_training_step(
    params: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    forward: Callable[[Tensor], Tensor],
    half: bool = True,
) -> Step:
    """Return the loop of torch.amp in float16, or with ``half=False`` an FP32 loop."""
    device_type = params[0].device.type
    scaler = torch.amp.GradScaler(device_type, enabled=half)

    def step(x: Tensor, y: Tensor) -> Stepped:
        with torch.autocast(device_type, torch.float16, enabled=half):
            loss = criterion(forward(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return Stepped(loss, norm)

    return step


def work(training: Training, mode: str, device: torch.device) -> Work:
    with torch.device(device):
        model: Any = training.build()
    x, y = data(training, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if not mode.startswith("tritonamp"):
        forward = model
        if mode == "compile":
            torch._dynamo.reset()
            forward = torch.compile(model, backend="inductor" if x.is_cuda else "eager")
        params = list(model.parameters())
        step = torchs_training_step(params, optimizer, forward, half=mode != "fp32")
        return Work([lambda: step(x, y)])
    level, _, linear = mode.removeprefix("tritonamp ").partition(", ")
    amp = tritonamp.enable(model, optimizer, level=level, cast_outputs=None)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with amp.autocast():
            if linear:
                return functional.linear_cross_entropy(model.features(x), model.token.weight, y)
            return criterion(model(x), y)

    step = our_training_step(amp, optimizer, loss_of)
    return Work([lambda: step(x, y)], amp.disable)


def cases(toy: bool) -> list[Case]:
    found = []
    for (name, real), small in zip(REAL.items(), TOYS, strict=True):
        used = small if toy else real
        shape = "x".join(map(str, (used.batch, *used.shape)))
        modes = OF_TOKENS if used.tokens else MODES
        peers = {mode: functools.partial(work, used, mode) for mode in modes}
        tier = 1 if name in FIRST else 3
        found.append(
            Case("training step", name, "float16", shape, used.batch, None, peers, tier=tier)
        )
    return found
