"""The fused rule of Lion."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch.optim import Optimizer

from tritonamp.kernels import lion as _lion
from tritonamp.kernels._optimizers import OPTIMIZERS
from tritonamp.kernels._update_lists import UpdateLists
from tritonamp.step.fused_rule import FusedRule, Operation, scalar


class FusedLionRule(FusedRule):
    """The rule of ``tritonamp.optim.Lion``."""

    kinds = "a Lion"
    needs = ("lr", "betas", "weight_decay")
    states = OPTIMIZERS["Lion"].states
    state_keys: ClassVar[Mapping[str, str]] = {"exp_avgs": "exp_avg"}

    def operation(self, lists: UpdateLists) -> Operation:
        return _lion.lion

    def hyperparameters(self, optimizer: Optimizer, group: dict[str, Any]) -> _lion.LionRule:
        beta1, beta2 = map(scalar, group["betas"])
        return _lion.LionRule(
            scalar(group["lr"]), beta1, beta2, group["weight_decay"], group["maximize"]
        )

    def refuse_sparse(self) -> None:
        """Raise a RuntimeError, because a step moves the moment of every element."""
        raise RuntimeError("Lion does not support sparse gradients")


LION = FusedLionRule()
