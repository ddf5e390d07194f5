"""FusedAdagrad."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from tritonamp.apex import amp_C
from tritonamp.apex.multi_tensor_apply import multi_tensor_applier
from tritonamp.apex.optimizers._wide import Group, WideOptimizer, grads_of


class FusedAdagrad(WideOptimizer):
    """Adagrad with apex's arguments, in FP32 arithmetic.

    Args:
        adagrad_w_mode: decouples the weight decay, as AdamW does.
        set_grad_none: what ``zero_grad()`` does: None, or zeros.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "eps": eps,
            "weight_decay": weight_decay,
            "adagrad_w_mode": adagrad_w_mode,
        }
        super().__init__(params, defaults, set_grad_none)

    def _update(self, groups: Sequence[tuple[Group, list[Tensor]]]) -> None:
        for group, params in groups:
            multi_tensor_applier(
                amp_C.multi_tensor_adagrad,
                None,
                [grads_of(params), params, self._states("sum", params)],
                group["lr"],
                group["eps"],
                int(group["adagrad_w_mode"]),
                group["weight_decay"],
            )
