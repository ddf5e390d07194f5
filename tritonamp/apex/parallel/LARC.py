"""LARC, in the module where apex has it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class LARC(Optimizer):
    """Layer-wise adaptive rates (https://arxiv.org/abs/1708.03888) around any optimizer.

    ``step`` adds the optimizer's weight decay to each gradient, and multiplies the gradient by
    ``trust_coefficient * |p| / (|grad| + weight_decay * |p| + eps)``. State, groups and checkpoints
    are those of the wrapped optimizer. Pass the LARC to ``amp.initialize``.

    Args:
        optimizer: the optimizer that takes the steps.
        trust_coefficient: factor of the local rate.
        clip: whether the group's ``lr`` bounds the local rate; with False the local rate multiplies
            ``lr``.
        eps: summand in the denominator.
    """

    # whatever the wrapped optimizer does: its step is not the first here
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:  # not Optimizer's: it has no parameters of its own
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # not there yet, while a copy is being built
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __repr__(self) -> str:
        return repr(self.optim)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    def state_dict(self) -> Any:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step with local rates.

        Args:
            closure: function that evaluates the model again and returns the loss; called once.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [group.get("weight_decay") for group in self.param_groups]
        try:
            for group in self.param_groups:
                self._adapt([p for p in group["params"] if p.grad is not None], group)
                if "weight_decay" in group:
                    group["weight_decay"] = 0
            self.optim.step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if decay is not None:
                    group["weight_decay"] = decay
        return loss

    @torch.no_grad()
    def _adapt(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Put weight decay and local rates into the gradients; not where a norm is 0."""
        if not params:
            return
        grads = [p.grad for p in params if p.grad is not None]
        decay = group.get("weight_decay", 0)
        norm, grad_norm = (
            torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))
            for tensors in (params, grads)
        )
        rate = self.trust_coefficient * norm / (grad_norm + norm * decay + self.eps)
        if self.clip:
            rate = (rate / group["lr"]).clamp(max=1)
        adapts = (norm != 0) & (grad_norm != 0)
        if decay != 0:
            torch._foreach_add_(
                grads, torch._foreach_mul(params, torch.where(adapts, decay, 0.0).unbind())
            )
        torch._foreach_mul_(grads, torch.where(adapts, rate, 1.0).unbind())
