"""A planted fault: code with a mistake, and the report and the remedy that are right for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, SAMPLES, OUTPUTS = 16, 6, 4


class Net(nn.Module):
    """A block between two layers. Most blocks are one function with one mistake."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.block = block
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.stem(x)))


class Plain(nn.Module):
    """A block without a mistake, for faults of the data, the loss and the optimizer."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Loss:
    """A loss outside of the model. A subclass may have a mistake, and ``told`` without it."""

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(output, y)


@dataclass(frozen=True)
class Planted:
    """A fault, its report and its remedy.

    Attributes:
        name: the fault in words.
        block: maker of the module with the mistake, ``block`` of a `Net`. Its method ``told`` is
            its forward with the advice followed.
        remedy: regular expression that the advice has to match.
        op: ops that may be named; empty: there is no report about an op, and the cause decides.
        line: part of the line of code that the report has to show.
        kind: kinds of fault that may be named.
        cause: cause of the skip; "": no step is skipped.
        module: modules that may be named; None: a place outside of the model.
        says: regular expression that other parts of the text have to match.
        phase: "forward" or "backward".
        loss: maker of the loss. Its method ``told`` is its call with the advice followed.
        data: maker of the batch (x, y); it may spoil the given one.
        optimizer: maker of the optimizer, given parameters.
        spoil: change of the model before it is enabled.
        level: level of ``enable``.
        fields: further arguments of ``enable``.
        by: follows advice that is no text of an argument: "told" takes the methods ``told``;
            "nothing" says that there is nothing to do; a function of `Setup`
            and `Report` returns a `Setup`.
        steps: number of steps before the report.
        replay: whether the report comes from ``amp.explain(replay=...)``. Otherwise it comes from
            the log.
        trains: number of steps in which the repaired training has to reach FP32's loss; 0: the
            batch has to pass.
        net: maker of the model around the block.
    """

    name: str
    block: Callable[[], nn.Module]
    remedy: str
    op: str | tuple[str, ...] = ()
    line: str = ""
    kind: str | tuple[str, ...] = ()
    cause: str | tuple[str, ...] = "forward fault"
    module: str | tuple[str | None, ...] | None = "block"
    says: str = ""
    phase: str = "forward"
    loss: Callable[[], Loss] = Loss
    data: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda x, y: (x, y)
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    spoil: Callable[[nn.Module], object] = lambda model: None
    level: str = "O2"
    fields: Mapping[str, Any] = field(default_factory=dict)
    by: Any = ""
    steps: int = 1
    replay: bool = True
    trains: int = 0
    net: Callable[[nn.Module], nn.Module] = Net
