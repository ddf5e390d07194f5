"""Small models for tests, and small modules to put into models."""

from collections.abc import Callable
from typing import Any

import torch
from helpers import Net
from torch import Tensor, nn


class TiedAndFrozen(nn.Module):
    """A tied weight, a frozen layer, a norm with statistics, and buffers that levels may halve."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12, bias)
        self.norm = nn.BatchNorm1d(12)
        self.frozen = nn.Linear(12, 6).requires_grad_(False)
        self.tied = nn.Linear(6, 12, bias=False)
        self.tied.weight = self.first.weight
        self.last = nn.Linear(12, 3, bias)
        self.register_buffer("third", torch.full((6,), 1 / 3))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def partly_half(self, *names: str) -> "TiedAndFrozen":
        """Store some modules in half, as a checkpoint may have them."""
        for name in names:
            self.get_submodule(name).half()
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        super()._apply(*args, **kwargs)
        self.tied.weight = self.first.weight  # a move to a GPU in software unties them
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.frozen(self.norm(self.first(x))) + self.third)
        return self.last(torch.relu(self.tied(y))).float()


class Language(nn.Module):
    """Tokens in, logits of tokens out: norms of two kinds, a buffer, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.hidden = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.batch_norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 7)
        self.head.weight = self.embed.weight
        self.register_buffer("angles", torch.linspace(0, 1, 8))

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        super()._apply(*args, **kwargs)
        self.head.weight = self.embed.weight  # a move to a GPU in software unties them
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.hidden(self.embed(tokens)) + self.angles)
        return self.head(self.batch_norm(torch.relu(x)))


class SmoothNet(Net):
    """A small model without ReLU, so that a rounding changes gradients by roundings alone."""

    def __init__(self) -> None:
        super().__init__(hidden=8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def uneven_net(seed: int = 0) -> nn.Sequential:
    """Return a model of shapes that two ranks cannot share evenly; one has nothing of a bias."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 1))


class Apply(nn.Module):
    """A function of one tensor as a module without parameters."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def around(*modules: nn.Module, width: int = 16) -> nn.Sequential:
    """Return modules between two linear layers."""
    return nn.Sequential(nn.Linear(width, width), *modules, nn.Linear(width, 8))


class WrittenNorm(nn.Module):
    """An RMSNorm in plain operations, which ``enable`` runs as one kernel at O1 and O2."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class LlamaRMSNorm(nn.Module):
    """transformers' RMSNorm: back to the input's dtype before the weight is applied."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class EveryList(nn.Module):
    """Ops of every list of torch's autocast, and ops whose dtypes are ours alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.norm(self.linear(x)).softmax(-1)
        return weights * weights.sum(-1, keepdim=True) + weights.exp().var(-1, keepdim=True)
