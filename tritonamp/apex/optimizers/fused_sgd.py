"""FusedSGD."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.apex.optimizers._wide import Group, WideOptimizer, grads_of


class FusedSGD(WideOptimizer):
    """``torch.optim.SGD`` with apex's arguments, in FP32 arithmetic.

    On FP32 parameters it is the same bit for bit.

    Args:
        wd_after_momentum: adds the weight decay to the update, not to the gradient.
        materialize_master_grads: makes no difference; the enabled optimizer unscales inside its
            step.
        set_grad_none: what ``zero_grad()`` does: None, or zeros.

    Raises:
        ValueError: a negative ``lr``, ``momentum`` or ``weight_decay``; ``nesterov`` with dampening
            or no momentum.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if value < 0.0:
                raise ValueError(f"FusedSGD: {name}: expected 0 or more, got {value}")
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError(
                "FusedSGD: nesterov: expected a momentum and no dampening, got "
                f"momentum={momentum}, dampening={dampening}"
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "wd_after_momentum": wd_after_momentum,
        }
        super().__init__(params, defaults, set_grad_none)

    def _update(self, groups: Sequence[tuple[Group, list[Tensor]]]) -> None:
        for group, params in groups:
            values = [p.detach().to(torch.promote_types(p.dtype, torch.float32)) for p in params]
            grads = [
                grad.to(value.dtype) for grad, value in zip(grads_of(params), values, strict=True)
            ]
            decay, late = group["weight_decay"], group["wd_after_momentum"]
            if decay != 0 and not late:
                grads = list(torch._foreach_add(grads, values, alpha=decay))
            if group["momentum"] != 0:
                momenta = self._momenta(group, params, grads)
                if group["nesterov"]:
                    grads = list(torch._foreach_add(grads, momenta, alpha=group["momentum"]))
                else:
                    grads = momenta
            if decay != 0 and late:
                grads = list(torch._foreach_add(grads, values, alpha=decay))
            torch._foreach_add_(values, grads, alpha=-group["lr"])
            for param, value in zip(params, values, strict=True):
                if param.dtype != value.dtype:
                    param.copy_(value)

    def _momenta(
        self, group: Group, params: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the momenta after this step, as they are stored.

        Those of half parameters are half, and step as rounded.
        """
        for param, grad in zip(params, grads, strict=True):
            state = self.state[param]
            if "momentum_buffer" in state:
                momentum = state["momentum_buffer"].to(grad.dtype)
                momentum = momentum.mul_(group["momentum"]).add_(grad, alpha=1 - group["dampening"])
            else:
                momentum = grad.clone()  # as in torch, the first gradient is not dampened
            state["momentum_buffer"] = momentum.to(param.dtype)
        return [
            self.state[param]["momentum_buffer"].to(grad.dtype)
            for param, grad in zip(params, grads, strict=True)
        ]
