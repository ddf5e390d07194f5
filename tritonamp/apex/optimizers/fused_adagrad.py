"""FusedAdagrad."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from tritonamp.apex import amp_C
from tritonamp.apex.multi_tensor_apply import multi_tensor_applier
from tritonamp.apex.optimizers._wide import Group, WideOptimizer, grads_of


class FusedAdagrad(WideOptimizer):
    """Adagrad in FP32 arithmetic, with the arguments of ``tritonamp.apex.optimizers``.

    Args:
        adagrad_w_mode: whether to decouple the weight decay; False adds it to the gradients.
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
        super().__init__(locals())

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
