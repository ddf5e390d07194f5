"""Adam and AdamW with FP32 arithmetic whatever the parameters are stored in."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.kernels.adamw import AdamRule, adamw
from tritonamp.masters import PreciseValues
from tritonamp.policy import HALF_DTYPES

__all__ = ["Adam", "AdamW"]


def adam_step(
    optimizer: Optimizer,
    grads: Mapping[Tensor, Tensor],
    masters: Mapping[Tensor, Tensor],
    copies: Mapping[Tensor, Tensor],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """One step of an Adam or AdamW optimizer, its hyperparameters and state read from and left in torch's format.

    Args:
        optimizer: a torch.optim.Adam or AdamW.
        grads: parameter (as in ``param_groups``) to its gradient; parameters that are missing do not move.
        masters: parameter to the FP32 tensor to update in its place; missing ones are updated themselves.
        copies: parameter to the half tensor that receives its rounded value.
        grad_scale: 0-d factor on the gradients, or None.
        found_inf: 0-d, any value other than 0 skips on the device; None: always step.

    Raises:
        RuntimeError: sparse gradients.
    """
    for group in optimizer.param_groups:
        params = [p for p in group["params"] if p in grads]
        if any(grads[p].is_sparse for p in params):
            raise RuntimeError("Adam does not support sparse gradients, please consider SparseAdam instead")
        states = [_state(optimizer.state[p], p, group["amsgrad"]) for p in params]
        adamw(
            [_real(masters.get(p, p).detach()) for p in params],
            [_real(grads[p].detach()) for p in params],
            [_real(s["exp_avg"]) for s in states],
            [_real(s["exp_avg_sq"]) for s in states],
            [_real(s["max_exp_avg_sq"]) for s in states] if group["amsgrad"] else [],
            [s["step"] for s in states],
            [copies[p].detach() if p in copies else None for p in params],
            AdamRule(
                _scalar(group["lr"]),
                _scalar(group["betas"][0]),
                _scalar(group["betas"][1]),
                group["eps"],
                group["weight_decay"],
                group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)),
                group["amsgrad"],
                group["maximize"],
            ),
            grad_scale,
            found_inf,
        )


def _state(state: dict[str, Any], param: Tensor, amsgrad: bool) -> dict[str, Any]:
    """The state of one parameter in torch's format, made or brought to FP32 moments and a step count on the device."""
    dtype = torch.promote_types(param.dtype, torch.float32)
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
    elif not isinstance(state["step"], Tensor) or state["step"].device != param.device:
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(param.device)
    for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])):
        if name not in state:
            state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        elif state[name].dtype != dtype:
            state[name] = state[name].to(dtype)
    return state


def _scalar(value: Any) -> Any:
    """``value``; a tensor of one element without its dimensions."""
    return value.reshape(()) if isinstance(value, Tensor) else value


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def keep_fp32_state(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Puts back what ``Optimizer.load_state_dict`` has just cast to the dtype of half parameters."""
    numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number, param in zip(numbers, params, strict=True):
        for name, value in state_dict["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.dtype is torch.float32 and param.dtype in HALF_DTYPES:
                optimizer.state[param][name] = value.to(param.device, copy=True)


def settle_state(optimizer: Optimizer) -> None:
    """Puts the step counts of an Adam back where torch keeps them: in main memory, unless fused or capturable."""
    for group in optimizer.param_groups:
        if not group.get("fused") and not group.get("capturable"):
            for param in group["params"]:
                step = optimizer.state.get(param, {}).get("step")
                if isinstance(step, Tensor):
                    optimizer.state[param]["step"] = step.to("cpu")


class _Fp32State:
    """What Adam and AdamW here add to torch's: FP32 masters of half parameters, and skips on the device."""

    _step_supports_amp_scaling = True
    defaults: dict[str, Any]
    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Reads the attributes ``grad_scale`` (the loss scale) and ``found_inf`` where a scaler set them.

        Args:
            closure: re-evaluates the model and returns the loss.

        Raises:
            RuntimeError: sparse gradients.
        """
        if self.defaults["differentiable"]:
            with torch.enable_grad():
                return inspect.unwrap(torch.optim.Adam.step)(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = {p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}
        masters = {p: self._master(p) for p in grads if p.dtype in HALF_DTYPES}
        scale, found_inf = _scalar(getattr(self, "grad_scale", None)), _scalar(getattr(self, "found_inf", None))
        grad_scale = None
        if scale is not None:
            grad_scale = scale.double().reciprocal().float()
            overflow = (~torch.isfinite(grad_scale)).float()  # of a scale that torch's scaler let sink too far
            found_inf = overflow if found_inf is None else torch.maximum(found_inf, overflow)
        adam_step(self, grads, masters, {p: p for p in masters}, grad_scale, found_inf)  # type: ignore[arg-type]
        self._precise.written(list(masters))
        return loss

    @property
    def _precise(self) -> PreciseValues:
        return self.__dict__.setdefault("_precise_values", PreciseValues({}))  # copies and pickles come without it

    def _master(self, param: Tensor) -> Tensor:
        """The FP32 master of a half parameter; it lives in the state, under ``master_param``."""
        state = self.state[param]
        master = state.get("master_param", param.detach())  # half itself if it has been through a torch optimizer
        state["master_param"] = master.float()
        return self._precise.adopt(param, state["master_param"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but FP32 state of half parameters stays FP32."""
        loaded: list[dict[str, Any]] = []  # what the user's own pre-hooks make of it
        handle = self.register_load_state_dict_pre_hook(lambda _, given: loaded.append(given))  # type: ignore[attr-defined]
        try:
            super().load_state_dict(state_dict)  # type: ignore[misc]
        finally:
            handle.remove()
        keep_fp32_state(self, loaded[0])  # type: ignore[arg-type]


class Adam(_Fp32State, torch.optim.Adam):
    """``torch.optim.Adam`` for parameters of any floating dtype: same arguments, same ``state_dict`` format.

    Half parameters get FP32 moments and an FP32 master (``master_param`` in the state); the parameter is the rounded
    master. With a GradScaler the step unscales, and skips where ``found_inf`` is not 0, without a host read. The
    implementation choices ``foreach``, ``fused`` and ``capturable`` are accepted and make no difference.
    """


class AdamW(_Fp32State, torch.optim.AdamW):
    """``torch.optim.AdamW`` for parameters of any floating dtype: same arguments, same ``state_dict`` format.

    Half parameters get FP32 moments and an FP32 master (``master_param`` in the state); the parameter is the rounded
    master. With a GradScaler the step unscales, and skips where ``found_inf`` is not 0, without a host read. The
    implementation choices ``foreach``, ``fused`` and ``capturable`` are accepted and make no difference.
    """
