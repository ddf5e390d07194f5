"""The objects that make up an ``Amp``, built in one place."""

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tritonamp.casts.context import EnabledContext
from tritonamp.casts.enabled_models import EnabledModels
from tritonamp.casts.healing import Healing
from tritonamp.casts.model import all_fp32_modules
from tritonamp.casts.past_errors import PastErrors
from tritonamp.casts.past_forward import FirstLoss
from tritonamp.class_swap import base_class, install
from tritonamp.diagnosis.clipping import ClippedGradients
from tritonamp.diagnosis.kept_buffers import KeptBuffers
from tritonamp.diagnosis.live_faults import LiveFaults
from tritonamp.diagnosis.log import StepLog
from tritonamp.diagnosis.mismatch_log import MismatchLog
from tritonamp.diagnosis.observer import StepObserver
from tritonamp.diagnosis.replays import Replays
from tritonamp.diagnosis.response import Response
from tritonamp.diagnosis.scaled_gradients import ScaledGradients
from tritonamp.diagnosis.skips import Writer
from tritonamp.diagnosis.unseen_writes import UnseenWrites
from tritonamp.distributed.fsdp import assumed_policies
from tritonamp.distributed.ranks import Ranks, Resumable
from tritonamp.distributed.replay_ranks import ReplayRanks
from tritonamp.fp32_values import Fp32Values
from tritonamp.kernels._shards import to_local
from tritonamp.kernels._state_formats import FORMATS
from tritonamp.kernels.device import Backend
from tritonamp.names import parameter_names, tensor_names
from tritonamp.policy import HALF_DTYPES, Policy
from tritonamp.scaler import GradScaler
from tritonamp.step.after_step import AfterStep
from tritonamp.step.decision_log import DecisionLog
from tritonamp.step.enabled_optimizer import EnabledOptimizer
from tritonamp.step.forwards import Forwards, note_scaled
from tritonamp.step.master_weights import MasterWeights
from tritonamp.step.offload import Offload, check_offload
from tritonamp.step.packed_masters import check_masters, masters_form
from tritonamp.step.pending import PendingDecisions
from tritonamp.step.rules import check_differentiable, decay_of, least_eps, rule_of, vanishing_eps
from tritonamp.step.schedulers import SchedulerSteps
from tritonamp.step.sleep import Sleep
from tritonamp.step.small_state import check_state, state_format
from tritonamp.step.state_loading import check_codes, widen_masters, widen_state
from tritonamp.step.stepper import Stepper
from tritonamp.watched.forwards import Spectator

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
        around_step: function that returns a context manager for each step of an optimizer, or None.
    """

    models: list[nn.Module]
    given: Sequence[nn.Module]
    optimizers: list[Optimizer]
    policy: Policy
    backend: Backend
    scaler: GradScaler
    device: torch.device
    around_step: Callable[[Optimizer], AbstractContextManager[Any]] | None


class Parts:
    """The objects of one ``Amp`` that work together.

    To make a ``Parts`` enables the models and optimizers.

    Args:
        request: arguments of ``enable``.
        step_state: state, apart from parameters, that a rank takes over from another rank.

    Attributes:
        models: enabled models.
        optimizers: enabled optimizers.
        backend: chosen backend.
        fp32_values: FP32 values of the models' half tensors.
        asleep: record of the tensors that are away from the device.
        context: settings that forwards of the models' modules read.
        ranks: processes that train together.
        enabled_models: dtypes and classes of the models.
        weights: optimizer to its master weights.
        healing: modules that compute in FP32 since a fault.
        forwards: last forwards, recorded for a replay.
        buffers: copies of buffers, to restore after a skip those that became inf or NaN.
        live_faults: watch of whole steps, after a fault that is outside of the models.
        decisions: log of all decisions.
        log: history of all steps, with the causes of skips.
        mismatches: last mismatches that the loop has logged.
        response: reporter of skips, which carries out ``on_nonfinite``.
        replays: runner that runs batches again.
        pending: decisions that optimizers wait for.
        stepper: stepper that carries out the decisions.
        schedulers: learning-rate schedulers, stepped only for steps that were taken.
        sleep: mover of the training tensors to host memory.
        first_loss: check that a forward of the models has computed the first loss.
        past_errors: hint for the error of a half layer that is called by itself.
        scaled_gradients: detector of torch functions that get gradients with a loss scale.
    """

    def __init__(self, request: Request, step_state: Resumable) -> None:
        _check_steps(request)  # before anything is changed
        policy, optimizers = request.policy, request.optimizers
        self.models = request.models
        self.optimizers = optimizers
        self.backend = request.backend
        offloads = policy.offload is not None and len(optimizers) > 0
        offload = Offload(request.device) if offloads else None
        self.fp32_values = Fp32Values(offload)
        self.asleep = self.fp32_values.asleep
        modules = list(dict.fromkeys([*request.models, *request.given]))
        self.ranks = Ranks(modules, self.fp32_values, step_state)
        self.forwards = Forwards(gradients=policy.on_nonfinite != "skip")
        if self.forwards.follows_losses:
            request.scaler.before_backward = partial(note_scaled, weakref.ref(self.forwards))
        self.buffers = KeptBuffers(lambda: tensor_names(self.models))
        self.live_faults = LiveFaults(
            self.models, request.scaler, can_watch=self.ranks.sharding is None
        )
        self.context = EnabledContext(
            policy,
            request.backend.requested,
            request.device.type,
            self.fp32_values,
            # without an optimizer no decision would ever let go of the batches
            spectators=self._spectators(policy) if optimizers else (self.ranks,),
            gathered=self.ranks.gathered,
        )
        self.enabled_models, self.weights = _enable_models(request, self.context, self.ranks)
        dtypes = self.enabled_models.dtypes
        self.healing = Healing(self.models, policy, self.context, dtypes, self.ranks.rebuild)
        self.first_loss = FirstLoss(self.models, watches=self.context.autocast)
        self.past_errors = PastErrors(self.models, policy)
        self._add_diagnosis(policy)
        self._add_step(request, offload)

    def _spectators(self, policy: Policy) -> tuple[Spectator, ...]:
        if policy.on_nonfinite in ("explain", "heal"):
            return self.ranks, self.forwards, self.buffers, self.live_faults
        return self.ranks, self.forwards

    def _add_diagnosis(self, policy: Policy) -> None:
        names, together = _Names(self.models, self.weights), ReplayRanks(self.ranks)
        self.decisions = DecisionLog(names.parameters)
        log_skips = policy.on_nonfinite == "skip"
        computes_half = policy.op_policy or policy.cast_model or policy.half_parameters
        dtype = policy.dtype if computes_half else torch.float32
        self.log = StepLog(self.decisions, names, dtype, log_skips)
        self.mismatches = MismatchLog(lambda: self.decisions.device_record.counts)
        forwards, healing = self.forwards, self.healing
        self.replays = Replays(self.models, policy, self.log, forwards, healing, together)
        self.response = Response(
            policy,
            self.log,
            healing,
            forwards,
            self.replays,
            together,
            self.buffers,
            self.live_faults,
        )

    def _add_step(self, request: Request, offload: Offload | None) -> None:
        policy, backend, scaler = request.policy, request.backend.requested, request.scaler
        weights, ranks = self.weights, self.ranks
        self.pending = PendingDecisions(
            policy, backend, scaler, weights, ranks, self.decisions, self.forwards
        )
        self.scaled_gradients = ScaledGradients(
            partial(_scaled_params, policy, self.pending, weights),
            partial(_params_without_optimizer, policy, self.models, weights),
            partial(_half_params, self.models),
            partial(_used_params, policy, self.decisions, self.pending, weights),
        )
        self.log.clips = lambda: self.scaled_gradients.has_clipped
        names = _Names(self.models, weights).tensors
        clipped = ClippedGradients(names, self.scaled_gradients)
        self.decisions.observer = StepObserver(self.log, UnseenWrites(names), clipped)
        self.stepper = Stepper(
            policy,
            backend,
            scaler,
            self.pending,
            self.response,
            self.asleep,
            offload,
            request.around_step,
            AfterStep(self.fp32_values),
        )
        self.schedulers = SchedulerSteps(self.stepper.outcomes, self.decisions, ranks)
        self.sleep = Sleep(self.models, self.stepper)
        for optimizer in self.optimizers:
            install(optimizer, EnabledOptimizer, self.stepper)


def _check_steps(request: Request) -> None:
    """Raise ValueError if an optimizer cannot keep state and masters as the policy asks."""
    for optimizer in request.optimizers:
        rule, state = rule_of(optimizer), state_format(optimizer, request.policy.state)
        masters, offload = masters_form(optimizer, request.policy), request.policy.offload
        check_differentiable(optimizer, state, masters, offload)
        check_state(state, optimizer, rule)
        if FORMATS[state].in_blocks and not request.policy.trains_fp32_values:
            raise ValueError(
                f"state={state!r}: expected a level with FP32 values, got a level without, and an "
                f"optimizer ({type(optimizer).__name__}) that was built with state={state!r}: use "
                "level='O2', or build it with state='bf16'"
            )
        check_masters(masters, state, optimizer, rule)
        check_codes(optimizer, rule)
        if offload is not None:
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
    kept = all_fp32_modules(request.models, policy)
    assumed = assumed_policies(request.models, kept, policy)
    enabled_models = EnabledModels(request.models, context, set(stepped), gathered=ranks.gathered)
    ranks.assume(assumed)
    if enabled_models.dtypes.has_changed:
        ranks.rebuild()
    weights = {}
    for optimizer in optimizers:
        if policy.trains_fp32_values:
            # frozen parameters, too, if the cast has made them FP32
            wide = [p for p in came_half if p.requires_grad or p.dtype is torch.float32]
            if widen_state(optimizer, wide):
                logger.warning(_ROUNDED_STATE, type(optimizer).__name__)
        w = MasterWeights(optimizer, context.fp32_values, policy, ranks.sharding)
        w.masters.load_master_params()
        weights[optimizer] = w
    return enabled_models, weights


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
        names = self.parameters()
        return {
            names[param]: Writer(
                base_class(type(optimizer)).__name__,
                float(group["lr"]) if "lr" in group else None,
                master.dtype,
                vanishing_eps(optimizer, group, master.dtype),
                least_eps(optimizer, master.dtype),
                decay_of(optimizer, group),
                None if master is param else to_local(master),
                optimizer,
                master,
            )
            for optimizer, w in self.weights.items()
            for param, master, group in w.masters.with_groups()
            if param in names
        }


def _used_params(
    policy: Policy, decisions: DecisionLog, pending: PendingDecisions, weights: Weights
) -> Iterator[Tensor]:
    """Yield parameters and masters whose gradients are from before the last step."""
    # without a scale a plain backward is right, and leaves no note of new gradients
    if not policy.scales_loss or decisions.rule is None:
        return
    fed = pending.fed_optimizers()
    for optimizer, w in weights.items():
        if optimizer in fed:
            continue
        for param, master, _ in w.masters.with_groups():
            if param.grad is not None:
                yield from (param, master)


def _scaled_params(policy: Policy, pending: PendingDecisions, weights: Weights) -> Iterator[Tensor]:
    """Yield the parameters whose gradients carry the loss scale at present, and their masters."""
    if not policy.scales_loss:
        return
    for optimizer in pending.fed_optimizers():
        if weights[optimizer].has_true_gradients:
            continue
        for param, master, _ in weights[optimizer].masters.with_groups():
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
