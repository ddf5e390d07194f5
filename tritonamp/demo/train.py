"""Train a model in mixed precision, save it and resume: the example to read and to copy.

::

    python -m tritonamp.demo.train digits.pt       # a second run resumes from digits.pt
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tritonamp
from tritonamp.demo.data import batches, digits
from tritonamp.demo.models import DigitNet

EPOCHS, STEPS, BATCH_SIZE = 5, 60, 64


def main(path: Path, epochs: int = EPOCHS) -> nn.Module:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    data = digits()
    model = DigitNet().to(device)  # in FP32, because enable makes the half copies
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with tritonamp.enable(
        model, optimizer, level="O2"
    ) as amp:  # the model is plain again behind it
        run = {"model": model, "optimizer": optimizer, "amp": amp, "rng": tritonamp.RNGState()}
        done = tritonamp.load(path, **run)["done"] if path.exists() else 0
        for epoch in range(done, epochs):
            losses = train(model, optimizer, amp, batches(data, BATCH_SIZE, STEPS, epoch, device))
            right = predict(model, data.test_x, device).argmax(-1) == data.test_y
            tritonamp.save(path, **run, done=epoch + 1)  # a kill during save keeps the older file
            print(
                f"epoch {epoch + 1}: loss {losses.mean().item():.3f}, "
                f"accuracy {right.float().mean().item():.1%}, loss scale {amp.stats()['scale']:g}"
            )
        if amp.stats()["skipped"]:
            print(amp.explain())
    return model


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    amp: tritonamp.Amp,
    data: Iterable[tuple[Tensor, Tensor]],
) -> Tensor:
    """Take a step for each batch, and return the losses on the device."""
    losses = []
    for x, y in data:
        loss = criterion(model(x), y)
        amp.backward(loss)  # instead of loss.backward()
        amp.clip_grad_norm_(1.0)  # true gradients, clipped inside the step
        optimizer.step()  # a step, or a skip if gradients are not finite
        optimizer.zero_grad()
        losses.append(loss.detach())  # .item() would wait for the device
    return torch.stack(losses)


def criterion(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of (N, C) or (N, T, C) logits."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@torch.no_grad()
def predict(
    model: nn.Module, x: Tensor, device: torch.device, batch_size: int = BATCH_SIZE
) -> Tensor:
    """Evaluate the model on ``x``, batch by batch, and return its outputs on the CPU."""
    model.eval()
    outputs = [model(part.to(device)).float().cpu() for part in x.split(batch_size)]
    model.train()
    return torch.cat(outputs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
