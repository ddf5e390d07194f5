"""What ``enable`` refuses, before it changes anything."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from tritonamp.policy import HALF_DTYPES, Policy
from tritonamp.scaler import GradScaler


def check_models(models: Sequence[Any], policy: Policy) -> list[nn.Module]:
    """The modules to enable (of a compiled one the original, of a DDP the module inside it).

    Raises:
        ValueError: not modules, enabled already, half already, or without real parameters.
    """
    if not models:
        raise ValueError("model: got an empty list, allowed is a module or a list of modules")
    found: list[nn.Module] = []
    for model in models:
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"model: got {type(model).__name__}, allowed is a torch.nn.Module or a list of them"
            )
        original = _unwrapped(model)
        if original in found:
            raise ValueError(f"model: {type(original).__name__} is in the list twice")
        _check_model(original, policy)
        found.append(original)
    return found


def _unwrapped(model: nn.Module) -> nn.Module:
    if hasattr(model, "_orig_mod"):  # torch.compile's wrapper
        return _unwrapped(model._orig_mod)  # type: ignore[arg-type]
    return _unwrapped(model.module) if isinstance(model, DistributedDataParallel) else model


def _check_model(model: nn.Module, policy: Policy) -> None:
    kind = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            f"model: {kind} is a ScriptModule, whose class cannot be changed: enable the original module"
        )
    for name, module in model.named_modules():
        if hasattr(module, "_tritonamp"):
            where = f"its submodule {name!r}" if name else "it"
            raise ValueError(
                f"model: {kind} cannot be enabled, {where} is enabled already: call amp.disable() on the first handle, "
                "or keep using it"
            )
    for name, param in model.named_parameters():
        if is_lazy(param) or param.device.type == "meta":
            raise ValueError(
                f"model: parameter {name!r} has no values yet (lazy, or on the meta device): run a forward in FP32, "
                "or load the weights, before tritonamp.enable"
            )
    half = [name for name, p in model.named_parameters() if p.dtype in HALF_DTYPES]
    only_half = policy.cast_model and not policy.master_weights
    if half and not (only_half or policy.half_parameters):
        dtypes = ", ".join(
            sorted({str(p.dtype) for p in model.parameters() if p.dtype in HALF_DTYPES})
        )
        raise ValueError(
            f"model: {kind} has {len(half)} parameter(s) of {dtypes} already ({', '.join(half[:3])}"
            f"{', ...' if len(half) > 3 else ''}): this level starts from FP32 values. Load the model in FP32 (for "
            "example from_pretrained(..., torch_dtype=torch.float32)), or call model.float() before building the "
            "optimizer; tritonamp makes the half copies itself"
        )


def check_optimizers(optimizers: Sequence[Any], models: Sequence[nn.Module]) -> list[Optimizer]:
    """The optimizers to enable.

    Raises:
        ValueError: not optimizers, enabled already, of a kind that cannot skip, or over foreign
            parameters.
    """
    known = {p for model in models for p in model.parameters()}
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"optimizer: got {type(optimizer).__name__}, allowed is a torch.optim.Optimizer or a list of them"
            )
        kind = type(optimizer).__name__
        if hasattr(optimizer, "_stepper"):
            raise ValueError(
                f"optimizer: {kind} is enabled already: call amp.disable() on the first handle"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "optimizer: LBFGS calls its closure many times inside one step, so a step cannot be skipped or "
                "unscaled: use a first-order optimizer, or train in plain FP32"
            )
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"optimizer: the step of this {kind} needs a closure, which a skipped step cannot run again: "
                "enable the optimizer it is built on, or train in plain FP32"
            )
        if "step" in vars(optimizer) and not hasattr(
            vars(optimizer)["step"], "_wrapped_by_lr_sched"
        ):
            raise ValueError(
                f"optimizer: the step of this {kind} was replaced on the instance: "
                "call tritonamp.enable first, then wrap it"
            )
        foreign = [
            f"group {g}, number {i}, shape {tuple(p.shape)}"
            for g, group in enumerate(optimizer.param_groups)
            for i, p in enumerate(group["params"])
            if p not in known
        ]
        if foreign:
            raise ValueError(
                f"optimizer: {kind} holds {len(foreign)} parameter(s) that are not the model's "
                f"({'; '.join(foreign[:3])}): build it from model.parameters(), or pass all modules it trains: "
                "enable([model, criterion], optimizer)"
            )
    if len(set(map(id, optimizers))) != len(optimizers):
        raise ValueError("optimizer: the same optimizer is in the list twice")
    return list(optimizers)


def check_scaler(scaler: Any, policy_fields: Mapping[str, Any]) -> None:
    """Raises ValueError for a scaler of another kind, a disabled one, or one beside a fixed loss
    scale.
    """
    if not isinstance(scaler, GradScaler):
        kind = f"{type(scaler).__module__}.{type(scaler).__qualname__}"
        raise ValueError(
            f"scaler: got {kind}, allowed is a tritonamp.GradScaler (it takes the same arguments)"
        )
    if not scaler.is_enabled():
        raise ValueError(
            "scaler: got a disabled GradScaler; for no loss scaling use loss_scale=1.0 and no scaler"
        )
    if policy_fields.get("loss_scale", "dynamic") != "dynamic":
        raise ValueError(
            f"got both a scaler and loss_scale={policy_fields['loss_scale']!r}: drop one (a fixed scale is loss_scale)"
        )
