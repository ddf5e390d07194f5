"""The fused rule of Lion."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from tritonamp.kernels import lion as _lion
from tritonamp.kernels._update_lists import UpdateLists
from tritonamp.kernels.lion_8bit import lion_8bit
from tritonamp.policy import STATES
from tritonamp.step.fused import FusedRule, scalar


class FusedLionRule(FusedRule):
    """The rule of ``tritonamp.optim.Lion``."""

    kinds = "a Lion"
    needs = ("lr", "betas", "weight_decay")
    states = STATES
    state_keys: ClassVar[Mapping[str, str]] = {"exp_avgs": "exp_avg"}

    def update(
        self,
        lists: UpdateLists,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        backend: str,
    ) -> None:
        step = lion_8bit if lists.state == "8bit" else _lion.lion
        step(lists, grad_scale, found_inf, backend)

    def hyperparameters(self, optimizer: Optimizer, group: dict[str, Any]) -> _lion.LionRule:
        beta1, beta2 = map(scalar, group["betas"])
        return _lion.LionRule(
            scalar(group["lr"]), beta1, beta2, group["weight_decay"], group["maximize"]
        )

    def refuse_sparse(self) -> None:
        """Raise a RuntimeError, because a step moves the moment of every element."""
        raise RuntimeError("Lion does not support sparse gradients")


LION = FusedLionRule()
