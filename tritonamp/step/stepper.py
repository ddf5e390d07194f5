"""From a backward to the new weights: decide, then step or skip."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.asleep import Asleep
from tritonamp.class_swap import base_class
from tritonamp.kernels._inference import leaves_inference_mode
from tritonamp.kernels._update_lists import UpdateLists
from tritonamp.policy import Policy
from tritonamp.scaler import GradScaler
from tritonamp.step.after_step import AfterStep
from tritonamp.step.decision import Decision, Phase
from tritonamp.step.early import EarlyDecisions
from tritonamp.step.fused import FusedStep
from tritonamp.step.gradients import Gradients
from tritonamp.step.hooks import owner_of_hooks, run_with_hooks
from tritonamp.step.idle import IdleSteps
from tritonamp.step.master_weights import MasterWeights
from tritonamp.step.offload import Offload
from tritonamp.step.outcome import NonFiniteError, found_inf_of
from tritonamp.step.outcomes import StepOutcomes
from tritonamp.step.pending import PendingDecisions
from tritonamp.step.plain_backwards import PlainBackwards
from tritonamp.step.refused import sparse_gradients
from tritonamp.step.rules import rule_of
from tritonamp.step.small_state import state_format
from tritonamp.step.steady_step import SteadyStep


class Judged(NamedTuple):
    """The gradients of one optimizer, and the decision on them.

    Attributes:
        gradients: gradients that the step uses.
        grad_scale: factor that unscales and clips the gradients, 0-d; None: they are unscaled
            already.
        found_inf: 0-d flag; the optimizer skips if it is not 0.
    """

    gradients: Gradients
    grad_scale: Tensor | None
    found_inf: Tensor


class Stepper:
    """Carries out the decisions of one ``Amp``.

    Args:
        policy: policy of the ``Amp``.
        backend: "auto", "triton" or "eager".
        scaler: scaler that the user may drive in a ``torch.amp`` loop.
        pending: decisions that optimizers wait for.
        respond: function that is called after every decision, with whether it was a skip, if the
            policy wants more than skipping.
        asleep: record of the tensors that are away from the device.
        offload: host memory of masters and optimizer state; None: they are on the device.
        around_step: function that makes a context manager for each step of an optimizer, or None.
        after_step: the user's functions after each step.

    Attributes:
        scaler, pending, asleep, offload, around_step, after_step: the arguments.
        weights: optimizer to its master weights.
        early: maker of decisions that the user asks for before the step.
        outcomes: step outcomes by optimizer.
        plain_backwards: detector of backwards whose loss was not scaled.
        in_replay: whether a function runs that may compute a loss, but not train.
    """

    def __init__(
        self,
        policy: Policy,
        backend: str,
        scaler: GradScaler,
        pending: PendingDecisions,
        respond: Callable[[bool], None],
        asleep: Asleep,
        offload: Offload | None,
        around_step: Callable[[Optimizer], AbstractContextManager[Any]] | None,
        after_step: AfterStep,
    ) -> None:
        self.scaler = scaler
        self.pending = pending
        self.weights = weights = pending.weights
        self.asleep = asleep
        self.offload = offload
        self.around_step = around_step
        self.after_step = after_step
        self.early = EarlyDecisions(pending)
        self.outcomes = {optimizer: StepOutcomes() for optimizer in weights}
        self._policy = policy
        self._backend = backend
        self._respond = respond
        self._fused: dict[Optimizer, FusedStep | None] = {}
        self._idle = IdleSteps()
        self.in_replay = False
        watched = (p for w in weights.values() if policy.scales_loss for p in w.parameters())
        self.plain_backwards = PlainBackwards(watched, pending.is_scaled)

    def check_scaler(self, scaler: Any) -> None:
        """Raise RuntimeError if ``scaler`` is not the GradScaler of this ``Amp``."""
        if scaler is not self.scaler:
            raise RuntimeError(
                "this optimizer was enabled with another GradScaler: use amp.scaler, or "
                "tritonamp.enable(..., scaler=scaler) with a tritonamp.GradScaler"
            )

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Refuse backwards of scaled losses, and steps, inside the block."""
        before, self.in_replay = self.in_replay, True
        try:
            yield
        finally:
            self.in_replay = before

    def check_training(self, caller: str) -> None:
        """Raise RuntimeError inside a block of ``replaying``."""
        if self.in_replay:
            raise RuntimeError(
                f"{caller} inside of amp.explain(replay=function): the function runs several "
                "times, and must not train: let it compute the loss and return it, without "
                "backward and step"
            )

    @leaves_inference_mode
    def step(self, optimizer: Optimizer, by_scaler: bool = False) -> Tensor | None:
        """Make the decisions that ``optimizer`` waits for, then step or skip.

        Args:
            optimizer: an enabled optimizer.
            by_scaler: whether ``GradScaler.step`` calls, so that an ``update`` will follow.

        Returns:
            0-d flag, not 0 after a skip; None without gradients, where the step is a no-op.

        Raises:
            RuntimeError: no backward of a scaled loss has left the gradients, or a replay runs.
            NonFiniteError: a skip, under ``on_nonfinite="raise"``.
        """
        self.check_training("optimizer.step()")
        if self.offload is not None:
            # before any decision, which a refused step would leave behind
            self.offload.refuse_capture()
        w = self.weights[optimizer]
        if self.after_step.hooks:
            self.after_step.check_capture(w.parameters())
        decisions = self.pending.decisions_of(optimizer, moves_scale=not by_scaler)
        if not decisions:
            self._idle.note(w, sum(outcomes.tried for outcomes in self.outcomes.values()))
            return None
        if self.plain_backwards.is_watching:
            self.plain_backwards.check()
        # Early decisions stay as they are if the step raises, because the user has acted on their
        # norm or flag.
        undecided = [d for d in decisions if not d.is_decided]
        fused = self._fused_step_of(optimizer)
        try:
            if fused is None:
                self._step_by_itself(w, decisions)
            else:
                run_with_hooks(self._step_in_one_pass, optimizer, w, decisions, fused)
        except BaseException:
            # The decisions are undone, so that the call can be repeated. An optimizer that no
            # longer waits has stepped, and a hook after the step has raised: that step stays.
            if w in decisions[0].waiting:
                self.pending.undo(undecided)
            raise
        # Every other policy reads the outcome on the host. "skip" never waits for the device.
        if self._policy.on_nonfinite != "skip":
            self._answer(decisions, by_scaler)
        found_inf = found_inf_of(decisions)
        # last: the response may heal modules, or replay the batch on the weights of the step
        if self.after_step.hooks:
            self.after_step.run(optimizer, found_inf)
        return found_inf

    def state_of(self, optimizer: Optimizer) -> str:
        """Return the format of an optimizer's state, among ``policy.STATES``."""
        return state_format(optimizer, self._policy.state)

    def _fused_step_of(self, optimizer: Optimizer) -> FusedStep | None:
        """Return the optimizer's ``FusedStep``; None: the optimizer steps by itself."""
        if optimizer not in self._fused:
            rule, fused = rule_of(optimizer), None
            if rule is not None:
                masters, state = self.weights[optimizer].masters, self.state_of(optimizer)
                how = state, masters.packs, masters.stored_form, self.offload, masters.changes
                fused = FusedStep(optimizer, rule, self._backend, *how)
            self._fused[optimizer] = fused
        fused = self._fused[optimizer]
        # Asked at every step: whether an embedding's gradient is sparse may change with the batch,
        # and torch updates only the rows that a sparse gradient has.
        if fused is not None and fused.rule.sparse_error is None:
            w = self.weights[optimizer]
            by_torch = w.any_sparse()
            if by_torch and self.offload is not None:
                raise RuntimeError(sparse_gradients("offload='state'", "offload"))
            # torch's own step would round its updates to the half parameters, and cannot read codes
            if by_torch and w.masters.packs:
                asked = "masters='packed' or state='8bit'"
                raise RuntimeError(sparse_gradients(asked, "masters and state"))
            return None if by_torch else fused
        return fused

    def _step_in_one_pass(
        self,
        _: Optimizer,
        w: MasterWeights,
        decisions: Sequence[Decision],
        fused: FusedStep,
    ) -> None:
        # The user's hooks before the step have run. The decision comes after them, because they may
        # have changed the gradients.
        steady, built = w.steady_step(decisions), None
        if steady is not None:
            decision = decisions[0]
            if not decision.is_decided:
                self.pending.decide(decision, known={w: steady})
            steady.run(decision.grad_scale, decision.found_inf)
        else:
            built = self._build_step(w, decisions, fused)
        # Before the user's hooks after the step, because values that they write to masters are
        # newer than the half parameters.
        w.masters.mark_rounded()
        self._finish_step(w, decisions)
        # last, because the step is done whatever this raises
        if built is not None and built.launches is not None:
            w.record(SteadyStep.of(built, fused.rule, w.optimizer, w.parameters()))

    @torch.no_grad()
    def _build_step(
        self, w: MasterWeights, decisions: Sequence[Decision], fused: FusedStep
    ) -> UpdateLists | None:
        """Step in one pass from the tensors one by one.

        Returns:
            the lists of the step, if another step may repeat its launches.
        """
        judged = self._judge(w, decisions)
        if judged.gradients.any_sparse:
            fused.rule.refuse_sparse()
        updates = fused.step(*judged)
        if w.masters.changes is not None:
            w.masters.changes.leave_out(judged.gradients.lists.numbers, judged.found_inf)
            return None
        # true gradients are in other tensors, and are made by many operations anyway
        return None if judged.grad_scale is None else updates

    def _judge(
        self, w: MasterWeights, decisions: Sequence[Decision], undoable: bool = False
    ) -> Judged:
        """Judge one optimizer's gradients, and those of optimizers that share its losses.

        Args:
            w: master weights of the optimizer.
            decisions: decisions that the optimizer waits for.
            undoable: keep copies, so that ``undo`` may follow.
        """
        w.forget_step()
        # Before anything reads the lists: masters take over values that a checkpoint or the
        # user has written to half parameters, and groups that were changed by hand give the
        # optimizer other lists.
        w.refresh()
        gradients = w.gradients()
        # The same value for statistics and step: its tensors are asked for their facts once.
        for decision in decisions:
            self.pending.decide(decision, undoable=undoable, known={w: gradients})
        if len(decisions) > 1 and w.decision is not None:
            # the gradients of the other losses are true ones, set aside: add these
            w.decision.unscale(w)
            gradients = w.gradients()
        # True gradients were unscaled with the factors of their own decisions. Another factor would
        # scale them twice.
        grad_scale = None if w.has_true_gradients else decisions[0].grad_scale
        return Judged(gradients, grad_scale, found_inf_of(decisions))

    def _step_by_itself(self, w: MasterWeights, decisions: Sequence[Decision]) -> None:
        """Run the own step of an optimizer that cannot skip on the device, at one host read.

        The user's hooks run at a skip, too, as for optimizers that skip on the device.
        """
        # Several ranks would have to decide again together, and the others may not have failed.
        judged = self._judge(w, decisions, undoable=not self.pending.ranks.several)
        if bool(judged.found_inf):
            optimizer = owner_of_hooks(w.optimizer)
            run_with_hooks(lambda _: self._finish_step(w, decisions), optimizer)
            return
        if judged.grad_scale is not None:
            # only after the read: a skip leaves the scaled gradients where the backward has put
            # them
            decisions[0].unscale(w)
        optimizer = w.optimizer
        if w.masters.changes is not None:
            w.masters.changes.copy_before()
        before = _versions(optimizer)
        try:
            base_class(type(optimizer)).step(optimizer)  # type: ignore[attr-defined]
        except BaseException:
            self._keep_unfinished(w, decisions, before)
            raise
        # torch's fused steps, and steps that write to ``.data``, count no write in ``_version``. At
        # O3 the FP32 values in main memory follow counted writes only: ``state_dict`` and
        # ``disable`` would return values of before the step.
        torch.autograd.graph.increment_version(
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        )
        w.write_back(self._backend)
        self._finish_step(w, decisions)

    def _keep_unfinished(
        self, w: MasterWeights, decisions: Sequence[Decision], before: list[int]
    ) -> None:
        """Keep the updates that an optimizer's own step made before it raised, as in torch."""
        # The half parameters must follow them, and a repeated call must not apply the same
        # gradients again.
        if _versions(w.optimizer) != before:
            w.write_back(self._backend)
            self._finish_step(w, decisions)
        elif w.masters.changes is not None:
            # writes to ``.data``, which torch does not count
            w.masters.changes.compare_unfinished()

    def _finish_step(self, w: MasterWeights, decisions: Sequence[Decision]) -> None:
        """Note the step or skip of ``w``, and remove ``w`` from its decisions."""
        w.note_step()
        for decision in decisions:
            decision.drop_copies()
        self.pending.end_step(w, decisions)
        self.outcomes[w.optimizer].note_outcome(found_inf_of(decisions))

    def _answer(self, decisions: Sequence[Decision], by_scaler: bool) -> None:
        """Carry out ``Policy.on_nonfinite``, once for each decision."""
        for decision in decisions:
            if decision.phase is Phase.ANSWERED:
                continue
            # Before the response: it may raise, and a second optimizer of the same loss must not
            # report again.
            decision.phase = Phase.ANSWERED
            try:
                self._respond(bool(decision.found_inf))
            except NonFiniteError:
                # The error keeps the user's loop from calling ``update``. If the loop goes on with
                # the next batch, the scaler must be ready for a new iteration.
                if by_scaler:
                    decision.scaler.update()
                raise


def _versions(optimizer: Optimizer) -> list[int]:
    return [param._version for group in optimizer.param_groups for param in group["params"]]
