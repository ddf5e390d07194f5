"""A mode that keeps the places of all ops, and a model for it."""

import sys
from typing import Any

from torch import Tensor, nn

from tritonamp.watched.ops import OpCall
from tritonamp.watched.places import Place, PlacedOps


class Seen(PlacedOps):
    def __init__(self, model: nn.Module) -> None:
        super().__init__({module: name for name, module in model.named_modules()})
        self.ops: list[tuple[str, Place, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = OpCall(func, args, kwargs or {})
        self.ops.append((call.schema.name, self.place(call.schema.name), self.in_backward()))
        return call.run()

    def of(self, op: str) -> list[tuple[Place, bool]]:
        return [(place, backward) for name, place, backward in self.ops if name == op]


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Tanh()
        self.line = 0

    def forward(self, x: Tensor) -> Tensor:
        self.line = sys._getframe().f_lineno + 1
        return self.inner(x.exp())
