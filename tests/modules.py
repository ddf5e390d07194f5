"""Small modules that several tests put into their models."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


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
