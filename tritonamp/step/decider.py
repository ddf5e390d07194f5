"""Make decisions, log them, and take them back."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.diagnosis.batches import Forwards
from tritonamp.diagnosis.clipping import ClippedGradients
from tritonamp.diagnosis.log import StepLog
from tritonamp.diagnosis.unseen_writes import UnseenWrites
from tritonamp.distributed.ranks import Ranks
from tritonamp.step.decision import Decision
from tritonamp.step.gradients import Gradients
from tritonamp.step.master_weights import MasterWeights
from tritonamp.step.outliers import OutlierWindows
from tritonamp.step.pending import PendingDecisions


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


class Decider:
    """Makes the decisions of one ``Amp``, each decision once unless it is taken back.

    Args:
        weights: optimizer to its master weights.
        pending: pending decisions of the ``Amp``.
        log: log that notes every decision.
        forwards: recorded forwards since the last decision, with their batches.
        ranks: processes that decide together.
        skip_outliers: ``Policy.skip_outliers``.
        unseen: detector of writes to weights that torch does not count.
        clipped: detector of gradients that were clipped with their loss scale, or are all 0.

    Attributes:
        outlier_windows: losses and norms of the last steps, if ``skip_outliers`` is set.
    """

    def __init__(
        self,
        weights: Mapping[Optimizer, MasterWeights],
        pending: PendingDecisions,
        log: StepLog,
        forwards: Forwards,
        ranks: Ranks,
        skip_outliers: float | None,
        unseen: UnseenWrites,
        clipped: ClippedGradients,
    ) -> None:
        self.outlier_windows = OutlierWindows(skip_outliers)
        self._weights = weights
        self._pending = pending
        self._log = log
        self._forwards = forwards
        self._ranks = ranks
        self._unseen = unseen
        self._clipped = clipped
        self._turns = itertools.count()
        pending.on_given_up = self._give_up

    def judge(
        self, w: MasterWeights, decisions: Sequence[Decision], undoable: bool = False
    ) -> Judged:
        """Decide on one optimizer's gradients, and on those of optimizers that share its losses.

        Args:
            w: master weights of the optimizer.
            decisions: decisions that the optimizer waits for.
            undoable: keep copies, so that ``undo`` may follow.
        """
        # Before anything reads the lists: masters take over values that a checkpoint or the
        # user has written to half parameters, and groups that were changed by hand give the
        # optimizer other lists.
        w.refresh()
        if self._unseen.is_due(w, decisions[0].scale.device):
            # both go over all parameters on the host, so they share the few steps that are looked
            # at
            w.check_dtypes()
            self._unseen.look(*w.unlike())
        gradients = w.gradients()
        # The same value for statistics and step: its tensors are asked for their facts once.
        for decision in decisions:
            self.decide(decision, undoable=undoable, known={w: gradients})
        if len(decisions) > 1 and w.decision is not None:
            # the gradients of the other losses are true ones, set aside: add these
            w.decision.unscale(w)
            gradients = w.gradients()
        # True gradients were unscaled with the factors of their own decisions. Another factor would
        # scale them twice.
        grad_scale = None if w.has_true_gradients else decisions[0].grad_scale
        return Judged(gradients, grad_scale, found_inf_of(decisions))

    def decide(self, decision: Decision, max_norm: float | None = None, **how: Any) -> None:
        """Make a decision and log it, unless it was made before.

        Args:
            decision: the decision.
            max_norm: 2-norm to which the gradients are clipped; None: they are not clipped.
            **how: further arguments of ``Decision.decide``.
        """
        if decision.is_decided:
            return
        self._make_decision(decision, max_norm, **how)
        try:
            untouched = all(w.is_untouched for w in decision.waiting)
            # A forward that trains other optimizers alone belongs to their decision. A GAN makes
            # its fakes before the discriminator's step, and goes back through them after it.
            others = [w for w in self._weights.values() if w not in decision.waiting]
            batches = self._forwards.pop_all([w.parameters() for w in others])
            self._log.decided(decision.scaler.rule, batches, untouched)
        except BaseException:
            # The log has noted nothing, so only the decision is undone. Several ranks keep it: the
            # others may not have failed, and this one would decide again without them.
            if not self._ranks.several:
                decision.undo()
            raise

    def _make_decision(self, decision: Decision, max_norm: float | None, **how: Any) -> None:
        """Make a decision on the present gradients."""
        # Numbers of turns order decisions that move the same scale, record and window. They are
        # taken back in the reverse order, because each restores the values that it has found.
        decision.turn = next(self._turns)
        self._look(decision)
        params = [w.parameters() for w in decision.waiting]
        record = self._log.record(params, decision.scale.device, self._ranks.members)
        outlying = self.outlier_windows.limit(decision.scaler, decision.scale.device)
        decision.decide(record, self._ranks, max_norm, outlying=outlying, **how)

    def _look(self, decision: Decision) -> None:
        """Look, in a few steps, for gradients that the user has clipped or set to 0."""
        waiting = tuple(decision.waiting)
        if not self._clipped.is_due(waiting, decision.scale.device):
            return
        # Only gradients that still carry the scale: clipping true gradients is right.
        scaled = [w.gradients().lists for w in waiting if w.decision is decision]
        params, grads = (
            [x for lists in scaled for x in lists[name]] for name in ("copies", "grads")
        )
        self._clipped.look(waiting, params, grads, decision.scale)

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
        self._log.decided_again(decisions[-1].scaler.rule)

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
        if self._ranks.several and self._ranks.may_be_missing:
            raise RuntimeError(
                "amp.veto() inside of model.join(): expected all ranks, got some that may have run "
                "out of batches and would step all the same: skip the batch on all ranks instead"
            )
        decided = sorted(self._pending.decided(), key=lambda decision: decision.turn)
        if not all(decision.can_be_undone for decision in decided):
            raise RuntimeError(
                "amp.veto() after an optimizer.step(): expected a call before the first of the "
                "optimizers that a loss feeds has stepped, since all of them step, or none: call "
                "amp.veto(flag) directly after amp.backward(loss)"
            )
        # The last decision first, because each restores the values that it has found.
        for decision in reversed(decided):
            decision.undo()
        self._pending.veto(flag)
        for decision in decided:
            # in the order of before, with the same norm: without a veto the bits are those of one
            # decision
            self._make_decision(decision, decision.max_norm, undoable=True)
            self._log.decided_again(decision.scaler.rule)


def found_inf_of(decisions: Sequence[Decision]) -> Tensor:
    """Return a 0-d flag that is not 0 if any of the decisions is a skip."""
    # almost every step: no launch
    if len(decisions) == 1:
        return decisions[0].found_inf
    return torch.stack([d.found_inf for d in decisions]).amax()
