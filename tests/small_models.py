"""Models for tests, small, and of more kinds of parameters and buffers than `helpers.Net` has."""

from typing import Any

import torch
from torch import Tensor, nn


class Tied(nn.Module):
    """A tied weight, a frozen layer, a norm with statistics, and buffers that levels may halve."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12, bias)
        self.norm = nn.BatchNorm1d(12)
        self.frozen = nn.Linear(12, 6).requires_grad_(False)
        self.tied = nn.Linear(6, 12, bias)
        self.tied.weight = self.first.weight
        self.last = nn.Linear(12, 3, bias)
        self.register_buffer("third", torch.full((6,), 1 / 3))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        super()._apply(*args, **kwargs)
        self.tied.weight = self.first.weight  # a move to a GPU in software unties them
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.frozen(self.norm(self.first(x))) + self.third)
        return self.last(torch.relu(self.tied(y))).float()
