"""FP32 arithmetic on parameters of any floating dtype, for the optimizers that are not Adam."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.step.state_loading import load_state, widen_state

Group = dict[str, Any]
_NO_DEFAULTS = {"self", "__class__", "params", "amsgrad", "materialize_master_grads"}


class WideOptimizer(Optimizer):
    """Base of the fused optimizers: FP32 state and arithmetic (FP64 for FP64 parameters).

    Each update is rounded into the parameter. A half parameter that steps here alone has no FP32
    master, as in apex: small updates are lost to rounding. Under ``tritonamp.enable`` and
    ``amp.initialize`` the optimizer steps on FP32 masters.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Take ``locals()`` of a subclass's ``__init__``: all but ``_NO_DEFAULTS`` are defaults."""
        refuse_amsgrad(self, arguments.get("amsgrad", False))
        defaults = {n: value for n, value in arguments.items() if n not in _NO_DEFAULTS}
        super().__init__(arguments["params"], defaults)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients as torch does; the default is ``set_grad_none``."""
        super().zero_grad(self.defaults["set_grad_none"] if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step.

        Args:
            closure: function that evaluates the model again and returns the loss.

        Raises:
            RuntimeError: sparse gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [
            (g, [p for p in g["params"] if p.grad is not None and p.numel()])
            for g in self.param_groups
        ]
        if any(p.grad.is_sparse for _, params in groups for p in params):
            raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
        self._update([(group, params) for group, params in groups if params])
        return loss

    def _update(self, groups: Sequence[tuple[Group, list[Tensor]]]) -> None:
        """Do the step on the parameters that have gradients, by group."""
        raise NotImplementedError

    def _states(self, name: str, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the state ``name`` of each parameter, zeros in its shape at first."""
        for param in params:
            if name not in self.state[param]:
                dtype = torch.promote_types(param.dtype, torch.float32)
                self.state[param][name] = torch.zeros_like(
                    param, dtype=dtype, memory_format=torch.preserve_format
                )
        return [self.state[param][name] for param in params]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but keep the state of half parameters in FP32.

        Raises:
            ValueError: the groups of the state have other sizes. Nothing was changed.
        """
        load_state(self, super().load_state_dict, state_dict, rule=None)
        widen_state(self, [param for group in self.param_groups for param in group["params"]])


def grads_of(params: Sequence[Tensor]) -> list[Tensor]:
    """Their gradients, which all have."""
    return [param.grad for param in params if param.grad is not None]


def refuse_amsgrad(optimizer: Optimizer, amsgrad: bool, advice: str = "drop amsgrad") -> None:
    """Raise RuntimeError where the AMSGrad variant is asked for, which apex has not either."""
    if amsgrad:
        name = type(optimizer).__name__
        raise RuntimeError(f"{name} does not support the AMSGrad variant: {advice}")


def count_step(group: Group) -> int:
    """Count this step and return its number, from 1; apex counts by group."""
    group["step"] = group.get("step", 0) + 1
    return group["step"]
