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
