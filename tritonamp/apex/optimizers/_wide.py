"""FP32 arithmetic on parameters of any floating dtype, for the optimizers that are not Adam."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Group = dict[str, Any]


class WideOptimizer(Optimizer):
    """Base of the fused optimizers: FP32 state and arithmetic (FP64 for FP64 parameters).

    Parameters are rounded.

    A half parameter that steps here alone has no FP32 master, as in apex: small updates are lost to
    rounding. Under ``tritonamp.enable`` and ``amp.initialize`` the optimizer steps on FP32 masters.
    """

    def __init__(self, params: Iterable[Any], defaults: Group, set_grad_none: bool) -> None:
        super().__init__(params, {**defaults, "set_grad_none": set_grad_none})

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As in torch; by default what ``set_grad_none`` says."""
        super().zero_grad(self.defaults["set_grad_none"] if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step.

        Args:
            closure: re-evaluates the model and returns the loss.

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
        """Load as torch does, but make the state of half parameters FP32, not half."""
        loaded: list[dict[str, Any]] = []  # what the user's own hooks make of it
        with_hook = self.register_load_state_dict_pre_hook(lambda _, given: loaded.append(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            with_hook.remove()
        numbers = [number for group in loaded[0]["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            for name, value in loaded[0]["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    dtype = torch.promote_types(value.dtype, torch.float32)
                    self.state[param][name] = value.to(param.device, dtype, copy=True)


def grads_of(params: Sequence[Tensor]) -> list[Tensor]:
    """Their gradients, which all have."""
    return [param.grad for param in params if param.grad is not None]


def count_step(group: Group) -> int:
    """Count this step and return its number, from 1; apex counts by group."""
    group["step"] = group.get("step", 0) + 1
    return group["step"]
