"""The checks of ``enable``, which run before it changes anything."""

import inspect
import logging
import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from tritonamp.casts.enabled_module import EnabledModule
from tritonamp.casts.inputs import signature_of
from tritonamp.casts.model import all_fp32_modules, refuse_scripted
from tritonamp.distributed.ddp import check_buckets, unwrapped
from tritonamp.distributed.fsdp import fsdp2_modules, mp_policy
from tritonamp.distributed.refused import check_gathered, check_spread
from tritonamp.kernels._shards import is_sharded
from tritonamp.kernels.device import Backend, UnsupportedDeviceError, is_capturing
from tritonamp.names import short
from tritonamp.policy import HALF_DTYPES, Policy
from tritonamp.scaler import GradScaler
from tritonamp.step.rules import zero_eps

logger = logging.getLogger("tritonamp")


def check_models(models: Sequence[Any]) -> list[nn.Module]:
    """Return the modules to enable: the original of a compiled module, the module inside a DDP.

    Raises:
        ValueError: an element is no module, is enabled already, or has no real parameters.
    """
    if not models:
        raise ValueError("model: expected a module or a list of modules, got an empty list")
    found: list[nn.Module] = []
    for model in models:
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"model: expected a torch.nn.Module or a list of them, got {type(model).__name__}"
            )
        original = unwrapped(model)
        if original in found:
            raise ValueError(f"model: {type(original).__name__} is in the list twice")
        _check_model(original)
        found.append(original)
    return found


def _check_model(model: nn.Module) -> None:
    kind = type(model).__name__
    refuse_scripted(model)
    named = list(model.named_modules())
    for name, module in named:
        context = vars(module).get("_tritonamp_context")
        if context is not None and not context.is_copy:
            raise ValueError(f"model: {kind} cannot be enabled, {_enabled_already(module, name)}")
    for front, module in named:
        for name, param in module._parameters.items():
            if param is not None and (is_lazy(param) or param.is_meta):
                full = f"{front}.{name}" if front else name
                raise ValueError(
                    f"model: parameter {full!r} has no values yet (lazy, or on the meta device): "
                    "run a forward in FP32, or load the weights, before tritonamp.enable"
                )


def _enabled_already(module: nn.Module, name: str) -> str:
    """Return why a model with an enabled module cannot be enabled, and what to write.

    Args:
        module: the enabled module.
        name: its name in the model; "" for the model itself.
    """
    where = f"its submodule {name!r}" if name else "it"
    if not isinstance(module, EnabledModule):
        return (
            f"{where} is a part of a model that is enabled already: call disable() on the handle "
            "of that model, or keep using it"
        )
    handle = f"tritonamp.handle({f'model.get_submodule({name!r})' if name else 'model'})"
    return (
        f"{where} is enabled already: keep using its handle, amp = {handle}, or disable it first, "
        f"{handle}.disable()"
    )


def check_optimizers(optimizers: Sequence[Any], models: Sequence[nn.Module]) -> list[Optimizer]:
    """Return the optimizers to enable.

    Raises:
        ValueError: an element is no optimizer, is enabled already, cannot skip a step, or holds
            parameters of another model.
    """
    params = {p for model in models if optimizers for p in model.parameters()}
    for optimizer in optimizers:
        _check_optimizer(optimizer, params)
    if len(set(map(id, optimizers))) != len(optimizers):
        raise ValueError("optimizer: the same optimizer is in the list twice")
    return list(optimizers)


def _check_optimizer(optimizer: Any, params: set[nn.Parameter]) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            "optimizer: expected a torch.optim.Optimizer or a list of them, got "
            f"{type(optimizer).__name__}"
        )
    kind = type(optimizer).__name__
    if hasattr(optimizer, "_stepper"):
        raise ValueError(
            f"optimizer: {kind} is enabled already, with another model: build another optimizer "
            "for this one, or call tritonamp.handle(that_model).disable() first. Models that one "
            "optimizer trains go into one call, tritonamp.enable([model, that_model], optimizer)"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "optimizer: LBFGS calls its closure many times inside one step, so a step cannot "
            "be skipped or unscaled: use a first-order optimizer, or train in plain FP32"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer: the step of this {kind} needs a closure, which a skipped step cannot "
            "run again: enable the optimizer it is built on, or train in plain FP32"
        )
    step = vars(optimizer).get("step")
    # private, how LR schedulers of torch 2.11 to 2.15 mark the step that they put there
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"optimizer: the step of this {kind} was replaced on the instance: "
            "call tritonamp.enable first, then wrap it"
        )
    foreign = [
        f"group {g}, number {i}, shape {tuple(p.shape)}"
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
        if p not in params
    ]
    if foreign:
        raise ValueError(
            f"optimizer: {kind} holds {len(foreign)} parameter(s) that are not the model's "
            f"({'; '.join(foreign[:3])}): build it from model.parameters(), or pass all "
            "modules it trains: enable([model, criterion], optimizer)"
        )


def warn_of_zero_eps(optimizers: Sequence[Optimizer], policy: Policy) -> None:
    """Log which optimizers would divide by an eps that is 0 in the half parameters' dtype."""
    if not policy.cast_model or policy.trains_fp32_values:
        return
    for optimizer in optimizers:
        found = (zero_eps(optimizer, group, policy.dtype) for group in optimizer.param_groups)
        eps = next((eps for eps in found if eps is not None), None)
        if eps is not None:
            logger.warning(
                "%s steps on %s parameters itself, and its eps=%g is 0 there: a small gradient "
                "makes parameters inf or NaN. Give eps=1e-4 or more, or level='O2', which steps in "
                "FP32",
                type(optimizer).__name__,
                short(policy.dtype),
                eps,
            )


def check_scaler(scaler: Any, policy_fields: Mapping[str, Any]) -> None:
    """Check the scaler that the user gave.

    Args:
        scaler: the user's scaler.
        policy_fields: policy fields that differ from the level's.

    Raises:
        ValueError: the scaler is of another kind or disabled, or the loss scale is fixed.
    """
    if not isinstance(scaler, GradScaler):
        kind = f"{type(scaler).__module__}.{type(scaler).__qualname__}"
        raise ValueError(
            f"scaler: expected a tritonamp.GradScaler, which takes the same arguments, got {kind}"
        )
    if not scaler.is_enabled():
        raise ValueError(
            "scaler: expected an enabled GradScaler, got a disabled one: for no loss scaling use "
            "loss_scale=1.0 and no scaler"
        )
    if "init_scale" in policy_fields:
        raise ValueError(
            "expected a scaler or init_scale, got both a scaler and "
            f"init_scale={policy_fields['init_scale']!r}: drop one"
        )
    if policy_fields.get("loss_scale", "dynamic") != "dynamic":
        raise ValueError(
            "expected a scaler or a fixed loss_scale, got both a scaler and "
            f"loss_scale={policy_fields['loss_scale']!r}: drop one"
        )


def check_loss(loss: Any) -> None:
    """Check a loss whose backward is to run.

    Raises:
        ValueError: ``loss`` is no tensor.
        RuntimeError: it has several elements or no graph; in torch's words, with advice.
    """
    if not isinstance(loss, torch.Tensor):
        which = ", such as outputs.loss or outputs['loss']" if hasattr(loss, "keys") else ""
        raise ValueError(
            f"loss: expected a Tensor, got {type(loss).__name__}: give the loss itself{which}"
        )
    if not loss.requires_grad:
        raise RuntimeError(
            "loss: expected a Tensor that was computed from the model's parameters, got one that "
            "does not require grad and does not have a grad_fn: look for torch.no_grad(), "
            ".detach(), .item() or torch.tensor(...) on its way, and for frozen parameters"
        )
    if loss.numel() != 1:
        raise RuntimeError(
            "loss: grad can be implicitly created only for scalar outputs, got a Tensor of shape "
            f"{tuple(loss.shape)}: reduce it, loss.mean(), or give torch a gradient for it, "
            "`with amp.scale_loss(loss) as scaled: scaled.backward(gradient)`"
        )


def check_max_norm(max_norm: Any, *others: Any) -> None:
    """Check the norm to which gradients are clipped; a tensor is accepted unread.

    Args:
        max_norm: the norm.
        *others: further arguments of the call, none of which is accepted.

    Raises:
        ValueError: ``max_norm`` is no number, negative, or NaN; or there are others.
    """
    if isinstance(max_norm, torch.Tensor) and not others:
        return
    is_number = isinstance(max_norm, (float, Real))  # an abstract class takes longer to ask
    if others or not is_number or not float(max_norm) >= 0:
        got = type(max_norm).__name__ if not is_number else repr(max_norm)
        got += f" and {len(others)} more" * bool(others)
        raise ValueError(
            f"max_norm: expected a number of 0 or more, got {got}: amp.clip_grad_norm_(1.0) clips "
            "the gradients of the optimizers that the last losses feed, so it takes no parameters"
        )


def check_flag(flag: Any) -> None:
    """Check the argument of ``amp.veto``; a tensor is not read.

    Raises:
        ValueError: ``flag`` is neither a bool nor a 0-d bool tensor.
    """
    if isinstance(flag, torch.Tensor):
        if flag.dim() == 0 and flag.dtype is torch.bool:
            return
        got = f"a tensor of shape {tuple(flag.shape)} and dtype {flag.dtype}"
    elif isinstance(flag, bool):
        return
    else:
        got = f"{flag!r}, of type {type(flag).__name__}"
    raise ValueError(
        f"flag: expected True, False or a 0-d tensor of dtype torch.bool, got {got}: "
        "amp.veto(norm > 100) compares on the device, amp.veto(flags.any()) combines flags"
    )


def check_replay(replay: Any) -> None:
    """Check the argument of ``amp.explain``.

    Raises:
        ValueError: ``replay`` is neither a bool nor a function.
    """
    if not isinstance(replay, bool) and not callable(replay):
        raise ValueError(
            "replay: expected True, False or a function that computes the loss, got "
            f"{type(replay).__name__}: amp.explain(replay=lambda: criterion(model(x), y))"
        )


def check_changes(
    policy: Policy,
    models: Sequence[nn.Module],
    clear: Any,
    dense_above: Any,
    global_positions: Any,
) -> None:
    """Check a call of ``amp.changes``.

    Raises:
        ValueError: an argument of another kind.
        RuntimeError: the policy does not track changes, or a CUDA graph is captured.
    """
    if not isinstance(clear, bool):
        raise ValueError(
            f"clear: expected True or False, got {clear!r}: a share is given by its name, "
            "amp.changes(dense_above=0.3)"
        )
    is_number = isinstance(dense_above, Real) and not isinstance(dense_above, bool)
    if dense_above is not None and not (is_number and 0 <= dense_above <= 1):
        raise ValueError(
            "dense_above: expected None or a share of a parameter's elements, a number in [0, 1], "
            f"got {dense_above!r}"
        )
    if not isinstance(global_positions, bool):
        raise ValueError(f"global_positions: expected True or False, got {global_positions!r}")
    if not policy.tracks_changes:
        raise RuntimeError(
            "amp.changes(): expected a policy that tracks changes, got one that does not: call "
            "amp.disable(), then tritonamp.enable(..., track_changes=True) at level O2 or O3"
        )
    if any(is_capturing(p.device) for model in models for p in model.parameters()):
        raise RuntimeError(
            "amp.changes(): expected a call outside of a CUDA graph's capture, got one inside, "
            "where the device cannot be read: call it between replays"
        )


def check_pipeline(loss_fn: Any, policy: Policy) -> None:
    """Check the argument of ``amp.pipeline_loss``, and the policy of the stage.

    Raises:
        ValueError: ``loss_fn`` is no function, or the policy would have a stage run batches again.
    """
    if not callable(loss_fn):
        raise ValueError(
            f"loss_fn: expected a function of output and target, got {type(loss_fn).__name__}"
        )
    if policy.on_nonfinite != "skip":
        raise ValueError(
            f"on_nonfinite: expected 'skip' for a stage of a pipeline, got "
            f"{policy.on_nonfinite!r}: running a batch again takes all stages"
        )


def check_cast_inputs(models: Sequence[nn.Module], policy: Policy) -> None:
    """Check the arguments of ``forward`` that are to be cast.

    Raises:
        ValueError: no model's forward takes one of the arguments.
    """
    if isinstance(policy.cast_inputs, bool):
        return
    signatures = {type(model).__name__: signature_of(model.forward) for model in models}
    for argument in policy.cast_inputs:
        if not any(signature.has(argument) for signature in signatures.values()):
            takes = ", ".join(f"{name}.forward{each}" for name, each in signatures.items())
            raise ValueError(
                f"cast_inputs: expected names or positions of arguments of {takes}, got "
                f"{argument!r}"
            )


def check_sharding(
    models: Sequence[nn.Module], policy: Policy, optimizers: Sequence[Optimizer] = ()
) -> None:
    """Refuse parameters that are divided among the ranks in a way that cannot work.

    FSDP, tensor parallelism and ZeroRedundancyOptimizer divide parameters.

    Raises:
        ValueError: FSDP1, parameters that are spread over separate meshes or kept in main memory, a
            policy that cannot be carried out, or a ZeroRedundancyOptimizer of half parameters.
    """
    if policy.cast_model and policy.master_weights:
        _check_sharded_optimizers(optimizers)
    fsdp1 = _class_if_imported("torch.distributed.fsdp", "FullyShardedDataParallel")
    if any(isinstance(m, fsdp1) for model in models for m in model.modules()):
        raise ValueError(
            "model: FullyShardedDataParallel (FSDP1) flattens the parameters, which leaves nothing "
            "to keep masters of: use FSDP2, torch.distributed.fsdp.fully_shard(model, "
            "mp_policy=MixedPrecisionPolicy(...))"
        )
    params: list[Any] = [p for model in models for p in model.parameters()]
    if any(map(is_sharded, params)):
        check_spread(models, policy)
        check_gathered(models, all_fp32_modules(models, policy), policy)


def check_rows(device: torch.device, backend: Backend) -> None:
    """Refuse ``batch_invariant`` on a GPU without kernels.

    Raises:
        UnsupportedDeviceError: the device is a GPU, and the backend is eager torch, whose sums
            depend on the number of rows.
    """
    if device.type != "cpu" and backend.name != "triton":
        raise UnsupportedDeviceError(
            f"batch_invariant=True: expected Triton kernels on {device}, got eager torch "
            f"({backend.reason}), whose sums depend on the number of rows: drop backend='eager' "
            "or batch_invariant"
        )


def check_gradients(models: Sequence[nn.Module], policy: Policy) -> None:
    """Refuse ``grad_dtype`` if DDP or FSDP2 would still reduce gradients in half.

    Args:
        models: models as the caller gave them, DDPs included.
        policy: policy of the models.

    Raises:
        ValueError: such a DDP, or FSDP2 with another ``reduce_dtype``.
    """
    if policy.grad_dtype is None:
        return
    has_half = policy.cast_model or policy.half_parameters
    for module in (m for model in models for m in model.modules()):
        if isinstance(module, DistributedDataParallel) and has_half:
            check_buckets(module)
    for module in (m for model in models for m in fsdp2_modules(model)):
        half = mp_policy(module)
        if half.param_dtype in HALF_DTYPES and half.reduce_dtype is not torch.float32:
            raise ValueError(
                "grad_dtype=torch.float32: expected fully_shard with mp_policy="
                "MixedPrecisionPolicy(..., reduce_dtype=torch.float32), which adds up and reduces "
                f"gradients in FP32, got reduce_dtype={half.reduce_dtype}"
            )


def _check_sharded_optimizers(optimizers: Sequence[Optimizer]) -> None:
    zero = _class_if_imported("torch.distributed.optim", "ZeroRedundancyOptimizer")
    if any(isinstance(optimizer, zero) for optimizer in optimizers):
        raise ValueError(
            "optimizer: ZeroRedundancyOptimizer has divided the parameters among the ranks "
            "already, and would go on stepping on the half ones: use O0 or O1, or O2 under FSDP2, "
            "fully_shard(model), which shards its masters"
        )


def _class_if_imported(module: str, name: str) -> Any:
    """Return a class for isinstance; () before its module is imported, when it has no instances."""
    return getattr(sys.modules.get(module), name, ())
