"""``enable``: checks, and then the handle."""

import inspect
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tritonamp.casts.batch_invariance import log_notes
from tritonamp.casts.dispatch import check_autocast
from tritonamp.casts.loaded import (
    bfloat16_in_float16,
    check_half_dtypes,
    check_own_memory,
    check_range,
    half_parameters,
    loaded_dtype,
)
from tritonamp.casts.selection import own_policies
from tritonamp.casts.sharing import check_shared_tensors
from tritonamp.checks import (
    check_cast_inputs,
    check_gradients,
    check_models,
    check_optimizers,
    check_rows,
    check_scaler,
    check_sharding,
    warn_of_zero_eps,
)
from tritonamp.kernels.device import check_dtype, choose_backend, warn_of_known_fault
from tritonamp.policy import LEVELS, Policy, check_field_names, resolve
from tritonamp.runtime.amp import Amp, as_list
from tritonamp.runtime.misplaced import check_places
from tritonamp.runtime.parts import Request
from tritonamp.scaler import GradScaler

logger = logging.getLogger("tritonamp")


def enable(
    model: nn.Module | Iterable[nn.Module],
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    level: str | Policy | None = None,
    *,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    scaler: GradScaler | None = None,
    policy: Policy | None = None,
    around_step: Callable[[Optimizer], AbstractContextManager[Any]] | None = None,
    **policy_fields: Any,
) -> Amp:
    """Turn on mixed precision for a model and its optimizer, in place.

    Args:
        model: a module, already on its device, or a list of modules. Parameters may have any dtype:
            half parameters that require gradients get FP32 values; frozen half parameters and
            quantised ones stay as they are.
        optimizer: any torch.optim optimizer over the model's parameters, or a list of optimizers;
            None for inference.
        level: "O0" for FP32, "O1" for casts per operation, "O2" for half weights with FP32 masters,
            "O3" for pure half, or a Policy. None: ``policy``, or "O1".
        dtype: torch.float16 or torch.bfloat16. None: the half dtype of the model's parameters, if
            the device computes in it, else torch.float16.
        backend: "auto", "triton" or "eager".
        scaler: a tritonamp.GradScaler with settings of your own; the loss scale is dynamic then.
        policy: a Policy; the same as a Policy given as ``level``.
        around_step: function that returns a context manager for an optimizer, or None. Each step
            of the optimizer runs inside that context, which is entered before the decision. For
            libraries that adapt tritonamp.
        **policy_fields: fields of Policy that differ from the level's.

    Returns:
        the handle with ``backward``, ``clip_grad_norm_``, ``stats``, ``disable``...

    Raises:
        ValueError: arguments contradict one another or the model; the message names them, and
            nothing was changed.
        UnsupportedDeviceError: the device does not support an explicit request.
    """
    given, of_models = as_list(model), [] if optimizer is None else as_list(optimizer)
    check_places(given, of_models)
    check_field_names(policy_fields, inspect.signature(enable).parameters)
    if policy is not None and level is not None:
        raise ValueError(
            f"expected a level or a policy, got both level={level!r} and policy: a policy takes "
            "the place of the level, drop one"
        )
    if scaler is not None:
        check_scaler(scaler, policy_fields)
        policy_fields["loss_scale"] = "dynamic"
    if level is None:
        level = "O1" if policy is None else policy
    # from here to Amp(...) nothing is changed, so that a refusal leaves the model as it was
    models = check_models(given)
    device = next((p.device for m in models for p in m.parameters()), torch.device("cpu"))
    half = half_parameters(models)
    if dtype is None and isinstance(level, str) and level in LEVELS:
        dtype = loaded_dtype(half, device)
    resolved = resolve(level, dtype, **policy_fields)
    optimizers = check_optimizers(of_models, models)
    check_sharding(models, resolved, optimizers)
    check_gradients(given, resolved)
    check_dtype(resolved.dtype, device)
    if resolved.cast_model or resolved.op_policy:
        warn_of_known_fault(device)
    if resolved.op_policy:
        check_autocast(device)
    chosen = choose_backend(backend, device)
    if resolved.batch_invariant:
        check_rows(device, chosen)
    own_policies(models, resolved)  # raises for names that match nothing
    check_shared_tensors(models, resolved, optimizers)
    check_cast_inputs(models, resolved)
    check_half_dtypes(half, resolved)
    check_own_memory(half, resolved)
    check_range(bfloat16_in_float16(half, resolved))
    warn_of_zero_eps(optimizers, resolved)
    log_notes(resolved)
    logger.info("backend %s for %s: %s", chosen.name, device, chosen.reason)
    scaler = scaler or scaler_for(resolved, device)
    with torch.inference_mode(False):  # else the masters were inference tensors, and not trained
        return Amp(
            Request(models, given, optimizers, resolved, chosen, scaler, device, around_step)
        )


def scaler_for(policy: Policy, device: torch.device) -> GradScaler:
    """Return a new scaler with the loss scale of a policy."""
    if policy.loss_scale == "dynamic":
        return GradScaler(device.type, init_scale=policy.init_scale)
    fixed = float(policy.loss_scale)
    return GradScaler(device.type, init_scale=fixed, min_scale=fixed, max_scale=fixed)
