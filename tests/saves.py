"""Checkpoints that tests write and damage, and a run that resumes from them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from runs import Training
from torch import Tensor, nn

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.uint16,
]
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[::2, 1],
    "empty": lambda x: x[:0],
    "scalar": lambda x: x[0, 0],
    "expanded": lambda x: x[0].expand(3, 4),
}


class StepSaves:
    """Checkpoints of several tensors that say which save they come from: a mix of two saves shows.

    Args:
        save, load: functions of the library, for a file or for a folder.
    """

    def __init__(self, save: Callable[..., Any], load: Callable[..., Any]) -> None:
        self._save, self._load = save, load

    def write(self, path: Path, step: int, size: int = 3) -> None:
        self._save(path, step=step, weights=[torch.full((size,), float(step)) for _ in range(2)])

    def read(self, path: Path | str) -> int:
        """Return the step in ``path``, after a check that all of the checkpoint is of that step."""
        content = self._load(path)
        numbers = {value for tensor in content["weights"] for value in tensor.tolist()}
        assert numbers == {content["step"]}
        return content["step"]  # type: ignore[no-any-return]

    def prepare(self, path: Path, number: int) -> None:
        """Save the steps before ``number`` to ``path``, in a new folder."""
        path.parent.mkdir()
        for step in range(number):
            self.write(path, step)


def bits_of(tensor: Tensor) -> list[int]:
    """Return the bytes of a tensor."""
    return tensor.reshape(-1).contiguous().view(torch.uint8).tolist() if tensor.numel() else []


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def damage(path: Path, fraction: float = 0.5) -> None:
    """Change a bit of the file at ``fraction`` of its length."""
    data = bytearray(path.read_bytes())
    data[int(fraction * (len(data) - 1))] ^= 1
    path.write_bytes(data)


class Scheduled(Training):
    """A run with a scheduler, on random inputs whose state a checkpoint holds.

    Attributes:
        scheduler: it divides the learning rate at the second and the fourth step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: str | Callable[..., Any] = "AdamW",
        level: str | None = "O2",
        lr: float = 0.1,
        **fields: Any,
    ) -> None:
        super().__init__(model, optimizer, level, lr=lr, **fields)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])
        self.parts = "model", "optimizer", "scheduler", *(("amp",) if self.amp else ())

    def go_on(self, steps: int, bad: int = -1) -> None:
        """Take steps on random inputs; number ``bad`` is skipped for a NaN loss."""
        weight = next(self.model.parameters())
        dtype = weight.dtype if self.amp is None else torch.float32
        for step in range(steps):
            x = torch.randn(8, weight.shape[-1], dtype=dtype)
            self.step(x, math.nan if step == bad else 1.0)
            self.scheduler.step()
