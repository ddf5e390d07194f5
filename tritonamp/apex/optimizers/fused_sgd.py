"""FusedSGD."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.apex.amp_C._lists import store, wide
from tritonamp.apex.amp_C.sgd import sgd_step
from tritonamp.apex.optimizers._wide import Group, WideOptimizer, grads_of


class FusedSGD(WideOptimizer):
    """``torch.optim.SGD`` in FP32 arithmetic, with the same bits on FP32 parameters.

    Takes the arguments of ``tritonamp.apex.optimizers``, and torch's.

    Args:
        wd_after_momentum: whether weight decay is added to the update, not to the gradient.
        materialize_master_grads: accepted and ignored, because the enabled optimizer unscales
            inside its step.

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
        super().__init__(locals())
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if value < 0.0:
                raise ValueError(f"FusedSGD: {name}: expected 0 or more, got {value}")
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError(
                "FusedSGD: nesterov: expected a momentum and no dampening, got "
                f"momentum={momentum}, dampening={dampening}"
            )

    def _update(self, groups: Sequence[tuple[Group, list[Tensor]]]) -> None:
        for group, params in groups:
            is_new = [self.state[p].get("momentum_buffer") is None for p in params]
            for first_run in (True, False):  # as in torch, the first gradient is not dampened
                part = [p for p, new in zip(params, is_new, strict=True) if new is first_run]
                if part:
                    self._step(group, part, first_run)

    def _step(self, group: Group, params: list[Tensor], first_run: bool) -> None:
        """Do the step on those parameters whose momentum has begun, or on those where it begins.

        The momenta of half parameters are half, and step as rounded.
        """
        decay, late = group["weight_decay"], group["wd_after_momentum"]
        states = [self._momentum(p) for p in params] if group["momentum"] != 0 else []
        values, momenta = wide(params), wide(states)
        sgd_step(
            [grad.to(v.dtype) for grad, v in zip(grads_of(params), values, strict=True)],
            values,
            momenta,
            (0.0, decay) if late else (decay, 0.0),
            group["momentum"],
            group["dampening"],
            group["lr"],
            group["nesterov"],
            first_run,
            rounded_to=[p.dtype for p in params],
        )
        store([params, states], [values, momenta])

    def _momentum(self, param: Tensor) -> Tensor:
        """Return the momentum in the parameter's dtype, zeros at first."""
        state = self.state[param]
        before = state.get("momentum_buffer")
        momentum = torch.zeros_like(param) if before is None else before.to(param.dtype)
        state["momentum_buffer"] = momentum
        return momentum
