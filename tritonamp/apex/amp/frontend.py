"""``initialize``, ``scale_loss``, and the state of the loss scalers."""

import contextlib
import functools
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from tritonamp.apex.amp._amp_state import _amp_state, maybe_print, warn_or_err
from tritonamp.apex.amp.functions import init
from tritonamp.apex.amp.levels import resolve
from tritonamp.apex.amp.properties import Properties
from tritonamp.apex.amp.run import AmpRun
from tritonamp.policy import HALF_DTYPES


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    patch_torch_functions_type: torch.dtype | None = None,
) -> Any:
    """Turn on mixed precision for models and optimizers, in place.

    Call it before they are wrapped for parallel training. A second call for a model, with another
    optimizer, first undoes the earlier one.

    Args:
        models: an FP32 module, or a list of such modules.
        optimizers: an optimizer, a list of optimizers, or None.
        enabled: whether to do anything; with False ``scale_loss`` yields the unscaled loss.
        opt_level: "O0" for FP32, "O1" for casts around torch's functions, "O2" for half weights
            with FP32 masters, "O3" for half, "O4" and "O5" for O1 and O2 in bfloat16.
        cast_model_type: dtype of the models instead of the level's; False casts no model.
        patch_torch_functions: whether to cast around torch's functions; None as the level.
        keep_batchnorm_fp32: whether BatchNorms of cast models stay FP32; None as the level.
        master_weights: whether half weights have FP32 masters; None as the level.
        loss_scale: "dynamic" or a number, instead of the level's.
        cast_model_outputs: dtype of floating outputs; None is FP32 for models that are cast.
        num_losses: number of loss_ids, each with its own loss scale.
        verbosity: 0 prints nothing.
        min_loss_scale: lower bound of a dynamic loss scale; None is 2^-24.
        max_loss_scale: upper bound of a dynamic loss scale.
        patch_torch_functions_type: half dtype of the casts around functions, instead of the
            level's.

    Returns:
        ``models``, or ``models`` and ``optimizers``.

    Raises:
        RuntimeError: an unknown level, properties that contradict it, half or wrapped models, or an
            optimizer that is already initialized.
        TypeError: models or optimizers have a wrong type.
        ValueError: ``tritonamp.enable`` refuses an optimizer, such as LBFGS, or one whose
            parameters are not the models'.
    """
    _amp_state.verbosity = verbosity
    _amp_state.opt_properties, _amp_state.loss_scalers = Properties(), []
    if enabled:
        properties = resolve(
            opt_level,
            cast_model_type=cast_model_type,
            patch_torch_functions=patch_torch_functions,
            keep_batchnorm_fp32=keep_batchnorm_fp32,
            master_weights=master_weights,
            loss_scale=loss_scale,
            patch_torch_functions_type=patch_torch_functions_type,
        )
        model_list = _check_models(models)
        optimizer_list = _check_optimizers(optimizers)
        _amp_state.min_loss_scale, _amp_state.max_loss_scale = min_loss_scale, max_loss_scale
        shown = ", ".join(f"{n} {v}" for n, v in properties.options.items() if n != "enabled")
        maybe_print(f"amp: {shown}", rank0=True)
        _start(model_list, optimizer_list, properties, cast_model_outputs, num_losses)
    return models if optimizers is None else (models, optimizers)


def _check_models(models: Any) -> list[nn.Module]:
    if not isinstance(models, (nn.Module, list)):
        raise TypeError(
            f"models: expected a module or a list of modules, got {type(models).__name__}"
        )
    model_list = models if isinstance(models, list) else [models]
    for model in model_list:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise RuntimeError(
                f"models: expected plain modules, got {type(model).__name__}. Parallel wrappers "
                "should only be applied to the model(s) AFTER the model(s) have been returned from "
                "amp.initialize"
            )
    if not _amp_state.allow_incoming_model_not_fp32:
        tensors = (item for m in model_list for item in (*m.named_parameters(), *m.named_buffers()))
        initialized = all(_run_of(m) is not None for m in model_list)
        half = [name for name, tensor in tensors if tensor.dtype in HALF_DTYPES]
        if half and not initialized:
            warn_or_err(
                f"models: expected FP32, got {', '.join(half[:5])} half already. amp.initialize "
                "makes models half itself where opt_level asks for it: leave out model.half()"
            )
    return list(model_list)


def _check_optimizers(optimizers: Any) -> list[Optimizer]:
    if optimizers is None:
        return []
    wanted = [_unwrapped(o) for o in (optimizers if isinstance(optimizers, list) else [optimizers])]
    for optimizer in wanted:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                "optimizers: expected a torch.optim.Optimizer or a list of them, got "
                f"{type(optimizer).__name__}"
            )
        if _run_of(optimizer) is not None:
            raise RuntimeError(
                f"optimizers: this {type(optimizer).__name__} was initialized before. An optimizer "
                "should be passed through amp.initialize only once: build a new one"
            )
    return wanted


def _run_of(owner: Any) -> AmpRun | None:
    return getattr(owner, "_amp_run", None)


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside a wrapper such as LARC."""
    while not isinstance(optimizer, Optimizer) and hasattr(optimizer, "optim"):
        optimizer = optimizer.optim
    return optimizer


def _start(
    models: list[nn.Module],
    optimizers: list[Optimizer],
    properties: Properties,
    cast_model_outputs: torch.dtype | None,
    num_losses: int,
) -> None:
    for earlier in {run for run in map(_run_of, models) if run is not None}:
        earlier.end_for(models)
    bounds = _amp_state.min_loss_scale, _amp_state.max_loss_scale
    policy = properties.policy(keep_outputs=cast_model_outputs is not None)
    run = AmpRun(models, optimizers, policy, bounds, num_losses)
    for model in models:
        if isinstance(properties.cast_model_type, torch.dtype):
            cast = functools.partial(_cast_inputs, properties.cast_model_type)
            run.hooks.append(model.register_forward_pre_hook(cast, with_kwargs=True, prepend=True))
        if cast_model_outputs is not None:
            run.hooks.append(
                model.register_forward_hook(functools.partial(_cast_outputs, cast_model_outputs))
            )
    _amp_state.opt_properties, _amp_state.loss_scalers = properties, run.scalers
    if properties.patch_torch_functions:
        _cast_functions(run, models, properties)


def _cast_functions(run: AmpRun, models: list[nn.Module], properties: Properties) -> None:
    """Cast around torch's functions while a model or optimizer that asked for it lives."""
    before = _amp_state.handle
    handle = init(
        loss_scale=properties.loss_scale,
        verbose=_amp_state.verbosity == 2,
        patch_type=properties.patch_torch_functions_type or torch.float16,
    )
    types = {p.device.type for model in models for p in model.parameters()}
    if types and types != {"cpu"}:
        # computations on the CPU, in addition to those on a GPU, stay FP32
        handle.device_types = frozenset(types)
    run.casts_functions()
    forever = before.is_active() and before.owners is None
    handle.owners = None if forever else weakref.WeakSet(before.owners or ())
    handle._end_with(run)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return value.to(dtype) if _has_to(value) else value


def _has_to(value: Any) -> bool:
    return hasattr(value, "to") and not isinstance(value, (nn.Module, type))


def _cast_inputs(dtype: torch.dtype, model: nn.Module, args: Any, kwargs: Any) -> Any:
    if not any(param.dtype is dtype for param in model.parameters()):
        return args, kwargs  # out of a pickle, which is the plain model's
    return tree_map(functools.partial(_cast, dtype), (args, kwargs), is_leaf=_has_to)


def _cast_outputs(dtype: torch.dtype, model: nn.Module, args: Any, output: Any) -> Any:
    return tree_map(functools.partial(_cast, dtype), output, is_leaf=_has_to)


@contextlib.contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yield the scaled loss, for ``scaled_loss.backward()`` inside the block.

    After the block, gradients of ``amp.master_params(optimizer)`` are unscaled FP32. If they are
    not finite, the next step of all ``optimizers`` is skipped and the loss scale is lowered.

    Args:
        loss: a scalar.
        optimizers: the optimizer or optimizers that this loss feeds.
        loss_id: number of the loss scale.
        model: accepted and ignored.
        delay_unscale: whether gradients keep the scale. A block of the same loss and optimizers
            without this flag must then follow before the step.
        delay_overflow_check: accepted and ignored, because nothing here waits for the device.

    Raises:
        RuntimeError: ``amp.initialize`` was not called, or not with this optimizer.
        IndexError: ``loss_id`` is ``num_losses`` or larger.
    """
    if not hasattr(_amp_state, "opt_properties"):
        raise RuntimeError(
            "amp.scale_loss before amp.initialize: model, optimizer = amp.initialize(model, "
            "optimizer, opt_level=...) must come first"
        )
    if not _amp_state.opt_properties.enabled:
        yield loss
        return
    given = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    wanted = [_unwrapped(optimizer) for optimizer in given]
    runs = {_run_of(optimizer) for optimizer in wanted}
    run = runs.pop() if len(runs) == 1 else None
    if run is None:
        raise RuntimeError(
            "amp.scale_loss: expected optimizers that one amp.initialize has returned, got "
            f"{', '.join(type(o).__name__ for o in given) or 'no optimizer'}"
        )
    with run.scale_loss(loss, wanted, _amp_state.loss_scalers, loss_id, delay_unscale) as scaled:
        yield scaled


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the loss scales of the last ``initialize``.

    The result is like ``{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}``.
    """
    destination = OrderedDict() if destination is None else destination
    for i, scaler in enumerate(_amp_state.loss_scalers):
        destination[f"loss_scaler{i}"] = {
            "loss_scale": scaler.loss_scale(),
            "unskipped": scaler._unskipped,
        }
    return destination


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Load a result of ``state_dict``, in its order.

    States beyond ``num_losses`` are ignored, with a warning.

    Raises:
        RuntimeError: keys are not those of loss scalers; lists them. Nothing was changed.
    """
    unexpected = [key for key in state_dict if "loss_scaler" not in key]
    if unexpected:
        names = ", ".join(f'"{key}"' for key in unexpected)
        raise RuntimeError(
            f"amp.load_state_dict: Unexpected key(s) in state_dict: {names}. Allowed are "
            "loss_scaler0, ..."
        )
    scalers = _amp_state.loss_scalers
    if len(state_dict) != len(scalers):
        message = (
            f"state_dict contains {len(state_dict)} entries, while {len(scalers)} loss_scalers are "
            "used"
        )
        print(f"Warning: {message}")  # where scripts and their logs expect it
        warnings.warn(f"amp.load_state_dict: {message}", stacklevel=2)
    for scaler, state in zip(scalers, state_dict.values(), strict=False):
        scaler._loss_scale = state["loss_scale"]
        scaler._unskipped = state["unskipped"]
