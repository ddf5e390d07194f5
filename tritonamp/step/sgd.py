"""The fused rule of SGD."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from tritonamp.kernels import sgd as _sgd
from tritonamp.kernels._optimizers import OPTIMIZERS
from tritonamp.kernels._update_lists import UpdateLists
from tritonamp.step.fused_rule import FusedRule, Operation, scalar


class FusedSGDRule(FusedRule):
    """The rule of ``torch.optim.SGD``."""

    kinds = "an SGD"
    torch_step = staticmethod(inspect.unwrap(torch.optim.SGD.step))
    needs = ("lr", "momentum", "dampening", "weight_decay")
    states = OPTIMIZERS["SGD"].states
    state_keys: ClassVar[Mapping[str, str]] = {"momentum_buffers": "momentum_buffer"}
    optional = tuple(_sgd.SGD.optional)
    leaves_sparse_to_torch = True

    def operation(self, lists: UpdateLists) -> Operation:
        return _sgd.sgd

    def hyperparameters(self, optimizer: Optimizer, group: dict[str, Any]) -> _sgd.SGDRule:
        return _sgd.SGDRule(
            scalar(group["lr"]),
            group["momentum"],
            group["dampening"],
            group["weight_decay"],
            group["nesterov"],
            group["maximize"],
        )

    def tells_first_step(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        # torch sets the buffer of a first step to the gradient, undampened. Without dampening that
        # is the same as a step on a buffer of zeros, and no host read is needed to tell the two
        # apart.
        return any(group["momentum"] != 0 and group["dampening"] != 0 for group in groups)

    def at_first_step(self, hyperparameters: Any) -> _sgd.SGDRule:
        # 0 + (1 - 0) * grad is the gradient: the bits of torch's first step
        first: _sgd.SGDRule = hyperparameters._replace(dampening=0.0)
        return first

    def has(self, name: str, group: dict[str, Any]) -> bool:
        return bool(group["momentum"] != 0)


SGD = FusedSGDRule()
