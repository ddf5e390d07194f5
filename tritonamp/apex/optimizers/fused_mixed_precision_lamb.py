"""FusedMixedPrecisionLamb."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.apex.optimizers._wide import Group
from tritonamp.apex.optimizers.fused_lamb import FusedLAMB
from tritonamp.policy import HALF_DTYPES


class FusedMixedPrecisionLamb(FusedLAMB):
    """``FusedLAMB`` that unscales gradients itself and has an FP32 master of each half parameter.

    The masters are in its state. With a GradScaler the step waits for the device to know whether
    to skip.

    Args:
        step: number of steps taken before.
        reduced_precision_dtype: accepted and ignored; every half parameter has a master.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adam_w_mode,
            grad_averaging,
            max_grad_norm=max_grad_norm,
            use_nvlamb=use_nvlamb,
        )
        for group in self.param_groups:
            group.setdefault("step", step)

    def _update(self, groups: Sequence[tuple[Group, list[Tensor]]]) -> None:
        found_inf = getattr(self, "found_inf", None)  # a GradScaler sets it, and grad_scale
        if found_inf is not None and bool(found_inf):
            return
        super()._update(groups)
        for _, params in groups:
            for param in params:
                if "master_param" in self.state[param]:
                    param.copy_(self.state[param]["master_param"])

    def _grads(self, params: Sequence[Tensor]) -> list[Tensor]:
        grads, grad_scale = super()._grads(params), getattr(self, "grad_scale", None)
        return grads if grad_scale is None else [grad.float() / grad_scale for grad in grads]

    def _targets(self, params: Sequence[Tensor]) -> list[Tensor]:
        return [self._master(p) if p.dtype in HALF_DTYPES else p for p in params]

    def _master(self, param: Tensor) -> Tensor:
        """Return the FP32 master, updated if other code wrote to the parameter."""
        master = self.state[param].get("master_param", param)
        master = torch.where(master.to(param.dtype) == param, master, param).float()
        self.state[param]["master_param"] = master
        return master
