"""One decision per loss: all optimizers that the loss feeds step on its gradients, or none does."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritonamp.distributed.ranks import Ranks
from tritonamp.kernels._decision import (
    CLEAN,
    LIMITS,
    RECORD,
    VETOED,
    Evidence,
    Record,
    Undo,
    Verdict,
    new_verdicts,
    nonfinite_flag,
)
from tritonamp.kernels._loss_scale import ScaleRule
from tritonamp.kernels._squares import NO_SQUARES, OF_ANY_MEAN, squares_of
from tritonamp.kernels._transfer import transfer
from tritonamp.kernels.decide import DECIDE, decide
from tritonamp.kernels.outliers import Limit, outliers
from tritonamp.scaler import GradScaler
from tritonamp.step.gradients import Gradients, Stats
from tritonamp.step.master_weights import MasterWeights
from tritonamp.step.steady_step import SteadyStep

_optimizer = operator.attrgetter("optimizer")


class Phase(Enum):
    """Phase of a decision.

    ::

        OPEN     --judge--> DECIDED --answer--> ANSWERED
        DECIDED  --the step raised, or a veto: undo--> REOPENED --judge--> DECIDED
        any      --the last optimizer that waited has stepped, or was cleared--> over

    A decision that is over without a step or skip was given up. If it was to step, it is taken
    back.
    """

    OPEN = "further micro-batches may join it"
    REOPENED = "undone: to be decided again, on the same gradients"
    DECIDED = "found_inf, norm and grad_scale are there"
    ANSWERED = "decided, and the policy has said what is to be done about a skip"


class Decision:
    """The life of one scaled loss, up to the step or skip of the optimizers that it feeds.

    Micro-batches share one decision. ``Phase`` lists the phases of a decision, ``GradientState``
    the states of the gradients.

    Attributes:
        scaler: scaler of the loss.
        scale: loss scale of the backward, 0-d: an alias of the scaler's until the scale moves. Not
            valid while the decision is made.
        loss_nonfinite: 0-d flag, 1 if the loss is inf or NaN, VETOED after a veto; the maximum over
            micro-batches. None: ``judge`` judges ``loss``.
        loss: sum of the micro-batches' losses, 0-d; None: the loss is not known.
        waiting: master weights of the optimizers that have not stepped yet.
        moves_scale: whether ``judge`` moves the scale; otherwise the user calls ``scaler.update``.
        phase: present phase.
        turn: number of this decision among all decisions, in the order in which they were made.
        blocks: number of open ``with scale_loss`` blocks.
        zeroed: waiting optimizers whose gradients the user has cleared.
        found_inf: 0-d flag; the optimizers skip if it is not 0. Like ``norm`` and ``grad_scale`` it
            is valid once ``is_decided``.
        norm: 2-norm of the unscaled gradients, 0-d.
        grad_scale: factor that unscales and clips a scaled gradient, 0-d.
        max_norm: 2-norm to which the gradients are clipped; None: they are not clipped.
        rule: rule of the loss scale; set by ``judge``.
        veto_reason: why the library has vetoed it; "" if it has not.
        has_gradient_in_loss: ``GradScaler.has_gradient_in_loss``, of any of its losses.
    """

    rule: ScaleRule
    veto_reason = ""
    has_gradient_in_loss = False

    def __init__(
        self,
        scaler: GradScaler,
        verdict: Verdict,
        loss_nonfinite: Tensor | None,
        waiting: Iterable[MasterWeights],
        moves_scale: bool,
        backend: str,
    ) -> None:
        self.scaler = scaler
        self.scale = scaler.lend_scale(self)
        self._borrows = True
        self.loss_nonfinite = loss_nonfinite
        self.loss: Tensor | None = None
        self.waiting = list(waiting)
        self.moves_scale = moves_scale
        self.phase = Phase.OPEN
        self.turn = 0
        self.blocks = 0
        self.zeroed: set[MasterWeights] = set()
        self.max_norm: float | None = None
        self._verdict = verdict
        _, self.found_inf, self.norm, self.grad_scale = verdict
        self._found_earlier: Tensor | None = None
        # Valid until the next ``grad_stats`` of the same optimizer, which writes to the same
        # memory.
        self._stats: dict[MasterWeights, Stats] = {}
        # Copies, for gradients that were unscaled since. A decision that is made again needs their
        # statistics with the scale, which the tensors no longer have.
        self._judged: dict[MasterWeights, Stats] = {}
        self._undo: Undo | None = None
        self._backend = backend

    @property
    def can_be_undone(self) -> bool:
        """Whether ``undo`` would take the decision back, since no optimizer has acted on it."""
        return self.is_decided and self._undo is not None

    @property
    def is_decided(self) -> bool:
        """Whether ``found_inf``, ``norm`` and ``grad_scale`` are valid."""
        return self.phase in (Phase.DECIDED, Phase.ANSWERED)

    def keep_scale(self) -> None:
        """Copy the scale, which is about to move, unless this decision has moved it before.

        Such a decision restores the scale if it is undone.
        """
        if self._borrows and self.waiting and not (self.is_decided and self.moves_scale):
            # the same tensor with other memory, because autograd has saved it for the backward
            self.scale.data = self.scale.clone()
            self._borrows = False

    def add_loss(self, loss: Tensor, at_once: bool) -> None:
        """Add the loss of a micro-batch to ``loss``.

        Args:
            loss: a tensor of any shape, in FP32 or wider, without gradients.
            at_once: judge the loss now; otherwise ``judge`` judges the loss of a single batch.
        """
        alone = self.loss is None and self.loss_nonfinite is None
        device = self.scale.device
        depends = self.scaler.take_graph()
        if alone and not (at_once or depends) and loss.device == device and _is_number(loss):
            self.loss = loss
            return
        nonfinite = transfer(nonfinite_flag(loss), device)
        if depends:  # on the scale, which may be too high: what was scaled is judged instead
            self.has_gradient_in_loss = True
            nonfinite = transfer(self.scaler.take_loss_nonfinite(), device)
        # each loss by itself, because a sum of finite ones may be inf
        self.loss_nonfinite = nonfinite if alone else torch.maximum(self._flag_of_loss(), nonfinite)
        loss = transfer(loss, device)
        if loss.dim():
            loss = loss.sum()
        self.loss = loss if self.loss is None else self.loss + loss

    def _flag_of_loss(self) -> Tensor:
        """Return ``loss_nonfinite``. Judge the loss now if ``judge`` was to do so."""
        if self.loss_nonfinite is None:
            known = torch.zeros_like(self.scale) if self.loss is None else self.loss
            self.loss_nonfinite = nonfinite_flag(known)
        return self.loss_nonfinite

    def veto(self, flag: bool | Tensor, reason: str = "") -> None:
        """Have the optimizers skip if ``flag`` is True. Call it before ``judge``.

        Args:
            flag: a bool, or a 0-d bool tensor on any device.
            reason: why the library vetoes; "": the user does.
        """
        self.veto_reason = reason or self.veto_reason
        # A bool is filled in on the device, because a copy from main memory would wait.
        if isinstance(flag, bool):
            wanted = torch.full_like(self.scale, VETOED * flag)
        else:
            wanted = transfer(flag, self.scale.device) * VETOED
        # Not in place: the flag may be the scaler's own, which learns of a veto by ``note_flag``
        # when the decision is made.
        self.loss_nonfinite = torch.maximum(self._flag_of_loss(), wanted)

    def unscale(self, weights: MasterWeights) -> None:
        """Unscale one optimizer's gradients and keep their statistics. Call it after ``judge``."""
        self._keep_stats(weights, self._stats[weights])
        weights.unscale_(self.grad_scale)

    def unscale_early(self, weights: MasterWeights) -> None:
        """Unscale one optimizer's gradients, because another loss is about to add its own."""
        if self.is_decided:
            self.unscale(weights)
            return
        verdict = new_verdicts(1, self.scale.device)[0]
        rule = self.scaler.rule
        # The gradients carry one scale at a time. Their statistics are taken now, since the
        # decision comes after the other loss has added gradients with another scale.
        stats = self._stats_of(weights)
        flag = self.loss_nonfinite
        evidence = Evidence(*stats, flag, flag, self.loss)
        # Neither scale nor record moves: the loss is decided once, when all its gradients are
        # known. Squares are judged then, too, with the gradients of all optimizers.
        how = None, None, rule, NO_SQUARES, None, verdict, self._backend
        decide(evidence, self.scale, *how)
        self._keep_stats(weights, stats)
        earlier = self._found_earlier
        # Micro-batches may be unscaled early one after another, and ``_judged`` has statistics of
        # the last one only: inf or NaN of an earlier one is remembered here.
        found = verdict.found_inf
        self._found_earlier = found if earlier is None else torch.maximum(earlier, found)
        weights.unscale_(verdict.grad_scale)

    def judge(
        self,
        record: Record,
        ranks: Ranks,
        max_norm: float | None = None,
        undoable: bool = False,
        outlying: Limit | None = None,
        known: Mapping[MasterWeights, Gradients | SteadyStep] | None = None,
    ) -> None:
        """Judge the gradients of all waiting optimizers, and move the scale.

        Args:
            record: memory that receives the outcome.
            ranks: processes that decide together.
            max_norm: 2-norm to which the gradients of all optimizers are clipped together.
            undoable: keep copies, so that ``undo`` may follow. Eager torch in one process always
                keeps copies.
            outlying: window of the scaler with the limit for outliers; None: no step is an outlier.
            known: by optimizer, gradients that the caller has already, or the last step if this one
                is like it.
        """
        self.max_norm = max_norm
        stats: dict[MasterWeights, Stats] = {}
        for w in self.waiting:
            stats[w] = self._stats_of(w, None if known is None else known.get(w))
        self._stats = stats
        each = [*stats.values()]
        amax, square_sum = each[0] if len(each) == 1 else self._joined(each)
        flag = self.loss_nonfinite
        evidence = Evidence(amax, square_sum, flag, flag, self.loss)
        # Eager torch decides and steps by many operations, any of which may raise (out of memory,
        # Ctrl-C), so it can undo every step. A kernel is one launch, and on a GPU a step that
        # raises is undone only if it was asked for: it would be memory of every step.
        eager = not DECIDE.uses_triton(self._backend, self.scale)
        if self.moves_scale:
            self.scaler.before_move(by=self)
        # With ``backoff_on_fault`` a fault moves the scale as an overflow does, while the record
        # tells faults from overflows. So the scale moves by a second call, which ignores a fault's
        # flag.
        apart = self.moves_scale and self.scaler.backoff_on_fault
        state = self.scaler.scale_state if self.moves_scale and not apart else None
        if undoable or (eager and not ranks.several):
            others = [self.scaler.scale_memory] if apart else []
            if outlying is not None:
                others += [outlying.window, record.numbers[LIMITS:RECORD]]
            self._undo = Undo(record, state, others)
        if self._found_earlier is not None or ranks.several or outlying is not None:
            evidence = self._with_flags(evidence, ranks, record, outlying)
        self.rule = self.scaler.rule
        # A stage of a pipeline does not know the optimizers of other stages. All take the bound
        # that holds for any mean of squares, so that they decide alike.
        bound = OF_ANY_MEAN if ranks.staged else squares_of(map(_optimizer, self.waiting))
        how = max_norm, state, self.rule, bound, record, self._verdict, self._undo
        DECIDE.run(self._backend, not eager, evidence, self.scale, *how)
        amax = evidence.amax
        if apart:
            self.scaler.note_amax(amax)
            self.scaler.move_scale(self.found_inf, self._verdict.flag)
        # the user's ``scaler.update`` moves the scale, by flags and magnitudes of all optimizers
        if not self.moves_scale:
            self.scaler.note_flag(self._verdict.flag)
            for weights in self.waiting:
                self.scaler.record_decision(weights.optimizer, self.found_inf, amax)
        # last: after an exception above the decision is still to be made
        self.phase = Phase.DECIDED

    def _with_flags(
        self, evidence: Evidence, ranks: Ranks, record: Record, outlying: Limit | None
    ) -> Evidence:
        """Return the evidence of all ranks, with flags, of which an outlier is one."""
        flag = self._flag_of_loss()
        earlier = flag if self._found_earlier is None else self._found_earlier
        evidence = evidence._replace(loss_nonfinite=flag, found_earlier=earlier)
        loss, squares = self._loss(), evidence.square_sum
        # Before outliers and the decision itself. Both have to see the same numbers, to the last
        # bit, on all ranks, or one rank would step where another one skips.
        if ranks.several:
            taken = record.numbers[CLEAN]
            agreed, loss, squares = ranks.agree(evidence, self.scale, taken, loss)
            assert agreed.loss_nonfinite is not None
            # in place, because the flag is the scaler's own where the user has scaled the loss
            flag.copy_(agreed.loss_nonfinite)
            evidence = agreed._replace(loss_nonfinite=flag, loss=self.loss)
        if outlying is not None:
            # ``outliers`` reads one flag and writes another
            told = torch.empty_like(flag)
            known = evidence._replace(square_sum=squares)
            outliers(known, self.scale, loss, outlying, record.numbers, told, self._backend)
            evidence = evidence._replace(loss_nonfinite=told)
        return evidence

    def _loss(self) -> Tensor:
        """Return the loss, 0-d float32 on the device of the scale; NaN if the loss is not known."""
        if self.loss is None:
            return torch.full_like(self.scale, torch.nan)
        return self.loss.float()

    def undo(self) -> bool:
        """Restore scale and record as they were before ``judge``, which may be called again.

        Returns:
            whether a decision was taken back.
        """
        moved = self.can_be_undone
        # also after a ``judge`` that failed half-way, when nothing is decided
        self._restore()
        if moved:
            self.phase = Phase.REOPENED
        return moved

    def _restore(self, unless: Tensor | None = None) -> None:
        """Restore scale, record and window, as ``Undo`` does."""
        if self._undo is not None:
            if self.moves_scale:
                self.scaler.before_move(by=self)
            self._undo(unless)
            self._undo = None

    def give_up(self, skip: Tensor) -> None:
        """Restore scale and record, because no step follows.

        Args:
            skip: 0-d flag; scale and record stay as they are if it is not 0.
        """
        self._restore(unless=skip)

    def drop_copies(self) -> None:
        """Drop the copies, because an optimizer has stepped or skipped."""
        if self._undo is not None:
            self._undo.drop()
            self._undo = None

    def _keep_stats(self, weights: MasterWeights, stats: Stats) -> None:
        """Keep copies of statistics, because the kernels write the next ones to the same memory."""
        amax, square_sum = stats
        self._judged[weights] = amax.clone(), square_sum.clone()

    def _joined(self, stats: Sequence[Stats]) -> Stats:
        # ``torch.cat`` refuses an empty list
        empty = torch.zeros(0, device=self.scale.device)
        amax, square_sum = zip(*stats, strict=True) if stats else ((), ())
        return torch.cat([empty, *amax]), torch.cat([empty, *square_sum])

    def _stats_of(
        self, weights: MasterWeights, known: Gradients | SteadyStep | None = None
    ) -> Stats:
        """Return statistics of one optimizer's gradients that carry, or carried, this scale."""
        if weights.decision is not self:
            # The gradients were unscaled early, or cleared. The present ones are of another loss.
            device = self.scale.device
            nothing = torch.zeros(len(weights.parameters()), device=device)
            return self._judged.get(weights, (nothing, torch.zeros(0, device=device)))
        return weights.statistics(self, known, self._backend)


def _is_number(loss: Tensor) -> bool:
    """Tell whether a kernel can read the loss as one number."""
    is_wrapper = type(loss) is not Tensor and is_traceable_wrapper_subclass(loss)
    return not (is_wrapper or loss.dim()) and loss.dtype in (torch.float32, torch.float64)
