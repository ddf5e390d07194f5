"""SGD as a fused rule."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from tritonamp.kernels import sgd as _sgd
from tritonamp.step.fused import missing_keys, scalar


class SGDRule:
    """``torch.optim.SGD``; a ``FusedRule``."""

    torch_step = staticmethod(inspect.unwrap(torch.optim.SGD.step))
    kinds = "an SGD"
    state_keys = {"momentum_buffers": "momentum_buffer"}
    optional = _sgd.OPTIONAL
    counts_steps = False
    fresh = _sgd.NO_MOMENTUM_YET
    leaves_sparse_to_torch = True
    update = staticmethod(_sgd.sgd)

    def has(self, name: str, group: dict[str, Any]) -> bool:
        """Tell whether the group's parameters have a momentum buffer."""
        return bool(group["momentum"] != 0)

    def hyperparameters(self, optimizer: Optimizer, group: dict[str, Any]) -> _sgd.SGDRule:
        """Return those of one group."""
        return _sgd.SGDRule(
            scalar(group["lr"]),
            group["momentum"],
            group["dampening"],
            group["weight_decay"],
            group["nesterov"],
            group["maximize"],
        )

    def group_problems(self, groups: Any, defaults: dict[str, Any]) -> Iterator[str]:
        """Yield what is wrong with the parameter groups of a state that is to be loaded."""
        yield from missing_keys(groups, ("lr", "momentum", "dampening", "weight_decay"))

    def refuse_sparse(self) -> None:
        """Return: sparse gradients are made dense, or left to torch's own step."""


SGD = SGDRule()
