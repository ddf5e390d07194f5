"""Adam and AdamW as a fused rule."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from tritonamp.kernels import adamw as _adamw
from tritonamp.step.fused import missing_keys, scalar


class AdamRule:
    """``torch.optim.Adam`` and ``AdamW``, which derives from it; a ``FusedRule``."""

    torch_step = staticmethod(inspect.unwrap(torch.optim.Adam.step))
    kinds = "an Adam or AdamW"
    state_keys = {
        "exp_avgs": "exp_avg",
        "exp_avg_sqs": "exp_avg_sq",
        "max_exp_avg_sqs": "max_exp_avg_sq",
    }
    optional = _adamw.OPTIONAL
    counts_steps = True
    fresh = 0.0
    leaves_sparse_to_torch = False
    update = staticmethod(_adamw.adamw)

    def has(self, name: str, group: dict[str, Any]) -> bool:
        """Tell whether the group's parameters have the state of that name."""
        return name != "max_exp_avg_sqs" or bool(group["amsgrad"])

    def hyperparameters(self, optimizer: Optimizer, group: dict[str, Any]) -> _adamw.AdamRule:
        """Return those of one group."""
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

    def group_problems(self, groups: Any, defaults: dict[str, Any]) -> Iterator[str]:
        """Yield what is wrong with the parameter groups of a state that is to be loaded."""
        yield from missing_keys(groups, ("lr", "betas", "eps", "weight_decay"))
        corrected = all(group.get("bias_correction", True) for group in groups)
        if not (corrected or "bias_correction" in defaults):
            yield "bias_correction=False, which is FusedAdam's"

    def refuse_sparse(self) -> None:
        """Raise what torch's Adam raises."""
        raise RuntimeError(
            "Adam does not support sparse gradients, please consider SparseAdam instead"
        )


ADAM = AdamRule()
