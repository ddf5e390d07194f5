"""Pending decisions: a loss opens one, and it ends when all its optimizers have stepped."""

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.distributed.ranks import Ranks
from tritonamp.distributed.sharding import full_tensor
from tritonamp.kernels._decision import Verdict, new_verdicts
from tritonamp.kernels._dynamo import between_graphs
from tritonamp.kernels._inference import leaves_inference_mode
from tritonamp.kernels._transfer import transfer
from tritonamp.kernels.device import is_capturing
from tritonamp.policy import Policy
from tritonamp.scaler import GradScaler, widened
from tritonamp.step.decision import Decision, Phase
from tritonamp.step.decision_log import DecisionLog
from tritonamp.step.forwards import Forwards
from tritonamp.step.gradients import Gradients
from tritonamp.step.master_weights import MasterWeights
from tritonamp.step.outcome import Outcome, found_inf_of
from tritonamp.step.outliers import OutlierWindows
from tritonamp.step.refused import ALONE, no_backward
from tritonamp.step.steady_step import SteadyStep

_VERDICTS = 16  # that are made at once
_params = operator.attrgetter("masters.stepped.params")


class PendingDecisions:
    """The decisions of one ``Amp`` that optimizers wait for.

    Args:
        policy: policy of the ``Amp``.
        backend: "auto", "triton" or "eager".
        scaler: scaler that the user may drive in a ``torch.amp`` loop.
        weights: optimizer to its master weights.
        ranks: processes that decide together.
        log: log of all decisions.
        forwards: recorded forwards since the last decision.

    Attributes:
        weights, ranks: the arguments.
        outlier_windows: losses and norms of the last steps, if the policy skips outliers.
        before_decision: function that is called with each decision that is about to be made, and
            may veto it; None: nothing is called.
    """

    def __init__(
        self,
        policy: Policy,
        backend: str,
        scaler: GradScaler,
        weights: dict[Optimizer, MasterWeights],
        ranks: Ranks,
        log: DecisionLog,
        forwards: Forwards,
    ) -> None:
        self.outlier_windows = OutlierWindows(policy.skip_outliers)
        self.before_decision: Callable[[Decision], None] | None = None
        self._policy = policy
        self._backend = backend
        self._scaler = scaler
        self.weights = weights
        self.ranks = ranks
        self._log = log
        self._forwards = forwards
        self._turns = itertools.count()
        self._verdicts: list[Verdict] = []  # of later decisions
        self._decisions: list[Decision] = []
        self._has_last_stage = False
        # vetoes of losses that the user has scaled, because the step opens their decision
        self._vetoes: dict[MasterWeights, bool | Tensor] = {}

    @between_graphs  # the block runs the user's code
    @contextlib.contextmanager
    def open_decision(
        self, scaler: GradScaler, loss: Tensor, feeds: Iterable[Optimizer]
    ) -> Iterator[Tensor]:
        """Yield the scaled loss, whose backward runs inside the ``with`` block.

        A loss joins an open decision that has the same scaler and an optimizer in common with it
        (micro-batches). Any other loss opens a decision of its own.

        Args:
            scaler: scaler of the loss.
            loss: a tensor of any shape.
            feeds: optimizers that the loss feeds.
        """
        if self.ranks.staged and scaler is not self._scaler:
            raise RuntimeError(
                "loss_id: expected 0 in a pipeline, whose stages take one decision for all losses "
                "between two steps: give losses the same loss_id and no scaler of their own"
            )
        weights = [self.weights[o] for o in feeds]
        if type(loss) is not Tensor:
            # Under tensor parallelism each rank may have a summand of the loss. Only the sum is
            # judged.
            loss = full_tensor(loss)
        joined = None
        if self._decisions:
            # Before the search for an open decision: a batch whose gradients the user has cleared
            # is not judged with this loss.
            self._end_zeroed(weights)
            joined = self._open_one(scaler, weights)
        if self._forwards.follows_losses:
            self._forwards.note_loss(loss)
        # micro-batches add up their gradients, so they have one scale
        decision = joined or self._new_decision(scaler, loss.device, None, [], True)
        wide = widened(loss)
        scaled = wide * transfer(decision.scale, loss.device)
        if joined is None:
            self._decisions.append(decision)
        for w in weights:
            if w not in decision.waiting:
                decision.waiting.append(w)
            if w.decision is not decision:
                # gradients carry one scale at a time
                if w.decision is not None:
                    w.decision.unscale_early(w)
                w.begin_scaled(decision)
        # kept, so that a failed backward leaves the micro-batches before it as they were
        before = decision.loss_nonfinite, decision.loss
        # Several ranks judge at once: clients average a loss over ranks, in place, before the step.
        decision.add_loss(wide.detach(), at_once=self.ranks.several)
        decision.blocks += 1
        try:
            yield scaled
        except BaseException:
            # The backward failed, so this loss does not count. Its gradients stay where they were
            # added to those of earlier micro-batches, because a sum cannot be taken apart.
            decision.loss_nonfinite, decision.loss = before
            if joined is None:
                for w in weights:
                    w.undo_begin()
                    self._remove(w, [decision])
            raise
        finally:
            decision.blocks -= 1

    def _open_one(self, scaler: GradScaler, weights: Sequence[MasterWeights]) -> Decision | None:
        """Return the open decision that a loss joins; None: the loss opens one of its own."""
        for decision in self._decisions:
            is_open = decision.scaler is scaler and decision.phase is Phase.OPEN
            if is_open and not set(weights).isdisjoint(decision.waiting):
                return decision
        return None

    def _new_decision(
        self,
        scaler: GradScaler,
        device: torch.device,
        loss_nonfinite: Tensor | None,
        waiting: Iterable[MasterWeights],
        moves_scale: bool,
    ) -> Decision:
        """Return a decision. The arguments are those of ``Decision``."""
        where = scaler.scale_tensor(device).device
        known = self._verdicts
        if not known or known[-1].found_inf.device != where or is_capturing(where):
            known = self._more_verdicts(where)
        verdict = known.pop()
        return Decision(scaler, verdict, loss_nonfinite, waiting, moves_scale, self._backend)

    @leaves_inference_mode
    def _more_verdicts(self, device: torch.device) -> list[Verdict]:
        if is_capturing(device):  # each replay writes there
            return new_verdicts(1, device)
        self._verdicts = new_verdicts(_VERDICTS, device)
        return self._verdicts

    def begin_backward(self, loss: Tensor) -> Tensor:
        """Open or join the decision of a pipeline's loss whose backward begins.

        Args:
            loss: loss of a micro-batch.

        Returns:
            the loss scale, 0-d.

        Raises:
            RuntimeError: gradients of earlier micro-batches were unscaled.
        """
        if any(w.has_true_gradients for w in self.weights.values()):
            raise RuntimeError(
                "amp.unscale_() was called between two schedule.step() of a pipeline: expected it "
                "after the last one before optimizer.step(), since earlier stages would add scaled "
                "gradients to true ones"
            )
        self._has_last_stage = True
        # The schedule runs the backward after this call returns, and may interleave it with others.
        with self.open_decision(self._scaler, loss, self.weights):
            pass
        return next(d.scale for d in self._decisions if d.phase is Phase.OPEN)

    @property
    def _is_earlier_stage(self) -> bool:
        """Whether only other ranks compute losses."""
        return self.ranks.staged and not self._has_last_stage

    def _end_zeroed(self, weights: list[MasterWeights]) -> None:
        """End decisions whose gradients the user has cleared, by the optimizer or by the model."""
        for w in weights:
            # the backward of an open block is still to come, so missing gradients say nothing
            waited = [d for d in self._decisions if d.blocks == 0 and w in d.waiting]
            # FSDP2 hides gradients of micro-batches that it does not synchronise, and some
            # schedules of pipelines make gradients of weights later. Missing gradients say nothing
            # there either: only a call of the optimizer's ``zero_grad`` counts.
            hidden = self.ranks.gathered or self.ranks.staged
            if waited and (hidden or w.has_gradients()):
                waited = [d for d in waited if w in d.zeroed]
            if waited:
                self.leave_decisions(w, waited)

    def zeroed(self, optimizer: Optimizer, set_to_none: bool) -> None:
        """Clear gradients of half parameters, because the user clears the optimizer's gradients.

        A pending decision ends here, or at the next backward.

        Args:
            optimizer: optimizer whose ``zero_grad`` was called.
            set_to_none: as for ``zero_grad``.
        """
        w = self.weights[optimizer]
        w.zero_grad(set_to_none)
        self._vetoes.pop(w, None)
        pending = [d for d in self._decisions if w in d.waiting]
        # A decision that was made, or that a step by a scaler has opened, has had its backward. The
        # gradients of any other one may still be on their way: losses are often computed, and
        # scaled, before ``zero_grad``.
        over = [d for d in pending if d.is_decided or not d.moves_scale]
        for decision in pending:
            if decision not in over:
                decision.zeroed.add(w)
        if over:
            self.leave_decisions(w, over)

    @property
    def is_in_backward(self) -> bool:
        """Whether a ``with`` block of ``open_decision`` is open."""
        return any(decision.blocks for decision in self._decisions)

    def is_scaled(self) -> bool:
        """Tell whether a backward that runs now may be that of a scaled loss."""
        by_hand = self._scaler.loss_nonfinite is not None
        # The backward after ``scaler.scale(loss)``, or of a schedule, runs outside of any block of
        # ours.
        return self.is_in_backward or by_hand or self.ranks.staged

    def fed_optimizers(self) -> list[Optimizer]:
        """Return the optimizers that a loss has fed since their last step."""
        waiting: set[MasterWeights] = set()
        for decision in self._decisions:
            waiting.update(decision.waiting)
        if len(waiting) == len(self.weights):
            return list(self.weights)
        by_hand = self._scaler.loss_nonfinite is not None
        return [
            optimizer
            for optimizer, w in self.weights.items()
            if w in waiting or self._is_earlier_stage or (by_hand and w.with_gradient() > 0)
        ]

    # making decisions, and taking them back

    def decide(
        self,
        decision: Decision,
        max_norm: float | None = None,
        undoable: bool = False,
        known: Mapping[MasterWeights, Gradients | SteadyStep] | None = None,
    ) -> None:
        """Make a decision and log it, unless it was made before.

        Args:
            decision: the decision.
            max_norm: 2-norm to which the gradients are clipped; None: they are not clipped.
            undoable: as for ``Decision.judge``.
            known: as for ``Decision.judge``.
        """
        if decision.is_decided:
            return
        if self.before_decision is not None:
            self.before_decision(decision)
        looked = self._log.look(decision)
        self._judge(decision, max_norm, undoable, known)
        try:
            waiting, untouched = decision.waiting, True
            others: list[list[Tensor]] = []
            for w in waiting:
                untouched = untouched and w.is_untouched
            if len(waiting) < len(self.weights):
                # A forward that trains other optimizers alone belongs to their decision. A GAN
                # makes its fakes before the discriminator's step, and goes back through them after
                # it.
                others = [w.parameters() for w in self.weights.values() if w not in waiting]
            forwards = self._forwards.pop_all(others)
            why = decision.veto_reason, decision.has_gradient_in_loss
            self._log.note(Outcome(decision.rule, forwards, untouched, *why), looked)
        except BaseException:
            # The log has noted nothing, so only the decision is undone. Several ranks keep the
            # decision, because ranks that have not failed would not decide again.
            if not self.ranks.several:
                decision.undo()
            raise

    def _judge(
        self,
        decision: Decision,
        max_norm: float | None,
        undoable: bool,
        known: Mapping[MasterWeights, Gradients | SteadyStep] | None = None,
    ) -> None:
        """Judge the present gradients. The arguments are those of ``decide``."""
        # Numbers of turns order decisions that move the same scale, record and window. They are
        # taken back in the reverse order, because each restores the values that it has found.
        decision.turn = next(self._turns)
        params, device = list(map(_params, decision.waiting)), decision.scale.device
        record = self._log.device_record.place(params, device, self.ranks.members)
        outlying = None
        if self._policy.skip_outliers is not None:
            outlying = self.outlier_windows.limit(decision.scaler, device)
        decision.judge(record, self.ranks, max_norm, undoable, outlying, known)

    def undo(self, decisions: Sequence[Decision]) -> None:
        """Take back decisions that a failed step has made, so that the step can be repeated."""
        for decision in reversed(decisions):
            # A decision without copies stays decided, and its entry in the log stays with it.
            if decision.undo():
                self._log.undo()

    def _give_up(self, decisions: Sequence[Decision]) -> None:
        """Take back early decisions to step, because the user has cleared their gradients.

        Decisions to skip stay. Their gradients did overflow, and a loop that drops batches whose
        norm is not finite would otherwise never see a lower scale.
        """
        # The device knows whether to skip, and the host does not ask: the flag goes along as a
        # tensor.
        skip = found_inf_of(decisions)
        for decision in sorted(decisions, key=lambda decision: decision.turn, reverse=True):
            decision.give_up(skip)
        self._log.note_again(decisions[-1].scaler.rule)

    def veto(self, flag: bool | Tensor) -> None:
        """Have all optimizers that a loss feeds skip if ``flag`` is True.

        A decision that was made early is made again, on the same statistics. Several ranks decide
        again by a collective, for which the host does not wait.

        Args:
            flag: a bool, or a 0-d bool tensor on any device.

        Raises:
            RuntimeError: one of several optimizers that a loss feeds has stepped; or ranks may be
                missing here, which would step all the same.
        """
        if self.ranks.several and self.ranks.may_be_missing:
            raise RuntimeError(
                "amp.veto() inside of model.join(): expected all ranks, got some that may have run "
                "out of batches and would step all the same: skip the batch on all ranks instead"
            )
        decided = sorted((d for d in self._decisions if d.is_decided), key=lambda d: d.turn)
        if not all(decision.can_be_undone for decision in decided):
            raise RuntimeError(
                "amp.veto() after an optimizer.step(): expected a call before the first of the "
                "optimizers that a loss feeds has stepped, since all of them step, or none: call "
                "amp.veto(flag) directly after amp.backward(loss)"
            )
        # The last decision first, because each restores the values that it has found.
        for decision in reversed(decided):
            decision.undo()
        for decision in self._decisions:
            decision.veto(flag)
        waiting = {w for decision in self._decisions for w in decision.waiting}
        for w in {self.weights[o] for o in self.fed_optimizers()} - waiting:
            self._vetoes[w] = self._vetoes[w] | flag if w in self._vetoes else flag
        for decision in decided:
            # in the order of before, with the same norm: without a veto the bits are those of one
            # decision
            self._judge(decision, decision.max_norm, True)
            self._log.note_again(decision.rule)

    # which decisions an optimizer waits for

    def decisions_of(self, optimizer: Optimizer, moves_scale: bool) -> list[Decision]:
        """Return the decisions that ``optimizer`` waits for.

        A decision is opened for gradients that did not come through ``open_decision``: after
        ``scaler.scale(loss).backward()``, or after a plain ``loss.backward()`` of a level without a
        scale.

        Args:
            optimizer: an enabled optimizer.
            moves_scale: whether the decision moves the scale, because no ``scaler.update`` follows.

        Returns:
            the decisions; none if there are no gradients, where the step is a no-op as in torch.

        Raises:
            RuntimeError: the level has a scale, and no backward of a scaled loss has run; or a
                stage of a pipeline would decide alone.
        """
        w = self.weights[optimizer]
        if self.ranks.ran_as_stage and not self.ranks.staged:
            raise RuntimeError(ALONE)
        found = [d for d in self._decisions if w in d.waiting]
        # The loss reached none of these parameters, or the user has cleared their gradients. Either
        # way the optimizer waits no longer, and a decision with other optimizers is theirs alone.
        if not w.has_gradients() and self._is_without_gradients(w, found):
            self.leave_decisions(w, found)
            return []
        if found or w.has_true_gradients:
            return found
        return [self._open_by_step(w, moves_scale)]

    def _open_by_step(self, w: MasterWeights, moves_scale: bool) -> Decision:
        """Open a decision for gradients that did not come through ``open_decision``."""
        # not None if the user has called ``scaler.scale`` since the last ``update``
        by_hand = self._scaler.loss_nonfinite
        has_gradient_in_loss = self._scaler.has_gradient_in_loss
        if by_hand is None and self._policy.scales_loss and not self._may_lack_loss(w):
            raise RuntimeError(no_backward(w.with_gradient()))
        device = next((p.device for p in w.parameters()), torch.device("cpu"))
        waiting, flag = [w], by_hand
        # No ``update`` will read and reset the flag of these losses, so this decision takes it
        # over.
        if by_hand is not None and moves_scale:
            flag = self._scaler.take_loss_nonfinite()
        # No ``update`` will join the flags of the optimizers. So these wait for one decision, and
        # all of them step, or none.
        if self.ranks.staged or (by_hand is not None and moves_scale):
            waiting += self._others_with_gradients(w)
        moves_scale |= by_hand is None
        decision = self._new_decision(self._scaler, device, flag, waiting, moves_scale)
        decision.has_gradient_in_loss = has_gradient_in_loss
        self._decisions.append(decision)
        for waits in waiting:
            waits.begin_scaled(decision)
            if waits in self._vetoes:
                decision.veto(self._vetoes.pop(waits))
        return decision

    def _is_without_gradients(self, w: MasterWeights, found: Sequence[Decision]) -> bool:
        """Tell whether ``w``, for which ``has_gradients`` is False, has nothing to step on.

        Ranks that train together decide about every loss, because another rank may have gradients.
        Stages of a pipeline decide at every step, because some stages know of no loss.
        """
        if w.all_gradients():
            return False
        knows = found or self._scaler.loss_nonfinite is not None or self.ranks.staged
        return not (self.ranks.several and knows)

    def _may_lack_loss(self, w: MasterWeights) -> bool:
        """Tell whether ``w`` may decide without a scaled loss, as stages of a pipeline may."""
        return self._is_earlier_stage or (self.ranks.staged and not w.with_gradient())

    def _others_with_gradients(self, w: MasterWeights) -> list[MasterWeights]:
        taken = {w, *(waits for d in self._decisions for waits in d.waiting)}
        others = [o for o in self.weights.values() if o not in taken]
        return [o for o in others if self.ranks.staged or o.with_gradient()]

    def leave_decisions(self, w: MasterWeights, decisions: Sequence[Decision]) -> None:
        """Remove ``w``, whose gradients were cleared, from decisions.

        A decision that no other optimizer waits for is given up.

        Args:
            w: master weights of an optimizer.
            decisions: decisions that the optimizer waits for.
        """
        given_up = [d for d in decisions if d.can_be_undone and d.waiting == [w]]
        if given_up:
            self._give_up(given_up)
        self.end_step(w, decisions)

    def end_step(self, w: MasterWeights, decisions: Sequence[Decision]) -> None:
        """Remove ``w`` from decisions, after a step or skip, which has dropped their copies.

        Args:
            w: master weights of an optimizer.
            decisions: decisions that the optimizer has waited for.
        """
        w.clear()
        self._vetoes.pop(w, None)
        self._remove(w, decisions)

    def _remove(self, w: MasterWeights, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            decision.zeroed.discard(w)
            if w in decision.waiting:
                decision.waiting.remove(w)
            if not decision.waiting and decision in self._decisions:
                self._decisions.remove(decision)
