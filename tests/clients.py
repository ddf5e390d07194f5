"""A small model and batches for clients, and their training in a loop by hand."""

from collections.abc import Sequence
from typing import Any

import torch
from runs import OPTIMIZERS, Training
from torch import Tensor, nn

import tritonamp

LOSS = nn.functional.mse_loss
LEVELS_AND_KINDS = [
    ("O0", "AdamW"),
    ("O1", "SGD"),
    ("O1", "AdamW"),
    ("O2", "SGD"),
    ("O2", "AdamW"),
    ("O2", "optim.AdamW"),
    ("O3", "AdamW"),
    ("O5", "AdamW"),
]


def client_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def client_batches(number: int = 8, bad: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and targets; batch ``bad`` has an inf."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(number, 4, n, generator=generator) for n in (6, 3))
    if bad is not None:
        x[bad, 0, 0] = torch.inf
    return list(zip(x, y, strict=True))


def optimizer_and_scheduler(model: nn.Module, kind: str = "AdamW") -> tuple[Any, Any]:
    """Return an optimizer, ours where ``kind`` is "optim.", and a scheduler in steps of two."""
    is_ours = kind.startswith("optim.")
    make = getattr(tritonamp.optim, kind.removeprefix("optim.")) if is_ours else OPTIMIZERS[kind]
    optimizer = make(model.parameters(), lr=0.05)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of a model's state."""
    return {name: value.clone() for name, value in model.state_dict().items()}


class ByHand(Training):
    """The training of a client, in a loop by hand.

    Args:
        kind: name of the optimizer.
        level: the level of ``enable``.
        fields: further arguments of ``enable``.

    Attributes:
        norms: the norms that gradients had before they were clipped.
    """

    def __init__(self, kind: str = "AdamW", level: str = "O2", **fields: Any) -> None:
        model, optimizer, self.scheduler = self.parts_of(kind)
        super().__init__(model, lambda _: optimizer, level, lr=None, **fields)
        self.norms = list[float]()

    def parts_of(self, kind: str) -> tuple[nn.Module, Any, Any]:
        """Return model, optimizer and scheduler."""
        model = client_net()
        return (model, *optimizer_and_scheduler(model, kind))

    def loss(self, batch: Any = None) -> Tensor:
        return LOSS(self.model(batch[0]), batch[1])

    def schedule(self) -> None:
        self.scheduler.step()

    def walk(
        self, data: Sequence[Any], accumulate: int = 1, norm: float = 0.0, value: float = 0.0
    ) -> dict[str, Tensor]:
        """Train on all batches, disable, and return the state of the model.

        Args:
            data: the batches.
            accumulate: number of batches in a step.
            norm: the norm to clip to; 0: none.
            value: the limit of each gradient; 0: none.
        """
        for i, batch in enumerate(data):
            self.backward(self.loss(batch) / accumulate)
            if (i + 1) % accumulate:
                continue
            if norm:
                self.norms.append(float(self.amp.clip_grad_norm_(norm)))
            if value:
                self.amp.unscale_()
                nn.utils.clip_grad_value_(list(self.amp.master_params()), value)
            self.finish()
            self.schedule()
        state = state_of(self.model)
        self.end()
        return state


class ByHandOfTaken(ByHand):
    """The same, with a scheduler that waits where a step was skipped."""

    def schedule(self) -> None:
        if self.causes[-1] is None:
            super().schedule()
