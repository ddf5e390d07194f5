"""Makes decisions, writes them to the log, and takes them back."""

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
    """The gradients of one optimizer with the decision about them.

    Attributes:
        gradients: the gradients that the step uses.
        grad_scale: 0-d factor on the gradients; None: they are true ones.
        found_inf: 0-d, not 0: skip.
    """

    gradients: Gradients
    grad_scale: Tensor | None
    found_inf: Tensor


class Decider:
    """Makes the decisions of one ``Amp``, each once unless it is taken back.

    Args:
        weights: optimizer to its master weights.
        pending: the pending decisions.
        log: the log, which notes every decision.
        forwards: the batches of the forwards that led to a decision.
        ranks: the processes that decide together.
        skip_outliers: of the policy.
        unseen: looks for writes to weights that torch has not counted.
        clipped: looks for gradients that were clipped with their loss scale, or are all 0.

    Attributes:
        outlier_windows: by which outliers are told, where the policy skips them.
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
        """Decide on the gradients of one optimizer, and of all others that its losses feed."""
        w.refresh()
        if self._unseen.is_due(w, decisions[0].scale.device):
            w.check_dtypes()
            self._unseen.look(*w.unlike())
        gradients = w.gradients()
        for decision in decisions:
            self.decide(decision, undoable=undoable, known={w: gradients})
        if len(decisions) > 1 and w.decision is not None:
            # the gradients of the other losses are true ones, set aside: add these
            w.decision.unscale(w)
            gradients = w.gradients()
        grad_scale = None if w.has_true_gradients else decisions[0].grad_scale
        return Judged(gradients, grad_scale, found_inf_of(decisions))

    def decide(self, decision: Decision, max_norm: float | None = None, **how: Any) -> None:
        """Make the decision and log it, unless it was made before."""
        if decision.is_decided:
            return
        self._make_decision(decision, max_norm, **how)
        try:
            untouched = all(w.is_untouched for w in decision.waiting)
            # forwards that train the others alone wait for their decision
            others = [w for w in self._weights.values() if w not in decision.waiting]
            batches = self._forwards.pop_all([w.parameters() for w in others])
            self._log.decided(decision.scaler.rule, batches, decision.loss, untouched)
        except BaseException:  # the log noted nothing: only the decision is undone
            if not self._ranks.several:
                decision.undo()
            raise

    def _make_decision(self, decision: Decision, max_norm: float | None, **how: Any) -> None:
        """Make the decision on the present gradients."""
        decision.turn = next(self._turns)
        self._look(decision)
        params = [w.parameters() for w in decision.waiting]
        record = self._log.record(params, decision.scale.device, self._ranks.members)
        outlying = self.outlier_windows.limit(decision.scaler, decision.scale.device)
        decision.decide(record, self._ranks, max_norm, outlying=outlying, **how)

    def _look(self, decision: Decision) -> None:
        """Look at the gradients of a decision as the user has left them, in a few steps."""
        waiting = tuple(decision.waiting)
        if not self._clipped.is_due(waiting, decision.scale.device):
            return
        scaled = [w.gradients().lists for w in waiting if w.decision is decision]
        params, grads = (
            [x for lists in scaled for x in lists[name]] for name in ("copies", "grads")
        )
        self._clipped.look(waiting, params, grads, decision.scale)

    def undo(self, decisions: Sequence[Decision]) -> None:
        """Take back decisions that a failed step has made, so that it can be repeated."""
        for decision in reversed(decisions):
            if decision.undo():
                self._log.undo()

    def _give_up(self, decisions: Sequence[Decision]) -> None:
        """Take back early decisions to step, whose gradients the user has cleared.

        Those to skip stay: what they say of the loss scale is true, and a loop that drops batches
        with a norm that is not finite would never see a lower one.
        """
        skip = found_inf_of(decisions)
        for decision in sorted(decisions, key=lambda decision: decision.turn, reverse=True):
            decision.give_up(skip)
        self._log.decided_again(decisions[-1].scaler.rule)

    def veto(self, flag: bool | Tensor) -> None:
        """Have all optimizers that a loss feeds skip where ``flag``, a bool or 0-d, is True.

        A decision that was made early is made again, on the numbers that it was made on. Where
        several ranks decide that is a collective, which the host does not wait for.

        Raises:
            RuntimeError: one of several optimizers that a loss feeds has stepped; or ranks that
                step may be missing here.
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
        for decision in reversed(decided):  # the last one first: each restores what it has found
            decision.undo()
        self._pending.veto(flag)
        for decision in decided:
            self._make_decision(decision, decision.max_norm, undoable=True)
            self._log.decided_again(decision.scaler.rule)


def found_inf_of(decisions: Sequence[Decision]) -> Tensor:
    """Return whether any of the decisions is a skip, 0-d, not 0: skip."""
    if len(decisions) == 1:
        return decisions[0].found_inf
    return torch.stack([d.found_inf for d in decisions]).amax()
