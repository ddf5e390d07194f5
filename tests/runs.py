"""A model in training, as most tests need one, and the optimizers that tests name."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from helpers import Net, Resumable, snapshot
from torch import Tensor, nn

import tritonamp

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **{
        name: kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and kind is not torch.optim.Optimizer
    },
    "SGD momentum": lambda params, **rest: torch.optim.SGD(params, **{"momentum": 0.9, **rest}),
    "amsgrad": lambda params, **rest: torch.optim.AdamW(params, amsgrad=True, **rest),
    "Lion": tritonamp.optim.Lion,
}
"""Makers of optimizers by name: torch's, under torch's names, and variants with another kernel."""


def named(*names: str) -> dict[str, Callable[..., torch.optim.Optimizer]]:
    """Return these rows of `OPTIMIZERS`."""
    return {name: OPTIMIZERS[name] for name in names}


def batch(seed: int, *shape: int, device: Any = "cpu", dtype: Any = torch.float32) -> Tensor:
    """Return normal numbers that depend on ``seed`` alone, of shape [8, 6] by default."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (8, 6), generator=generator).to(device, dtype)


class Training(Resumable):
    """A model, its optimizer, its handle, and a training loop as the README has it.

    A test that needs another loss, another batch or more objects subclasses it; ``step`` calls
    ``loss``, ``backward`` and ``finish``.

    Args:
        model: the module to train, or its class, which is called after the seed is set.
        optimizer: a name in `OPTIMIZERS`, or a function of the trainable parameters.
        level: the level of ``enable``; None trains in plain FP32, without a handle.
        device: where the model and its inputs are.
        enable: the function that enables, for example the fixture ``handles``.
        lr: the learning rate; None leaves it to the optimizer.
        fields: further arguments of ``enable``.

    Attributes:
        amp: the handle, or None.
        x: the inputs of every step.
    """

    def __init__(
        self,
        model: nn.Module | type[nn.Module] = Net,
        optimizer: str | Callable[..., Any] = "AdamW",
        level: str | None = "O2",
        device: Any = "cpu",
        *,
        enable: Callable[..., Any] = tritonamp.enable,
        lr: float | None = 1e-2,
        **fields: Any,
    ) -> None:
        torch.manual_seed(0)
        self.device = torch.device(device)
        self.model: Any = (model() if isinstance(model, type) else model).to(device)
        make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        rate = {} if lr is None else {"lr": lr}
        self.optimizer = make([p for p in self.model.parameters() if p.requires_grad], **rate)
        self.x = batch(0, device=device)
        self.amp: Any = None
        if level is not None:
            self.amp = enable(self.model, self.optimizer, level=level, **fields)

    def loss(self, x: Tensor | None = None) -> Tensor:
        """Return the loss of inputs, by default ``self.x``."""
        return self.model(self.x if x is None else x).float().square().mean()

    def backward(self, loss: Tensor) -> None:
        if self.amp is None:
            loss.backward()
        else:
            self.amp.backward(loss)

    def finish(self, max_norm: float | None = None) -> None:
        """Clip to ``max_norm``, step, and leave no gradient."""
        if max_norm is not None:
            if self.amp is None:
                nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
            else:
                self.amp.clip_grad_norm_(max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(
        self, x: Tensor | None = None, factor: float = 1.0, max_norm: float | None = None
    ) -> float:
        """Take a step; ``factor`` inf or NaN has it skipped. Return the loss without the factor."""
        loss = self.loss(x)
        self.backward(loss * factor)
        self.finish(max_norm)
        return float(loss.detach())

    def train(self, seeds: Sequence[int], bad: Sequence[int] = ()) -> list[float]:
        """Take a step on the batch of each seed, an overflowing one for those in ``bad``."""
        shape = self.x.shape
        return [
            self.step(batch(seed, *shape, device=self.device), float("inf") if seed in bad else 1.0)
            for seed in seeds
        ]

    def masters(self) -> list[Tensor]:
        """Return copies of the FP32 values of the trained parameters."""
        values = self.model.parameters() if self.amp is None else self.amp.master_params()
        return [p.detach().clone() for p in values]

    def everything(self) -> list[Tensor]:
        """Return copies of all that a step writes: stored parameters, state, FP32 values."""
        return snapshot(self.model, self.optimizer) + self.masters()

    @property
    def causes(self) -> list[str | None]:
        """The cause of each step's skip so far; None: the step was taken."""
        return [record.cause for record in self.amp.history]

    def end(self) -> None:
        if self.amp is not None and self.amp._enabled:
            self.amp.disable()
