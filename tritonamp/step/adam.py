"""The fused rule of Adam and AdamW."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from tritonamp.kernels import adamw as _adamw
from tritonamp.kernels._optimizers import OPTIMIZERS
from tritonamp.kernels._update_lists import UpdateLists
from tritonamp.step.fused_rule import FusedRule, Operation, scalar


class FusedAdamRule(FusedRule):
    """The rule of ``torch.optim.Adam`` and of ``AdamW``, which derives from Adam."""

    kinds = "an Adam or AdamW"
    torch_step = staticmethod(inspect.unwrap(torch.optim.Adam.step))
    needs = ("lr", "betas", "eps", "weight_decay")
    states = OPTIMIZERS["Adam"].states
    state_keys: ClassVar[Mapping[str, str]] = {
        "exp_avgs": "exp_avg",
        "exp_avg_sqs": "exp_avg_sq",
        "max_exp_avg_sqs": "max_exp_avg_sq",
    }
    optional = tuple(_adamw.ADAMW.optional)
    counts_steps = True

    def operation(self, lists: UpdateLists) -> Operation:
        return _adamw.adamw

    def hyperparameters(self, optimizer: Optimizer, group: dict[str, Any]) -> _adamw.AdamRule:
        decoupled = isinstance(optimizer, torch.optim.AdamW)
        return _adamw.AdamRule(
            scalar(group["lr"]),
            scalar(group["betas"][0]),
            scalar(group["betas"][1]),
            group["eps"],
            group["weight_decay"],
            group.get("decoupled_weight_decay", decoupled),
            group["amsgrad"],
            group["maximize"],
        )

    def has(self, name: str, group: dict[str, Any]) -> bool:
        return name != "max_exp_avg_sqs" or bool(group["amsgrad"])

    def group_problems(
        self, groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield problems of a state's groups, ``bias_correction=False`` of FusedAdam included."""
        yield from super().group_problems(groups, defaults)
        # apex's FusedAdam saves such groups. torch's Adam would load them, and correct the bias
        # from then on: another trajectory without any message.
        corrected = all(group.get("bias_correction", True) for group in groups)
        if not (corrected or "bias_correction" in defaults):
            yield "bias_correction=False, which is FusedAdam's"

    def refuse_sparse(self) -> None:
        """Raise the RuntimeError of torch's Adam."""
        raise RuntimeError(
            "Adam does not support sparse gradients, please consider SparseAdam instead"
        )


ADAM = FusedAdamRule()
