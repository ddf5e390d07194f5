"""The objects that make up an ``Amp``, built in one place."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tritonamp.casts.context import EnabledContext
from tritonamp.casts.enabled_models import EnabledModels
from tritonamp.casts.healing import Healing
from tritonamp.casts.model import fp32_modules
from tritonamp.casts.past_forward import FirstLoss
from tritonamp.class_swap import install
from tritonamp.diagnosis.batches import Forwards
from tritonamp.diagnosis.clipping import ClippedGradients
from tritonamp.diagnosis.log import StepLog
from tritonamp.diagnosis.replays import Replays
from tritonamp.diagnosis.response import Response
from tritonamp.diagnosis.scaled_gradients import ScaledGradients
from tritonamp.diagnosis.skips import Writer
from tritonamp.diagnosis.unseen_writes import UnseenWrites
from tritonamp.distributed.fsdp import assumed_policies
from tritonamp.distributed.ranks import Ranks, Resumable
from tritonamp.distributed.replay_ranks import ReplayRanks
from tritonamp.distributed.sharding import Sharding
from tritonamp.fp32_values import Fp32Values
from tritonamp.kernels._shards import to_local
from tritonamp.kernels.device import Backend
from tritonamp.names import parameter_names, tensor_names
from tritonamp.policy import HALF_DTYPES, Policy
from tritonamp.scaler import GradScaler
from tritonamp.step.decider import Decider
from tritonamp.step.enabled_optimizer import EnabledOptimizer
from tritonamp.step.master_weights import MasterWeights
from tritonamp.step.offload import Offload, check_offload
from tritonamp.step.pending import PendingDecisions
from tritonamp.step.rules import rule_of
from tritonamp.step.schedulers import SchedulerSteps
from tritonamp.step.sleep import Sleep
from tritonamp.step.small_state import check_state, state_format
from tritonamp.step.state_loading import check_codes, widen_masters, widen_state
from tritonamp.step.stepper import Stepper
from tritonamp.step.writers import writers

logger = logging.getLogger("tritonamp")

Weights = Mapping[Optimizer, MasterWeights]

_ROUNDED_STATE = (
    "the state of this %s was half, and is FP32 from now on. If it was loaded from a file, torch "
    "has rounded it, small squares to 0: load it again after tritonamp.enable"
)


class Request(NamedTuple):
    """The arguments of ``enable``, after all checks.

    Attributes:
        models: models to enable, without the DDPs around them.
        given: models as the caller gave them.
        optimizers: optimizers to enable.
        policy: policy that the level and the policy fields make.
        backend: chosen backend.
        scaler: scaler of ``loss_id`` 0.
        device: device of the models.
        around_step: function that returns a context manager for each step of an optimizer.
    """

    models: list[nn.Module]
    given: Sequence[nn.Module]
    optimizers: list[Optimizer]
    policy: Policy
    backend: Backend
    scaler: GradScaler
    device: torch.device
    around_step: Callable[[Optimizer], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Parts:
    """The objects of one ``Amp`` that work together.

    Attributes:
        models: enabled models.
        optimizers: enabled optimizers.
        backend: chosen backend.
        fp32_values: FP32 values of the models' half tensors.
        context: settings that forwards of the models' modules read.
        ranks: processes that train together.
        enabled_models: dtypes and classes of the models.
        weights: optimizer to its master weights.
        healing: modules that compute in FP32 since a fault.
        forwards: last forwards, recorded for a replay.
        log: log of all steps.
        response: reporter of skips, which carries out ``on_nonfinite``.
        replays: runner that runs batches again.
        pending: decisions that optimizers wait for.
        stepper: stepper that carries out the decisions.
        schedulers: learning-rate schedulers, stepped only for steps that were taken.
        sleep: mover of the training tensors to host memory.
        first_loss: check that a forward of the models has computed the first loss.
        scaled_gradients: detector of torch functions that get gradients with a loss scale.
    """

    models: list[nn.Module]
    optimizers: list[Optimizer]
    backend: Backend
    fp32_values: Fp32Values
    context: EnabledContext
    ranks: Ranks
    enabled_models: EnabledModels
    weights: Weights
    healing: Healing
    forwards: Forwards
    log: StepLog
    response: Response
    replays: Replays
    pending: PendingDecisions
    stepper: Stepper
    schedulers: SchedulerSteps
    sleep: Sleep
    first_loss: FirstLoss
    scaled_gradients: ScaledGradients


def build_parts(request: Request, step_state: Resumable) -> Parts:
    """Enable models and optimizers, and return the objects that work on them from then on.

    Args:
        request: arguments of ``enable``.
        step_state: state, apart from parameters, that a rank takes over from another rank.
    """
    models, policy, backend = request.models, request.policy, request.backend.requested
    _check_steps(request)  # before anything is changed
    offloads = policy.offload is not None and len(request.optimizers) > 0
    offload = Offload(request.device) if offloads else None
    fp32_values = Fp32Values(offload)
    ranks = Ranks(list(dict.fromkeys([*models, *request.given])), fp32_values, step_state)
    forwards = Forwards(gradients=policy.on_nonfinite != "skip")
    context = EnabledContext(
        policy,
        backend,
        request.device.type,
        fp32_values,
        # without an optimizer no decision would ever let go of the batches
        observer=forwards if request.optimizers else None,
        ranks=ranks,
    )
    enabled_models, weights = _enable_models(request, context, ranks)
    healing = Healing(models, policy, context, enabled_models.dtypes, ranks.rebuild)
    log, replays, response = _build_diagnosis(request, weights, healing, forwards, ranks)
    pending = PendingDecisions(policy, backend, request.scaler, weights, ranks)
    scaled_gradients = ScaledGradients(
        partial(_scaled_params, policy, pending, weights),
        partial(_params_without_optimizer, policy, models, weights),
        partial(_half_params, models),
    )
    names = _Names(models, weights).tensors
    looks = UnseenWrites(names), ClippedGradients(names, scaled_gradients)
    decider = Decider(weights, pending, log, forwards, ranks, policy.skip_outliers, *looks)
    stepper = Stepper(
        policy,
        backend,
        request.scaler,
        weights,
        pending,
        decider,
        ranks,
        response,
        fp32_values.asleep,
        offload,
        request.around_step,
    )
    schedulers = SchedulerSteps(stepper.outcomes, log, ranks)
    for optimizer in request.optimizers:
        install(optimizer, EnabledOptimizer, stepper)
    return Parts(
        models=models,
        optimizers=request.optimizers,
        backend=request.backend,
        fp32_values=fp32_values,
        context=context,
        ranks=ranks,
        enabled_models=enabled_models,
        weights=weights,
        healing=healing,
        forwards=forwards,
        log=log,
        response=response,
        replays=replays,
        pending=pending,
        stepper=stepper,
        schedulers=schedulers,
        sleep=Sleep(models, weights, pending, stepper, fp32_values.asleep),
        first_loss=FirstLoss(models, watches=context.autocast),
        scaled_gradients=scaled_gradients,
    )


def _build_diagnosis(
    request: Request,
    weights: Weights,
    healing: Healing,
    forwards: Forwards,
    ranks: Ranks,
) -> tuple[StepLog, Replays, Response]:
    """Return the log of steps, the replays of skipped steps, and the response to a skip."""
    models, policy = request.models, request.policy
    together = ReplayRanks(ranks)
    log = StepLog(_Names(models, weights), policy.dtype, log_skips=policy.on_nonfinite == "skip")
    replays = Replays(models, policy, log, forwards, healing, together)
    return log, replays, Response(policy, log, healing, forwards, replays, together)


def _check_steps(request: Request) -> None:
    """Raise ValueError if an optimizer cannot keep its state as the policy asks."""
    for optimizer in request.optimizers:
        rule = rule_of(optimizer)
        check_state(state_format(optimizer, request.policy.state), optimizer, rule)
        check_codes(optimizer, rule)
        if request.policy.offload is not None:
            check_offload(optimizer, rule, request.device)


def _enable_models(
    request: Request, context: EnabledContext, ranks: Ranks
) -> tuple[EnabledModels, dict[Optimizer, MasterWeights]]:
    """Cast the models, and give the optimizers FP32 values to step on."""
    optimizers, policy = request.optimizers, request.policy
    # asked before the cast, which changes dtypes
    stepped = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    came_half = [p for p in stepped if p.dtype in HALF_DTYPES]
    for optimizer in optimizers:
        widen_masters(optimizer)
    kept = [m for model in request.models for m in fp32_modules(model, policy)]
    assumed = assumed_policies(request.models, kept, policy)
    enabled_models = EnabledModels(request.models, context, set(stepped), gathered=ranks.gathered)
    ranks.assume(assumed)
    if enabled_models.dtypes.has_changed:
        ranks.rebuild()
    weights = {
        o: _master_weights(o, policy, context.fp32_values, came_half, ranks.sharding)
        for o in optimizers
    }
    return enabled_models, weights


def _master_weights(
    optimizer: Optimizer,
    policy: Policy,
    fp32_values: Fp32Values,
    came_half: Sequence[Tensor],
    sharding: Sharding | None,
) -> MasterWeights:
    """Give an optimizer FP32 values to step on, and FP32 state for parameters that came half.

    Args:
        optimizer: the optimizer.
        policy: policy of the ``Amp``.
        fp32_values: FP32 values of the models' half tensors.
        came_half: parameters that were half before ``enable``.
        sharding: how parameters are spread over ranks; None: each rank has whole parameters.
    """
    if policy.trains_fp32_values:
        # frozen parameters, too, if the cast has made them FP32
        wide = [p for p in came_half if p.requires_grad or p.dtype is torch.float32]
        if widen_state(optimizer, wide):
            logger.warning(_ROUNDED_STATE, type(optimizer).__name__)
    weights = MasterWeights(
        optimizer,
        fp32_values,
        policy.trains_fp32_values,
        policy.grad_dtype,
        sharding=sharding,
        packs=state_format(optimizer, policy.state) == "8bit",
        offloads=policy.offload is not None,
    )
    weights.load_master_params()
    return weights


class _Names(NamedTuple):
    """Names for the log, looked up at each call, because models may get other parameters.

    Attributes:
        models: enabled models.
        weights: optimizer to its master weights.
    """

    models: Sequence[nn.Module]
    weights: Weights

    def parameters(self) -> dict[Tensor, str]:
        """Return parameter to full name."""
        return parameter_names(self.models)

    def tensors(self) -> dict[Tensor, str]:
        """Return parameter or buffer to full name; a sharded parameter is this rank's part."""
        return {to_local(tensor): name for tensor, name in tensor_names(self.models).items()}

    def writers(self) -> dict[str, Writer]:
        """Return parameter name to a description of the optimizer that steps on the parameter."""
        return writers(self.weights.values(), self.parameters())


def _scaled_params(policy: Policy, pending: PendingDecisions, weights: Weights) -> Iterator[Tensor]:
    """Yield the parameters whose gradients carry the loss scale at present, and their masters."""
    if not policy.scales_loss:
        return
    for optimizer in pending.fed_optimizers():
        if weights[optimizer].has_true_gradients:
            continue
        for param, master, _ in weights[optimizer].with_groups():
            if param.grad is not None:
                yield from (param, master)


def _params_without_optimizer(
    policy: Policy, models: Sequence[nn.Module], weights: Weights
) -> Iterator[Tensor]:
    """Yield the models' parameters that have gradients and belong to no enabled optimizer."""
    if not policy.scales_loss or not weights:
        return
    held = {param for of_one in weights.values() for param in of_one.parameters()}
    for model in models:
        yield from (p for p in model.parameters() if p.grad is not None and p not in held)


def _half_params(models: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Yield the models' half parameters that require gradients."""
    for model in models:
        yield from (p for p in model.parameters() if p.dtype in HALF_DTYPES and p.requires_grad)
