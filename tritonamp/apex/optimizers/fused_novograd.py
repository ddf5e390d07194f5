"""FusedNovoGrad."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.apex import amp_C
from tritonamp.apex.multi_tensor_apply import multi_tensor_applier
from tritonamp.apex.optimizers._wide import Group, WideOptimizer, count_step, grads_of


class FusedNovoGrad(WideOptimizer):
    """NovoGrad (https://arxiv.org/abs/1905.11286) in FP32 arithmetic.

    The second moment is one number per parameter, the running norm of its gradient. Takes the
    arguments of ``tritonamp.apex.optimizers``.

    Args:
        reg_inside_moment: whether to normalise and decay inside the first moment.
        norm_type: 2, or 0 for the largest absolute value.
        init_zero: whether the running norm starts from 0 instead of the first gradient's norm.

    Raises:
        RuntimeError: another ``norm_type``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(locals())
        if norm_type not in (0, 2):
            raise RuntimeError(
                f"FusedNovoGrad: norm_type: expected 2 or 0 (largest value), got {norm_type!r}"
            )

    def _update(self, groups: Sequence[tuple[Group, list[Tensor]]]) -> None:
        for group, params in groups:
            grads = grads_of(params)
            norms = torch.stack(self._grad_norms(group, params))
            multi_tensor_applier(
                amp_C.multi_tensor_novograd,
                None,
                [grads, params, self._states("exp_avg", params)],
                norms,
                group["lr"],
                *group["betas"],
                group["eps"],
                count_step(group),
                int(group["bias_correction"]),
                group["weight_decay"],
                int(group["grad_averaging"]),
                int(not group["reg_inside_moment"]),
                group["norm_type"],
            )
            for param, norm in zip(params, norms.unbind(), strict=True):
                self.state[param]["exp_avg_sq"] = norm.clone()

    def _grad_norms(self, group: Group, params: Sequence[Tensor]) -> list[Tensor]:
        """Return each gradient's running norm before this step; apex calls it ``exp_avg_sq``."""
        order = 2 if group["norm_type"] == 2 else float("inf")
        for param in params:
            if "exp_avg_sq" not in self.state[param]:
                assert param.grad is not None
                dtype = torch.promote_types(param.grad.dtype, torch.float32)
                first = torch.linalg.vector_norm(param.grad, order, dtype=dtype)
                self.state[param]["exp_avg_sq"] = (
                    torch.zeros_like(first) if group["init_zero"] else first
                )
        return [self.state[param]["exp_avg_sq"] for param in params]
