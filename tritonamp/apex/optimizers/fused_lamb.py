"""FusedLAMB."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.apex import amp_C
from tritonamp.apex.multi_tensor_apply import multi_tensor_applier
from tritonamp.apex.optimizers._wide import Group, WideOptimizer, count_step, grads_of


class FusedLAMB(WideOptimizer):
    """LAMB (https://arxiv.org/abs/1904.00962) in FP32 arithmetic.

    Takes the arguments of ``tritonamp.apex.optimizers``.

    Args:
        max_grad_norm: 2-norm to which the gradients of all groups together are clipped.
        use_nvlamb: whether updates have a trust ratio even if ``weight_decay`` is 0.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        super().__init__(locals())

    def _update(self, groups: Sequence[tuple[Group, list[Tensor]]]) -> None:
        if not groups:
            return
        grads = [self._grads(params) for _, params in groups]
        flag = torch.zeros(1, dtype=torch.int32, device=grads[0][0].device)
        everything = [grad for group_grads in grads for grad in group_grads]
        norm, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [everything])
        for (group, params), group_grads in zip(groups, grads, strict=True):
            moments = [self._states(name, params) for name in ("exp_avg", "exp_avg_sq")]
            multi_tensor_applier(
                amp_C.multi_tensor_lamb,
                flag,
                [group_grads, self._targets(params), *moments],
                group["lr"],
                *group["betas"],
                group["eps"],
                count_step(group),
                int(group["bias_correction"]),
                group["weight_decay"],
                int(group["grad_averaging"]),
                int(group["adam_w_mode"]),
                norm,
                self.defaults["max_grad_norm"],
                group["use_nvlamb"],
            )

    def _grads(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the true gradients."""
        return grads_of(params)

    def _targets(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that the step updates."""
        return list(params)
