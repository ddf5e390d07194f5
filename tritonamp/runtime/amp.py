"""``Amp``: the handle that ``enable`` returns."""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tritonamp.amp_state import ResumeState, parse_state
from tritonamp.casts import copies, dispatch
from tritonamp.checks import (
    check_changes,
    check_flag,
    check_loss,
    check_max_norm,
    check_pipeline,
    check_replay,
)
from tritonamp.class_swap import uninstall
from tritonamp.diagnosis import scaled_gradients
from tritonamp.diagnosis.fault_counts import FaultCounts
from tritonamp.diagnosis.metrics import metrics
from tritonamp.diagnosis.plot import save_picture, title
from tritonamp.diagnosis.records import RangeRecord, StepRecord
from tritonamp.diagnosis.terminal import fitted, width
from tritonamp.fp32_values import Fp32Values
from tritonamp.functional import Mismatch
from tritonamp.kernels import _implementations
from tritonamp.kernels._dynamo import between_graphs
from tritonamp.kernels._inference import leaves_inference_mode
from tritonamp.names import parameter_names
from tritonamp.policy import Policy
from tritonamp.runtime.parts import Parts, Request
from tritonamp.scaler import GradScaler
from tritonamp.step.after_step import check_function
from tritonamp.step.ema import EMA
from tritonamp.step.stage_loss import stage_loss
from tritonamp.step.state_loading import settle_state
from tritonamp.watched.graph import gradient_leaves, nodes

if TYPE_CHECKING:
    from tritonamp.diagnosis.audit import Audit
    from tritonamp.diagnosis.live_ranges import LiveRanges

T = TypeVar("T")

_ELSEWHERE = {  # by name of a method of torch's GradScaler, or of an optimizer
    "get_scale": 'amp.stats()["scale"]',
    "scale": "amp.backward(loss), or amp.scaler.scale(loss).backward()",
    "step": "optimizer.step()",
    "update": "optimizer.step(), which moves the loss scale, too",
    "zero_grad": "optimizer.zero_grad()",
}


def as_list(value: T | Iterable[T]) -> list[T]:
    """Return one value, or several, as a list."""
    return list(value) if isinstance(value, (list, tuple)) else [value]  # type: ignore[list-item]


class Amp:
    """Mixed precision of some models and optimizers, returned by ``enable``.

    ::

        amp.backward(loss)         # loss.float() * scale, backward
        amp.clip_grad_norm_(1.0)   # optional
        optimizer.step()           # unscale, check, clip, update, half copies; or a skip
        optimizer.zero_grad()

    As a context manager (``with tritonamp.enable(...) as amp:``) the handle disables mixed
    precision at the end of the block, also after an exception.

    Attributes:
        scaler: GradScaler of ``loss_id`` 0, usable as in a ``torch.amp`` loop.
    """

    def __init__(self, request: Request) -> None:
        self.scaler = request.scaler
        self._scalers = {0: request.scaler}
        self._built = Parts(request, _StepState(self))
        dispatch.acquire()
        copies.acquire(self._parts.fp32_values)
        scaled_gradients.acquire(self._parts.scaled_gradients)
        # Called by ``disable``, or when the models are gone without a call of it, because each of
        # their modules holds the context. At exit there is nothing to put back.
        values = weakref.ref(self._parts.fp32_values)
        self._release = weakref.finalize(self._parts.context, _release, values)
        self._release.atexit = False
        self._enabled = True
        self._parts.context.handle = self
        self._ranges: LiveRanges | None = None
        self._audit: Audit | None = None
        self._audits: Counter[str] = Counter(clean=0, unclear=0, suspected=0)

    @property
    def _parts(self) -> Parts:
        """The objects of this Amp, for methods that touch masters, optimizer state or gradients.

        Raises RuntimeError while these are asleep; ``autocast`` and ``wake`` read ``_built``
        instead.
        """
        parts = self._built
        if parts.asleep.training:
            parts.asleep.check_training()
        return parts

    def _ready_parts(self, caller: str) -> Parts:
        """Return ``_parts`` to a method that every step calls.

        Raises RuntimeError after ``disable`` and while the tensors of ``_parts`` are asleep.

        Args:
            caller: name of the method, for the message.
        """
        if self._enabled and not self._built.asleep.training:
            return self._built
        self._check_enabled(caller)
        return self._parts

    if not TYPE_CHECKING:  # type checkers know all names

        def __getattr__(self, name: str) -> Any:
            """Refuse methods of torch's GradScaler and of optimizers.

            Raises:
                AttributeError: always.
            """
            if name in _ELSEWHERE:
                raise AttributeError(f"an Amp has no {name!r}: write {_ELSEWHERE[name]}")
            return object.__getattribute__(self, name)  # raises, also what a property raised

    def __iter__(self) -> NoReturn:
        """Refuse ``model, optimizer = tritonamp.enable(...)``.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "an Amp is one handle, got code that takes it for several values: write "
            "amp = tritonamp.enable(...). Model and optimizer are enabled in place, and keep their "
            "names; amp = tritonamp.handle(model) is the handle of a model that is enabled by now"
        )

    def __enter__(self) -> "Amp":
        self._check_enabled("with")
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if self._enabled:  # unless it was disabled inside
            if error is not None:
                self._built.past_errors.look(error)
            if self._built.asleep.training:
                self.wake()
            self.disable()

    @between_graphs
    def backward(
        self,
        loss: Tensor,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        loss_id: int = 0,
        retain_graph: bool = False,
    ) -> None:
        """Run ``loss.backward()`` on the scaled loss.

        Args:
            loss: a scalar tensor.
            optimizer: the optimizer, or the optimizers, that this loss feeds; None: all. They step
                together, or skip together.
            loss_id: number of the loss; losses with different numbers have loss scales of their
                own.
            retain_graph: as in ``Tensor.backward``.

        Raises:
            ValueError: an argument of another kind, or an optimizer that is not enabled here.
            RuntimeError: the loss has several elements or no graph; or the model was enabled
                without an optimizer, or was disabled.
        """
        self._check_enabled("backward")
        if self._audit is not None:
            self._audit.keeps_graph = True
        opened = self.scale_loss(loss, optimizer, loss_id)
        if loss.ndim or not loss.requires_grad:
            check_loss(loss)
        with opened as scaled:
            if self._audit is not None:
                retain_graph |= self._audit.is_running
            scaled.backward(retain_graph=retain_graph)

    @between_graphs
    def scale_loss(
        self,
        loss: Tensor,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        loss_id: int = 0,
        *,
        scaler: GradScaler | None = None,
    ) -> AbstractContextManager[Tensor]:
        """Yield the scaled loss, for a backward of your own inside the ``with`` block.

        Args:
            loss: a tensor.
            optimizer: optimizers as for ``backward``.
            loss_id: number of the loss, as for ``backward``.
            scaler: scaler to use instead of ``loss_id``'s. The caller saves and loads its
                state; its window of outliers is empty in a resumed run.

        Raises:
            ValueError: an argument of another kind, or an optimizer that is not enabled here.
            RuntimeError: the model was enabled without an optimizer, or was disabled.
        """
        parts = self._ready_parts("scale_loss")
        parts.stepper.check_training("amp.backward")
        if not isinstance(loss, Tensor):
            check_loss(loss)
        if not isinstance(loss_id, int):
            raise ValueError(f"loss_id: expected an int, got {loss_id!r}")
        feeds = parts.optimizers
        if optimizer is not None or not feeds:
            feeds = self._check_fed(optimizer)
        if parts.first_loss.is_awaited:
            parts.first_loss.check_loss(loss)
        if scaler is None:
            scaler = self._scalers.get(loss_id)
        if scaler is None:
            scaler = self._scalers[loss_id] = self.scaler.clone()
        if parts.live_faults.is_watching:
            parts.live_faults.note_loss(loss, scaler)
        opened = parts.pending.open_decision(scaler, loss, feeds)
        return opened if self._audit is None else self._audit.around(opened, feeds)

    def pipeline_loss(
        self, loss_fn: Callable[..., Tensor], process_group: Any = None
    ) -> Callable[..., Tensor]:
        """Return the loss function for the schedule of the pipeline that the model is a stage of.

        The schedules of ``torch.distributed.pipelining`` run the backwards themselves, so this
        replaces ``amp.backward``. From this call on, the ranks of all stages decide together at
        each step. Call it on every rank, and step on every rank.

        ::

            schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=amp.pipeline_loss(criterion))

        Args:
            loss_fn: function of a micro-batch's output and target, as for the schedule.
            process_group: group of all ranks that train the model: all stages, and their replicas
                under DDP or FSDP2. None: all ranks of the job.

        Returns:
            a function that returns the value of ``loss_fn``, in FP32 if that value is half; its
            backward carries the loss scale.

        Raises:
            ValueError: ``loss_fn`` is not a function; ``on_nonfinite`` of the policy is not "skip",
                since a stage cannot run a batch again; or ``process_group`` lacks ranks that
                gradients are reduced with.
            RuntimeError: the model was enabled without an optimizer.
        """
        self._check_enabled("pipeline_loss")
        self._check_fed(None)
        check_pipeline(loss_fn, self.policy)
        self._parts.ranks.join_stages(process_group)
        parts = self._parts
        return stage_loss(loss_fn, parts.first_loss.check_loss, parts.pending.begin_backward)

    @property
    def _is_stage(self) -> bool:
        """Whether other ranks have other state than this rank; ``tritonamp.save`` reads it."""
        return self._built.ranks.staged

    def _check_fed(self, optimizer: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
        """Return the optimizers that the caller means, all enabled here; None means all."""
        parts = self._parts
        feeds = parts.optimizers if optimizer is None else as_list(optimizer)
        if not feeds:
            raise RuntimeError(
                "this model was enabled without an optimizer: call amp.disable(), then "
                "tritonamp.enable(model, optimizer, ...)"
            )
        for i, o in enumerate(feeds):
            if o not in parts.weights:
                advice = "enable it with the model, tritonamp.enable(model, [optimizer, ...])"
                if not isinstance(o, Optimizer):
                    advice = "give an optimizer, a list of them, or None for all"
                raise ValueError(
                    f"optimizer {i}: expected one given to tritonamp.enable, got "
                    f"{type(o).__name__}, which was not: {advice}"
                )
        return feeds

    def fed_by(self, loss: Tensor) -> list[Optimizer]:
        """Return the optimizers whose parameters a loss was computed from, for ``backward``.

        All optimizers are returned if the graph of the loss has none of their parameters, as under
        FSDP2. With several optimizers the host walks over the graph.

        Args:
            loss: a tensor with a graph.
        """
        self._check_enabled("fed_by")
        if len(self._parts.optimizers) < 2:
            return list(self._parts.optimizers)
        found = list(nodes(loss))
        # reentrant checkpointing builds the graph of its part in the backward
        if any(type(node).__name__ == "CheckpointFunctionBackward" for node in found):
            return list(self._parts.optimizers)
        # the graph holds the models' parameters, the optimizers hold their masters
        used, params = gradient_leaves(found), parameter_names(self._parts.models)
        pairs = zip(params, self.named_master_params(), strict=True)
        stepped = {master for param, (_, master) in pairs if param in used}
        fed = [
            optimizer
            for optimizer in self._parts.optimizers
            if any(p in stepped for group in optimizer.param_groups for p in group["params"])
        ]
        return fed or list(self._parts.optimizers)

    @between_graphs
    def unscale_(self, optimizer: Optimizer | Iterable[Optimizer] | None = None) -> list[Tensor]:
        """Put the true FP32 gradients into ``.grad`` of the optimizers' params.

        Use it for gradient work of your own, between backward and step. Half parameters show the
        same gradients until the step. This call decides whether the step is skipped. Values that
        are written to the gradients afterwards are not checked, as with torch's GradScaler.

        Args:
            optimizer: one or several optimizers; None: all optimizers that a loss has fed.

        Returns:
            a 0-d flag on the device for each optimizer that has gradients, not 0 if its step will
            be skipped.

        Raises:
            RuntimeError: the call is the second before a step, or comes before any backward.
        """
        self._check_enabled("unscale_")
        if optimizer is None:
            parts = self._parts
            pending = self._fed_optimizers(parts, "unscale_")
            scaled = [o for o in pending if not parts.weights[o].has_true_gradients]
        else:
            scaled = pending = self._check_fed(optimizer)
        # if none is left, the call raises the error of a second call
        found = [self._parts.stepper.early.unscale_(o) for o in scaled or pending]
        return [found_inf for found_inf in found if found_inf is not None]

    @between_graphs
    def clip_grad_norm_(self, max_norm: float, *others: Any) -> Tensor:
        """Clip the true gradients to a total 2-norm.

        The step does the clipping, at no extra pass, unless ``unscale_`` was called before.

        Args:
            max_norm: largest 2-norm of all gradients that the pending losses feed, unscaled; 0 or
                more.
            *others: none. torch's arguments, parameters and a norm, get an error that says so.

        Returns:
            the norm before clipping, 0-d float32 on the device. It is inf if the gradients are
            finite and their norm is above 1.8e19; they are clipped to 0 then, as by torch.

        Raises:
            ValueError: ``max_norm`` is not such a number.
            RuntimeError: the call comes before any backward.
        """
        parts = self._ready_parts("clip_grad_norm_")
        check_max_norm(max_norm, *others)
        parts.scaled_gradients.has_clipped = True
        fed = self._fed_optimizers(parts, "clip_grad_norm_")
        return parts.stepper.early.clip_grad_norm_(fed, max_norm)

    @between_graphs
    @leaves_inference_mode
    def veto(self, flag: bool | Tensor) -> None:
        """Skip the step that the pending losses lead to, if ``flag`` is True.

        Parameters, optimizer state and loss scale stay as they are, and the cause is "veto".
        Several calls combine by or. The host does not wait for the device. A veto of one rank is a
        veto of all ranks. After ``clip_grad_norm_`` or ``unscale_`` all ranks must call it, because
        they decide again together.

        Args:
            flag: a bool, or a 0-d bool tensor on any device.

        Raises:
            ValueError: ``flag`` has another type, shape or dtype.
            RuntimeError: no loss was scaled since the last step (by ``amp.backward``,
                ``amp.scale_loss`` or ``amp.scaler.scale``); or one of several optimizers that a
                loss feeds has stepped; or the call is inside DDP's ``join``.
        """
        self._check_enabled("veto")
        check_flag(flag)
        if not self._parts.pending.fed_optimizers():
            raise RuntimeError(
                "amp.veto(): expected a call between amp.backward(loss) and optimizer.step(), got "
                "one before any backward or after the step"
            )
        self._parts.pending.veto(flag)

    def _fed_optimizers(self, parts: Parts, caller: str) -> list[Optimizer]:
        pending = parts.pending.fed_optimizers()
        if not (pending or parts.optimizers):
            self._check_fed(None)
        if not pending and self.policy.scales_loss:
            if parts.decisions.rule is None:  # no step yet
                raise RuntimeError(
                    f"{caller}() before any backward: call amp.backward(loss) first. A plain "
                    "loss.backward() does not count, because this level scales the loss"
                )
            raise RuntimeError(
                f"amp.{caller}(): expected a call between amp.backward(loss) and optimizer.step(), "
                "got one after the step, which has used these gradients, or after a plain "
                "loss.backward(), which does not count, because this level scales the loss"
            )
        return pending or parts.optimizers

    def after_step(
        self,
        function: Callable[[Tensor], Any],
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
    ) -> RemovableHandle:
        """Call a function after each ``optimizer.step()`` that has gradients, taken or skipped.

        ::

            def shrink(taken):
                factor = torch.where(taken, 0.99, 1.0)  # no write at a skip, and no wait
                for name, master in amp.named_master_params():
                    master.mul_(factor)

            handle = amp.after_step(shrink)

        The function runs under ``torch.no_grad()``, also in loops that call ``scaler.step``, once
        per step and not per micro-batch. It may write to parameters and masters. The half
        parameters follow before ``optimizer.step()`` returns, and ``changes`` and ``ema`` see the
        new values. Ask for masters inside of the function: packed and offloaded ones are given up
        when it returns. Ranks must write the same values; each rank writes its own shards.

        An exception of a function leaves the step, and the writes so far, as they are. Later
        functions do not run then. None runs if the step itself raises, as with
        ``on_nonfinite="raise"``.

        Args:
            function: function of one 0-d bool tensor on the device of the gradients, False if the
                step was skipped. Reading it on the host waits for the device.
            optimizer: the optimizer, or the optimizers, after whose steps it is called; None: all.

        Returns:
            a handle whose ``remove()`` ends the calls, as ``disable`` does.

        Raises:
            ValueError: ``function`` cannot be called with one tensor, or an optimizer is not
                enabled here.
            RuntimeError: the model was enabled without an optimizer, or was disabled; or a CUDA
                graph has captured a step, and its replays run no Python. With a function, a step
                inside of a capture raises.
        """
        self._check_enabled("after_step")
        optimizers = self._check_fed(optimizer)
        check_function(function)
        if any(self._parts.stepper.outcomes[o].captured for o in optimizers):
            raise RuntimeError(
                "amp.after_step: expected a call without CUDA graphs of optimizer.step(), got one "
                "after a capture, whose replays run no Python: call the function after each replay"
            )
        return self._parts.stepper.after_step.add(function, optimizers)

    @between_graphs
    @leaves_inference_mode
    def step_schedulers(self, *schedulers: Any) -> None:
        """Step learning-rate schedulers, after ``optimizer.step()``, for steps that were taken.

        The host does not wait for the device. On a GPU a scheduler is stepped at once, as if the
        step was taken. A skip is known about one step later, and a later call does not step the
        scheduler then. A call does nothing if the optimizer has not stepped since the call before.
        Several ranks, and any run under ``torch.use_deterministic_algorithms``, wait for the
        outcome of the step before the last, so that every rank learns of it at the same call.

        Args:
            *schedulers: objects with ``step()``; with several optimizers also with ``optimizer``.

        Raises:
            ValueError: an argument is no scheduler of an enabled optimizer, or its ``step`` needs
                arguments, as that of ReduceLROnPlateau does.
        """
        self._check_enabled("step_schedulers")
        self._check_fed(None)
        self._parts.schedulers.step(schedulers)

    def ema(self, decay: float) -> EMA:
        """Return an exponential moving average of the FP32 values that the optimizers step on.

        It begins at the present values. ``update()`` after ``optimizer.step()`` moves it, unless
        the step was skipped.

        Args:
            decay: number in [0, 1); the average is ``decay * average + (1 - decay) * value``.

        Raises:
            ValueError: ``decay`` is not such a number.
        """
        self._check_enabled("ema")
        average = EMA(
            decay,
            self._parts.models,
            self._parts.stepper,
            self._parts.fp32_values,
            self._parts.backend.requested,
            self._check_trains,
        )
        return self._parts.sleep.add_average(average)

    def _check_trains(self) -> None:
        self._check_enabled("ema(...).update")
        self._check_fed(None)

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Run code of your own under the op policy: a loss, a method that is not ``forward``."""
        self._check_enabled("autocast")
        self._built.fp32_values.asleep.check_weights()
        with self._built.context.entered():
            yield

    def master_params(self) -> Iterator[Tensor]:
        """Yield the tensors that the optimizers step on, in the order of the groups.

        The tensors are FP32 if the policy has masters.
        """
        self._check_enabled("master_params")
        for weights in self._parts.weights.values():
            yield from (value for _, value in weights.fp32_values())

    def named_master_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and FP32 master of each parameter, in the order of ``named_parameters()``.

        A parameter without a master stands for itself: an FP32 or frozen parameter, one in no
        optimizer, or any under a policy without masters. Names are the model's own, without DDP's
        prefix; tied weights come once. Names of several models begin with the model's number, as in
        ``nn.ModuleList(models)``.
        """
        self._check_enabled("named_master_params")
        masters: dict[Tensor, Tensor] = {}
        for weights in self._parts.weights.values():
            weights.refresh()
            masters |= dict(weights.fp32_values())
        for param, name in parameter_names(self._parts.models).items():
            yield name, masters.get(param, param)

    def stats(self) -> dict[str, Any]:
        """Return numbers of the run so far, as plain values.

        Waits for the device, as ``explain`` and ``state_dict`` do.

        Returns:
            a dictionary.

            - scale: the loss scale of ``loss_id`` 0.
            - scales: all loss scales, by loss_id.
            - growth_tracker: clean steps since the scale last moved.
            - steps: decisions to step; a step fed by two losses with own scales counts twice.
            - skipped: decisions to skip.
            - scale_overflows: skips because the scale was too high.
            - forward_faults: skips because a loss was inf or NaN.
            - outliers: skips by ``skip_outliers``.
            - vetoes: skips by ``veto``.
            - huge_gradients: skips because FP32 cannot hold the squares of finite gradients.
            - last_skip_reason: the cause of the last skip, or None.
            - grad_norm: the norm of the last step that was not skipped.
            - healed: names of modules that compute in FP32, or have FP32 results, since a fault.
            - fused: hand-written RMSNorms that run as ``rms_norm``, by name, and activations that
              run as one op, or probabilities that are FP32, by function and line
              ("model.MLP.forward:12").
            - backend: "triton" or "eager".
            - backend_reason: the reason for that backend.
            - kernel_failures: operation to the reason why its Triton kernel could not be compiled;
              the operation runs in eager torch.
            - lost_updates: by parameter group, the share of all half weights that the last taken
              step left as they were, those without a gradient included; 0 without
              track_lost_updates, and in groups without half weights.
            - overflowed_parameters: names of half parameters that became inf though their FP32
              master is finite: beyond 65504 in float16.
            - audits: number of audited steps that were "clean", "unclear" (without a verdict) and
              "suspected" (skipped, because a backward has made other bits).
        """
        names = parameter_names(self._parts.models)
        return {
            "scale": self.scaler.get_scale(),
            **self._parts.log.stats(),
            "healed": list(self._parts.healing.names),
            "fused": list(self._parts.enabled_models.fused),
            "growth_tracker": self.scaler._get_growth_tracker(),
            "backend": self._parts.backend.name,
            "backend_reason": self._parts.backend.reason,
            "kernel_failures": dict(_implementations.failures),
            "overflowed_parameters": [
                names[p] for w in self._parts.weights.values() for p in w.overflowed()
            ],
            "lost_updates": [
                share for w in self._parts.weights.values() for share in w.masters.lost_updates()
            ],
            "scales": {loss_id: scaler.get_scale() for loss_id, scaler in self._scalers.items()},
            "audits": dict(self._audits),
        }

    @between_graphs
    @leaves_inference_mode
    def changes(
        self,
        clear: bool = True,
        dense_above: float | None = None,
        *,
        global_positions: bool = False,
    ) -> dict[str, tuple[Tensor | None, Tensor]]:
        """Return the weights that have changed since the last call. Waits for the device.

        An element has changed if a step, or other code, has written other bits to it, also if it
        was written back later. A skipped step changes none. If you write to a half parameter with
        an FP32 master, its elements are compared. Any other parameter that you write to counts as
        changed as a whole, and so does each one that the model's ``load_state_dict`` or healing
        writes to. After ``Amp.load_state_dict``, also in a resumed run, all elements count. Writes
        through ``.data``, which torch does not count, are not seen.

        Args:
            clear: count from this call on. False: the next call returns these changes, too.
            dense_above: share of a parameter's elements above which the whole parameter is
                returned; None: never.
            global_positions: positions of a sharded parameter count in the whole tensor, not in
                this rank's part. They are int64 if it has more elements than int32 counts. A part
                has positions whatever ``dense_above`` is.

        Returns:
            name, as in ``named_parameters()`` of the model inside DDP or torch.compile, to
            positions and values, for each parameter of the optimizers. The positions are int32, in
            ``param.flatten()``, in ascending order. The values have the parameter's dtype. Both are
            empty if nothing has changed. The positions are None where the values are the whole
            parameter. A shared parameter has its first name. Of a sharded parameter, each rank
            returns its part.

        Raises:
            ValueError: an argument of another kind; or, with neither ``dense_above`` nor
                ``global_positions``, a parameter of more elements than int32 counts.
            RuntimeError: the policy has neither ``track_changes`` nor ``track_lost_updates``; the
                model was enabled without an optimizer; training is asleep; a CUDA graph is
                captured; or with ``global_positions`` the placements of a parameter do not tell
                where this rank's part lies.
        """
        self._check_enabled("changes")
        parts = self._parts
        check_changes(self.policy, parts.models, clear, dense_above, global_positions)
        self._check_fed(None)
        names = parameter_names(parts.models)
        found: dict[Tensor, tuple[Tensor | None, Tensor]] = {}
        masters = [w.masters for w in parts.weights.values()]
        tracked = [m.changes for m in masters if m.changes is not None]
        for weights in parts.weights.values():
            weights.refresh()
        for changes in tracked:
            found |= changes.read(names, dense_above, global_positions)
        for changes in tracked if clear else ():
            changes.clear()
        return {name: found[param] for param, name in names.items() if param in found}

    @property
    def history(self) -> list[StepRecord]:
        """Records of the last 1000 steps, the oldest first. Waits for the device.

        A record has step, cause (None for a step that was taken), scale, grad_norm, parameters,
        detail and loss.
        """
        self._parts.log.collect(wait=True)
        return list(self._parts.log.history.records)

    def metrics(self) -> dict[str, float]:
        """Return the latest numbers that have arrived, for a logger. Never waits for the device.

        The numbers are one or a few steps old. The dictionary is empty until the first have
        arrived.

        Returns:
            a dictionary.

            - amp/scale: the loss scale of that step.
            - amp/skipped: steps skipped so far.
            - amp/grad_norm: the norm of the last step that was not skipped.
            - amp/skipped_data, amp/skipped_scale_overflow...: skips by cause since ``enable``; a
              cause without skips is left out.
            - amp/headroom_forward, amp/headroom_backward: under ``watch``, the least headroom of
              all modules in the last step that was read, in bits.
            - amp/attention_logit: under ``watch``, the largest logit, or its bound, in that step.
            - amp/mismatch_k1, amp/mismatch_k3, amp/mismatch_outside, amp/mismatch_worst_ratio: the
              last mismatch that ``log_mismatch`` got.
        """
        parts = self._built
        ranges = () if self._ranges is None else self._ranges.arrived()
        return metrics(parts.log, ranges, parts.mismatches.arrived())

    @between_graphs
    @leaves_inference_mode
    def log_mismatch(self, mismatch: Mismatch) -> None:
        """Keep the distance of a batch's log-probabilities from those of its sampler.

        ::

            amp.log_mismatch(tritonamp.functional.mismatch(log_probs, sampler_log_probs, mask))

        ``metrics`` returns the last numbers that have arrived, and ``plot`` draws the last 1000.
        They belong to this rank. Call it before ``optimizer.step()``, whose number they get in
        the picture. The host does not wait for the device. If it is 16 calls ahead of the device,
        further ones are left out.

        Args:
            mismatch: result of ``tritonamp.functional.mismatch``.

        Raises:
            ValueError: the argument is no such result, or its tensors are on another device than
                the steps' numbers.
            RuntimeError: a CUDA graph is captured. Call ``functional.mismatch`` inside of the
                capture, and this method after each replay.
        """
        self._check_enabled("log_mismatch")
        self._parts.mismatches.add(mismatch)

    def plot(self, path: str | Path) -> Path:
        """Draw loss, loss scale, gradient norm and skips by cause. Waits for the device.

        The picture holds ``history``. Its losses are those that ``backward`` got. If
        ``log_mismatch`` was called, another panel shows ``k3`` and the share outside of the band.
        Needs matplotlib, which ``tritonamp[demo]`` installs.

        Args:
            path: path of the file; the suffix (.png, .svg, ...) chooses the format.

        Returns:
            the path.

        Raises:
            RuntimeError: there was no step yet.
            ValueError: matplotlib cannot write files of that suffix.
            ImportError: matplotlib is not installed.
        """
        parts, history = self._parts, self.history
        in_turn = len(parts.optimizers) > 1 or len(self._scalers) > 1
        words = title(parts.models, self.policy)
        return save_picture(
            history, path, parts.mismatches.arrived(wait=True), words, in_turn=in_turn
        )

    @leaves_inference_mode
    def watch(self, every: int = 100) -> "LiveRanges":
        """Measure in training how far the values of each module are from the end of their format.

        Outputs and their gradients, of every module except ``nn.Sequential``, are read as they are
        computed, in the next step and then in every ``every``-th step: 2 bytes a half element. In
        the steps between, one kernel per output returns at once. The host does not wait for the
        device. Forwards without gradients are not read. If a module's outputs grow towards the end
        of their format, one WARNING says in about how many steps they reach it.

        The largest attention logit of each head is read, too: exactly where scores exist, and as a
        bound (norm of a query times norm of a key) for ``scaled_dot_product_attention`` and
        ``flex_attention``. A compiled forward reads queries and keys in every step.

        Call it before ``torch.compile`` compiles the model and before a CUDA graph is captured,
        because neither sees hooks that are added later. ``ranges`` and ``metrics`` show the
        readings.

        Args:
            every: number of steps from one reading to the next, 1 or more.

        Returns:
            an object whose ``remove()`` ends the readings, as ``disable`` does. Its ``logits()``
            returns the largest attention logits of the last step: name of a module to float32 of
            shape (heads,), on the device.

        Raises:
            ValueError: ``every`` is not such a number.
            RuntimeError: ``watch`` is active already, or the model was enabled without an
                optimizer.
        """
        from tritonamp.diagnosis.live_ranges import LiveRanges  # here, because few runs watch

        self._check_enabled("watch")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every: expected a number of steps, 1 or more, got {every!r}")
        if self._ranges is not None and self._ranges.is_watching:
            raise RuntimeError(
                f"amp.watch() was called already, with every={self._ranges.every}: to change it, "
                "call remove() of what that call returned first"
            )
        self._check_fed(None)
        parts = self._parts
        self._ranges = LiveRanges(parts.models, every, parts.backend.requested)
        parts.decisions.after_decision = self._ranges.after_decision
        return self._ranges

    def ranges(self) -> list[RangeRecord]:
        """Return the readings of the last step that ``watch`` read. Waits for the device.

        Each record has module, direction ("forward", "backward" or "attention"), step, absmax,
        headroom_bits, zeros, subnormals, elements, dtype, steps_left, head and is_bound. Modules
        that returned no floating tensor are left out. The list is empty until a step that was read
        has been decided.

        Raises:
            RuntimeError: ``watch`` was not called.
        """
        if self._ranges is None:
            raise RuntimeError("amp.ranges(): nothing is watched, call amp.watch() before training")
        return self._ranges.last()

    def audit(self, every: int | None = 500) -> None:
        """Run the backward of every ``every``-th step twice, and compare the bits of its gradients.

        A difference that no op of the graph explains is a sign of faulty hardware: the step is
        skipped on all ranks, and a WARNING names the rank and the first parameters. If torch calls
        ops of the graph nondeterministic, or the graph cannot run twice, there is no verdict, and
        one WARNING says so. ``stats()["audits"]`` counts the audits.

        The next step is audited, and each ``every`` steps after it, with all its micro-batches.
        Steps between audits cost nothing more. An audited step takes one more backward (two with
        several ranks, and under ``scale_loss``), the memory of a second set of gradients, and one
        read of the device. Hooks of parameters and of DDP do not run in these backwards; hooks of
        modules and activations do. ``scaler.scale(loss).backward()`` is not audited, and one
        WARNING says so. Under DDP the audit also compares masters and optimizer state over the
        ranks.

        Call it on all ranks, before the same step.

        Args:
            every: number of steps from one audit to the next; None or 0: no audits from now on.

        Raises:
            ValueError: ``every`` is no such number.
            RuntimeError: the model was enabled without an optimizer, or is a stage of a pipeline,
                whose schedule runs the backwards.
        """
        from tritonamp.diagnosis.audit import Audit, check_every  # here, because few runs audit

        self._check_enabled("audit")
        check_every(every)
        self._check_fed(None)
        parts = self._parts
        if parts.ranks.staged:
            raise RuntimeError("amp.audit: in a pipeline the schedule runs the backwards")
        self._audit = parts.pending.before_decision = None
        if every:
            pending, log, backend = parts.pending, parts.decisions, parts.backend.requested
            self._audit = Audit(every, parts.models, pending, log, self._audits, backend)
            pending.before_decision = self._audit.before_decision

    def explain(self, replay: bool | Callable[[], Any] = False) -> str:
        """Return why the last skipped step was skipped, and what to do. Waits for the device.

        Parameters, buffers, gradients and random numbers stay as they are. Call it on all ranks:
        each rank runs its own batch, and all ranks return the same text. In a terminal, its lines
        are broken to fit.

        Args:
            replay: False: run nothing. True: run the model's forward on the failing batch again,
                and under ``on_nonfinite`` other than "skip" its backward. A function that computes
                the loss: run it and its backward. A run names the operation where inf or NaN began,
                and tries cures. Without a skip, the last batch runs, if it still exists.

        Raises:
            ValueError: ``replay`` is something else.
        """
        if replay is not False:
            check_replay(replay)
            self._check_replay("explain(replay=True)")
        with self._parts.stepper.replaying():
            # lines that break only in a terminal: a program that reads the text finds its sentences
            return fitted(self._parts.response.explain(replay), width(unknown=0))

    def write_bundle(self, folder: str | Path) -> Path:
        """Write a folder that replays the last skip on another machine, and return its path.

        The folder holds the failing batch, the weights, the policy, the report, and a ``replay.py``
        in which only the model has to be filled in. Call it on all ranks: the rank whose batch the
        report describes writes the folder, with whole weights.

        Args:
            folder: path of the folder.

        Raises:
            RuntimeError: there is no failing batch that can run again, or another rank could not
                write.
        """
        self._check_enabled("write_bundle")
        self._check_replay("write_bundle")
        return self._parts.replays.write_bundle(folder)

    @leaves_inference_mode
    def heal(self, module: str, *, results: bool = False) -> None:
        """Have a module compute in FP32 from now on, its parameters included.

        Call it on all ranks. Parameters that FSDP2 gathers with those of an outer module are still
        gathered in half. Without an op table (O3) the module's results are still half, unless the
        module is the model.

        Args:
            module: name of the module; "" is the model.
            results: True: only products in the module have FP32 results, as under
                ``Policy.fp32_results``, and its parameters stay half.

        Raises:
            ValueError: there is no such module, or FP32 results are asked for at O3, or of the
                model itself.
        """
        self._check_enabled("heal")
        self._parts.healing.heal(module, results)
        if not results:  # FP32 forwards do not enter the op table
            self._parts.first_loss.is_awaited = False

    @leaves_inference_mode
    def unheal(self, module: str) -> None:
        """Undo ``heal``: have a module follow the policy again.

        Args:
            module: name of the module; "" is the model.

        Raises:
            ValueError: the module was not healed.
        """
        self._check_enabled("unheal")
        self._parts.healing.unheal(module)

    @property
    def policy(self) -> Policy:
        """The present policy; its ``fp32_modules`` and ``fp32_results`` name healed modules."""
        return self._parts.healing.policy

    def state_dict(self) -> dict[str, Any]:
        """Return loss scales, counts and outstanding scheduler steps, as plain values.

        A run resumes from this state and the states of model and optimizer. Waits for the device.
        """
        scalers = {loss_id: scaler.state_dict() for loss_id, scaler in self._scalers.items()}
        faults = {
            **self._parts.response.counts.to_dict(),
            "last_good": list(self._parts.decisions.last_good()),
        }
        return ResumeState(
            scalers=scalers,
            counts=self._parts.decisions.counts(),
            loss_scale=self.policy.loss_scale,
            healed=self._parts.healing.in_full,
            faults=faults,
            schedulers=self._parts.schedulers.state(),
            outliers=self._parts.pending.outlier_windows.state(self._scalers),
            state=self.policy.state,
            healed_results=self._parts.healing.with_results,
        ).to_dict()

    @leaves_inference_mode
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of ``Amp``, of a GradScaler (torch's, too), or of ``apex.amp``.

        A loss scale that this policy fixes stays, and none begins at another policy's fixed one.

        Raises:
            ValueError: the state has other keys (listed), or a healed module that the model does
                not have; nothing was changed then.
        """
        state = parse_state(state_dict, self.policy.loss_scale, self.scaler.clone())
        # the last call that may raise, because the code after it only assigns
        self._parts.healing.load(state.healed, state.healed_results)
        if state.scalers is not None:
            kept = {0: self.scaler} | {i: s for i, s in self._scalers.items() if i in state.scalers}
            self._scalers = kept | {
                i: self.scaler.clone() for i in state.scalers.keys() - kept.keys()
            }
            for loss_id, scaler_state in state.scalers.items():
                self._scalers[loss_id].load_state_dict(scaler_state)
        self._parts.log.load_counts(state.counts, state.faults.get("last_good", (0.0, 0.0)))
        self._parts.response.counts = FaultCounts.of(state.faults)
        self._parts.pending.outlier_windows.load_state(state.outliers, self._scalers)
        self._parts.schedulers.load_state(state.schedulers)
        for weights in self._parts.weights.values():
            if weights.masters.changes is not None:
                # the reader's copy may be of another run, or of another time
                weights.masters.changes.mark_all()

    @between_graphs
    def sleep(self, *, weights: bool = False) -> int:
        """Move the tensors that only training needs to host memory, until ``wake``.

        These are FP32 masters, ``optimizer.state``, gradients and averages of ``ema``. The model
        stays on the device and runs forwards, while a sampler or another program uses the memory.
        The tensors stay the same objects, without memory, and must not be used until ``wake``. All
        methods except ``wake``, ``autocast`` and ``metrics``, and those of the optimizers, raise
        RuntimeError.

        Losses that no step has answered stay pending. Waits for the device. On the CPU nothing
        moves. Call it on every rank.

        Args:
            weights: also move the model's parameters and buffers; its forward raises then.

        Returns:
            the number of bytes that have left the device.

        Raises:
            ValueError: ``weights`` is not a bool.
            RuntimeError: the tensors are asleep already; the call is inside ``with
                amp.scale_loss``; a CUDA graph has captured a step, and would use memory that is
                gone; or there is not enough host memory. Nothing was changed then.
        """
        self._check_enabled("sleep")
        if not isinstance(weights, bool):
            raise ValueError(f"weights: expected a bool, got {weights!r}")
        self._parts.log.collect(wait=True)  # ``metrics`` is not to read weights that are away
        return self._parts.sleep.fall_asleep(weights)

    @between_graphs
    def wake(self) -> None:
        """Move the tensors of ``sleep`` back, with the same bits. Waits for the device.

        Raises:
            RuntimeError: nothing is asleep.
            torch.OutOfMemoryError: the device has no room. Everything is still asleep then; call
                ``wake`` again when there is room.
        """
        self._check_enabled("wake")
        self._built.sleep.wake_up()

    @leaves_inference_mode
    def disable(self) -> None:
        """Put model, optimizer and torch back as they were, with the trained values.

        Parameters get back the dtype that they had before ``enable``; half ones are rounded once.
        A second call does nothing.
        """
        if not self._enabled:
            return
        if self._ranges is not None:
            self._ranges.remove()
        self._audit = None
        self._parts.live_faults.decided()
        self._parts.stepper.after_step.hooks.clear()
        for optimizer, weights in self._parts.weights.items():
            weights.refresh()
            if self.policy.scales_loss and not weights.has_true_gradients:
                optimizer.zero_grad()  # gradients with a scale that no step will take off
            uninstall(optimizer)
            weights.masters.restore_groups()
            if self._parts.stepper.offload is not None:
                self._parts.stepper.offload.return_state(optimizer)
        self._parts.stepper.plain_backwards.remove()
        self._parts.past_errors.remove()
        self._parts.ranks.detach()
        changed = self._parts.enabled_models.dtypes.has_changed
        fp32_values = self._parts.enabled_models.disable()
        for optimizer in self._parts.optimizers:
            settle_state(optimizer, fp32_values)
        if changed:
            self._parts.ranks.rebuild()
        scaled_gradients.forget(self._parts.scaled_gradients)
        self._release()
        self._enabled = False
        self._parts.context.handle = None

    def _check_replay(self, caller: str) -> None:
        ranks = self._parts.ranks
        if ranks.staged or (ranks.sharding is not None and ranks.sharding.splits_layers):
            under = "in a pipeline" if ranks.staged else "under tensor parallelism"
            raise RuntimeError(
                f"{caller}: {under} no rank can run a batch again by itself: save the batch and a "
                "full state dict, and replay in one process"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles, because an Amp works on the objects that were enabled.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "an Amp cannot be copied or pickled, since it works on the very models and optimizers "
            "that were enabled: save amp.state_dict() next to their states, or copy them, "
            "copy.deepcopy((model, optimizer)), and call tritonamp.enable with the copies"
        )

    def _check_enabled(self, caller: str) -> None:
        if not self._enabled:
            raise RuntimeError(
                f"amp.{caller}(): this model was disabled; call tritonamp.enable again"
            )


class _StepState:
    """The state of Amp and optimizers, which a rank takes over from another rank."""

    def __init__(self, amp: Amp) -> None:
        # weak: the Amp holds the ranks, which hold this
        self._amp = weakref.ref(amp)

    def state_dict(self) -> Any:
        amp = self._amp()
        if amp is None:
            return None
        return amp.state_dict(), [optimizer.state_dict() for optimizer in amp._parts.optimizers]

    def load_state_dict(self, state_dict: Any) -> None:
        amp = self._amp()
        if amp is None or state_dict is None:
            return
        state, of_optimizers = state_dict
        amp.load_state_dict(state)
        for optimizer, of_optimizer in zip(amp._parts.optimizers, of_optimizers, strict=True):
            optimizer.load_state_dict(of_optimizer)


def _release(values: "weakref.ref[Fp32Values]") -> None:
    dispatch.release()
    copies.release(values())
    scaled_gradients.release()
