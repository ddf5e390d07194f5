"""A model in training, as most tests need one, and the optimizers that tests name."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from helpers import Net, Resumable, disabled_after, snapshot
from torch import Tensor, nn

import tritonamp

LEVELS = ["O0", "O1", "O2", "O3"]

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


def grouped(name: str, **first: Any) -> Callable[..., torch.optim.Optimizer]:
    """Return a maker of an optimizer whose first parameter is a group with its own settings."""
    return lambda params, **rest: OPTIMIZERS[name](
        [{"params": params[:1], **first}, {"params": params[1:]}], **rest
    )


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
        optimizer: a name in `OPTIMIZERS`, or a function of the trainable parameters, which may
            return a list of several optimizers.
        level: the level of ``enable``; None trains in plain FP32, without a handle.
        device: where the model and its inputs are.
        enable: the function that enables, for example the fixture ``handles``.
        lr: the learning rate; None leaves it to the optimizer.
        fields: further arguments of ``enable``.

    Attributes:
        optimizers: all optimizers; ``optimizer`` is the first.
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
        made = make([p for p in self.model.parameters() if p.requires_grad], **rate)
        self.optimizers: list[Any] = made if isinstance(made, list) else [made]
        self.optimizer = self.optimizers[0]
        self.x = batch(0, device=device)
        self.amp: Any = None
        if level is not None:
            self.amp = enable(self.model, made, level=level, **fields)

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
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(
        self, x: Tensor | None = None, factor: float = 1.0, max_norm: float | None = None
    ) -> float:
        """Take a step; ``factor`` inf or NaN has it skipped. Return the loss without the factor."""
        loss = self.loss(x)
        self.backward(loss * factor)
        self.finish(max_norm)
        return float(loss.detach())

    def step_by_scaler(self, factor: float = 1.0) -> None:
        """Take a step as code for torch.amp does, with the scaler of the handle."""
        scaler = self.amp.scaler
        scaler.scale(self.loss() * factor).backward()
        for optimizer in self.optimizers:
            scaler.step(optimizer)
        scaler.update()
        self.zero_grad()

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
        return snapshot(self.model, *self.optimizers) + self.masters()

    def numbers(self) -> Any:
        """Return what the handle reports: its state, statistics and history."""
        return self.amp.state_dict(), self.amp.stats(), self.amp.history

    def lower_scale(self, scale: float = 8.0) -> None:
        """Set a dynamic loss scale so low that no step overflows by chance."""
        if self.amp.policy.loss_scale == "dynamic":
            self.amp.load_state_dict({**self.amp.scaler.state_dict(), "scale": scale})

    @property
    def causes(self) -> list[str | None]:
        """The cause of each step's skip so far; None: the step was taken."""
        return [record.cause for record in self.amp.history]

    def end(self) -> None:
        if self.amp is not None and self.amp._enabled:
            self.amp.disable()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()


def started(kind: Callable[..., Any] = Training, **fields: Any) -> Any:
    """Return a fixture that makes runs of ``kind`` on a test's device and disables them at the end.

    fields: arguments of ``kind``, unless the test gives others.
    """

    @pytest.fixture
    def start(device: torch.device) -> Iterator[Callable[..., Any]]:
        yield from disabled_after(partial(kind, device=device, **fields))

    return start


def started_on_cpu(kind: Callable[..., Any] = Training, **fields: Any) -> Any:
    """Return a fixture as `started` does, for tests that take no device."""

    @pytest.fixture
    def start() -> Iterator[Callable[..., Any]]:
        yield from disabled_after(partial(kind, **fields))

    return start
