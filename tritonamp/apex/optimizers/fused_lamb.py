"""FusedLAMB."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.apex import amp_C
from tritonamp.apex.multi_tensor_apply import multi_tensor_applier
from tritonamp.apex.optimizers._wide import Group, WideOptimizer, count_step, grads_of


class FusedLAMB(WideOptimizer):
    """LAMB (https://arxiv.org/abs/1904.00962) with apex's arguments, in FP32 arithmetic.

    Args:
        adam_w_mode: decouples the weight decay, as AdamW does.
        grad_averaging: weighs gradients by ``1 - beta1`` in the first moment.
        set_grad_none: what ``zero_grad()`` does: None, or zeros.
        max_grad_norm: the gradients of all groups together are clipped to this 2-norm.
        use_nvlamb: the trust ratio also where ``weight_decay`` is 0.

    Raises:
        RuntimeError: ``amsgrad``.
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
        if amsgrad:
            raise RuntimeError(
                f"{type(self).__name__} does not support the AMSGrad variant: drop amsgrad"
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb,
        }
        super().__init__(params, defaults, set_grad_none)

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
