"""FusedAdam."""

from collections.abc import Iterable
from typing import Any

import torch

from tritonamp import optim
from tritonamp.apex.optimizers._wide import refuse_amsgrad

# a step count that FP32 cannot count beyond, and for which both bias corrections are exactly 1
NO_CORRECTION = 2.0**24


class FusedAdam(optim.Adam):
    """``tritonamp.optim.Adam`` and ``AdamW`` with the arguments of ``tritonamp.apex.optimizers``.

    Half parameters always have FP32 moments and an FP32 master in the state.

    Args:
        capturable: whether ``lr`` becomes a tensor on the device, so that replays of a CUDA graph
            follow a schedule.
        master_weights: accepted and ignored.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        refuse_amsgrad(self, amsgrad, "drop amsgrad, or take tritonamp.optim.AdamW")
        params = list(params)
        if params and not isinstance(params[0], dict):
            params = [{"params": params}]
        own = {"bias_correction": bias_correction, "set_grad_none": set_grad_none}
        super().__init__(
            [{**own, **group} for group in params],
            lr,
            betas,
            eps,
            weight_decay,
            capturable=capturable,
            decoupled_weight_decay=adam_w_mode,
        )
        self.defaults |= own

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients as torch does; the default is ``set_grad_none``."""
        super().zero_grad(self.defaults["set_grad_none"] if set_to_none is None else set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._settle(self.param_groups[-1])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does; also a state of apex's FusedAdam, which counts steps by group."""
        groups = [{**self.defaults, **group} for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})
        for group in self.param_groups:
            self._settle(group)

    def _settle(self, group: dict[str, Any]) -> None:
        if group["capturable"] and group["params"]:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(
                group["params"][0].device, copy=True
            )
        if not group["bias_correction"]:
            for param in group["params"]:
                self.state[param]["step"] = torch.full((), NO_CORRECTION, device=param.device)
