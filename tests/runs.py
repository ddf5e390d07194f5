"""A model in training, as most tests need one, and the optimizers that tests name."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from helpers import Net, Resumable, disabled_after, on_cpu, snapshot
from torch import Tensor, nn

import tritonamp

LEVELS = ["O0", "O1", "O2", "O3"]
STATES = ["fp32", "bf16", "8bit"]
FORMS: dict[str, dict[str, Any]] = {
    **{state: {"state": state} for state in STATES},
    **{f"packed {state}": {"state": state, "masters": "packed"} for state in STATES[:2]},
}
"""Forms of optimizer state and FP32 masters: fields of `Policy`, arguments of `tritonamp.optim`."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **{
        name: kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and kind is not torch.optim.Optimizer
    },
    "SGD momentum": partial(torch.optim.SGD, momentum=0.9),
    "RMSprop momentum": partial(torch.optim.RMSprop, momentum=0.9),
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "fused AdamW": partial(torch.optim.AdamW, fused=True),
    "Lion": tritonamp.optim.Lion,
    "our Adam": tritonamp.optim.Adam,
    "our AdamW": tritonamp.optim.AdamW,
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


def in_two(params: list[nn.Parameter], **rest: Any) -> list[torch.optim.Optimizer]:
    """Return two AdamW, the second for the last parameter."""
    return [torch.optim.AdamW(params[:-1], **rest), torch.optim.AdamW(params[-1:], **rest)]


EARLY: dict[str, Callable[["Training"], object]] = {
    "clip": lambda run: run.amp.clip_grad_norm_(0.1),
    "unscale": lambda run: run.amp.unscale_(),
    "both": lambda run: (run.amp.clip_grad_norm_(0.1), run.amp.unscale_()),
    "unscale and clip": lambda run: (run.amp.unscale_(), run.amp.clip_grad_norm_(0.1)),
}
"""Calls between backward and step that decide the step early."""


def batch(seed: int, *shape: int, device: Any = "cpu", dtype: Any = torch.float32) -> Tensor:
    """Return normal numbers that depend on ``seed`` alone, of shape [8, 6] by default."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (8, 6), generator=generator).to(device, dtype)


def tensors_of(state: dict[str, Any]) -> list[Tensor]:
    """Return the tensors of an optimizer's state dict."""
    return [t for own in state["state"].values() for t in own.values() if isinstance(t, Tensor)]


def labelled(seed: int, device: Any = "cpu") -> tuple[Tensor, Tensor]:
    """Return a batch of inputs for `helpers.Net` and of their three classes."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(32, 6, generator=generator), torch.randint(0, 3, (32,), generator=generator)
    return x.to(device), y.to(device)


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of a labelled batch."""
    return nn.functional.cross_entropy(model(data[0]).float(), data[1])


class Training(Resumable):
    """A model, its optimizer, its handle, and a training loop as the README has it.

    A test that needs another loss, another batch or more objects subclasses it; ``step`` calls
    ``loss``, ``backward`` and ``finish``.

    Args:
        model: the module to train, or a function that makes it after the seed is set.
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
        norm: the norm of the gradients that ``finish`` clipped last.
        x: the inputs of every step.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module] = Net,
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
        self.model: Any = (model if isinstance(model, nn.Module) else model()).to(device)
        make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        rate = {} if lr is None else {"lr": lr}
        made = make([p for p in self.model.parameters() if p.requires_grad], **rate)
        self.optimizers: list[Any] = made if isinstance(made, list) else [made]
        self.optimizer = self.optimizers[0]
        self.x = batch(0, device=device)
        self.amp: Any = None
        if level is not None:
            self.amp = enable(self.model, made, level=level, **fields)

    def loss(self, x: Any = None) -> Tensor:
        """Return the loss of inputs, by default ``self.x``."""
        return self.model(self.x if x is None else x).float().square().mean()

    def backward(self, loss: Tensor | None = None, by_scaler: bool = False) -> None:
        """Backpropagate a loss, by default that of ``self.x``.

        by_scaler: as code for torch.amp does, with the scaler of the handle.
        """
        loss = self.loss() if loss is None else loss
        if self.amp is None:
            loss.backward()
        elif by_scaler:
            self.amp.scaler.scale(loss).backward()
        else:
            self.amp.backward(loss)

    def finish(self, max_norm: float | None = None, by_scaler: bool = False) -> None:
        """Clip to ``max_norm``, step, and leave no gradient."""
        if max_norm is not None:
            if self.amp is None:
                self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
            else:
                self.norm = self.amp.clip_grad_norm_(max_norm)
        for optimizer in self.optimizers:
            if by_scaler:
                self.amp.scaler.step(optimizer)
            else:
                optimizer.step()
        if by_scaler:
            self.amp.scaler.update()
        self.zero_grad()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(
        self,
        x: Any = None,
        factor: float = 1.0,
        max_norm: float | None = None,
        by_scaler: bool = False,
        bad: bool = False,
    ) -> Tensor:
        """Take a step on the loss times ``factor``, which inf, NaN or ``bad`` has skipped.

        Return the loss without the factor.
        """
        loss = self.loss() if x is None else self.loss(x)
        self.backward(loss * (math.inf if bad else factor), by_scaler)
        self.finish(max_norm, by_scaler)
        return loss.detach()

    def train(self, seeds: Sequence[int], bad: Sequence[int] = ()) -> list[float]:
        """Take a step on the batch of each seed, an overflowing one for those in ``bad``."""
        shape = self.x.shape
        return [
            float(self.step(batch(seed, *shape, device=self.device), bad=seed in bad))
            for seed in seeds
        ]

    def masters(self) -> list[Tensor]:
        """Return copies of the FP32 values of the trained parameters."""
        values = self.model.parameters() if self.amp is None else self.amp.master_params()
        return [p.detach().clone() for p in values]

    def stored(self) -> list[Tensor]:
        """Return copies of parameters and state as they are stored."""
        return snapshot(self.model, *self.optimizers)

    def everything(self) -> list[Tensor]:
        """Return copies of all that a step writes: stored parameters, state, FP32 values."""
        return self.stored() + self.masters()

    def bits(self) -> dict[str, Any]:
        """Return copies of all bits that training continues from, on the CPU."""
        stored = {"stored": dict(self.model.named_parameters())}
        others = {f"optimizer {i}": o.state_dict() for i, o in enumerate(self.optimizers)}
        return on_cpu({**self.states(), **stored, **others})

    def numbers(self) -> Any:
        """Return state, statistics and history of the handle."""
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


class Classifying(Training):
    """Trains on the labelled batch of a seed."""

    def loss(self, x: Any = 0) -> Tensor:
        return loss_of(self.model, labelled(x, self.device))

    def steps(self, *seeds: int) -> Any:
        for seed in seeds:
            self.step(seed)
        return self


def started(kind: Callable[..., Any] = Training, **fields: Any) -> Any:
    """Return a fixture that makes runs of ``kind`` on a test's device and disables them at the end.

    fields: arguments of ``kind``, unless the test gives others.
    """

    @pytest.fixture
    def start(device: torch.device) -> Iterator[Callable[..., Any]]:
        yield from disabled_after(partial(kind, device=device, **fields))

    return start


def started_on_cpu(kind: Callable[..., Any] = Training, **fields: Any) -> Any:
    """Return a fixture as `started` does, on the CPU unless the test names another device."""

    @pytest.fixture
    def start() -> Iterator[Callable[..., Any]]:
        yield from disabled_after(partial(kind, **fields))

    return start
