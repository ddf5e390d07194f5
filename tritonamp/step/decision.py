"""One decision per loss: all optimizers that the loss feeds step on its gradients, or none does."""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor

from tritonamp.distributed.ranks import Ranks
from tritonamp.kernels._squares import NO_SQUARES, OF_ANY_MEAN, squares_of
from tritonamp.kernels._transfer import transfer
from tritonamp.kernels.decide import CLEAN, DECIDE, VETOED, Evidence, Record, decide
from tritonamp.kernels.grad_stats import grad_stats
from tritonamp.kernels.outliers import Limit, outliers
from tritonamp.policy import HALF_DTYPES
from tritonamp.scaler import GradScaler
from tritonamp.step.gradients import Gradients
from tritonamp.step.master_weights import MasterWeights

Stats = tuple[Tensor, Tensor]
"""Results of grad_stats: magnitudes by parameter, sums of squares."""


class Phase(Enum):
    """The phase of a decision.

    ::

        OPEN     --decide--> DECIDED --answer--> ANSWERED
        DECIDED  --the step raised, or a veto: undo--> REOPENED --decide--> DECIDED
        any      --the last optimizer that waited has stepped, or was cleared--> over

    One that is over without a step or skip was given up: a decision to step is taken back.
    """

    OPEN = "further micro-batches may join it"
    REOPENED = "undone: to be decided again, on the same gradients"
    DECIDED = "found_inf, norm and grad_scale are there"
    ANSWERED = "decided, and the policy has said what is to be done about a skip"


class Undo:
    """Copies of tensors that a decision is about to move; a call puts the old values back."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._before = [(tensor, tensor.clone()) for tensor in tensors]

    def __bool__(self) -> bool:
        return len(self._before) > 0

    def __call__(self, unless: Tensor | None = None) -> None:
        """Put the tensors back, once; not where the flag ``unless``, 0-d, is not 0."""
        for tensor, value in self._before:
            tensor.copy_(value if unless is None else torch.where(unless != 0, tensor, value))
        self._before.clear()


class Decision:
    """The life of one scaled loss, up to the step or skip of the optimizers it feeds.

    Micro-batches share one decision. ``Phase`` lists its phases, ``GradientState`` the states of
    the gradients.

    Attributes:
        scaler: the scaler of the loss.
        scale: 0-d, the scale that the backward used.
        loss_nonfinite: 0-d flag of the loss (the largest over micro-batches); VETOED after a veto.
        loss: 0-d, the loss (summed over micro-batches); None: it is not known.
        waiting: the optimizers that have not stepped yet.
        moves_scale: whether the decision moves the scale; else the user calls ``scaler.update``.
        phase: the present phase.
        turn: which of all decisions it is, in the order in which they were made.
        blocks: the number of ``with scale_loss`` blocks that are open.
        zeroed: waiting optimizers whose gradients the user has cleared.
        found_inf: 0-d, not 0 where the optimizers skip; valid once decided, as the next two.
        norm: 0-d, the 2-norm of the unscaled gradients.
        grad_scale: 0-d factor that unscales and clips a scaled gradient.
        max_norm: the 2-norm that the gradients were clipped to; None: they were not.
    """

    def __init__(
        self,
        scaler: GradScaler,
        scale: Tensor,
        loss_nonfinite: Tensor,
        waiting: Iterable[MasterWeights],
        moves_scale: bool,
        backend: str,
    ) -> None:
        self.scaler = scaler
        self.scale = scale
        self.loss_nonfinite = loss_nonfinite
        self.loss: Tensor | None = None
        self.waiting = list(waiting)
        self.moves_scale = moves_scale
        self.phase = Phase.OPEN
        self.turn = 0
        self.blocks = 0
        self.zeroed: set[MasterWeights] = set()
        self.max_norm: float | None = None
        self._verdict = scale.new_empty(4)  # what ``decide`` writes, in one piece
        self.found_inf, self.norm, self.grad_scale, self._flag = self._verdict.unbind()
        self._found_earlier: Tensor | None = None
        # valid until the next grad_stats of the same optimizer
        self._stats: dict[MasterWeights, Stats] = {}
        self._judged: dict[MasterWeights, Stats] = {}  # copies, of gradients unscaled since
        self._undo = Undo()
        self._backend = backend

    @property
    def can_be_undone(self) -> bool:
        """Whether it is decided, with copies of what it has moved, and nobody has acted on it."""
        return self.is_decided and bool(self._undo)

    @property
    def is_decided(self) -> bool:
        """Whether found_inf, norm and grad_scale are there."""
        return self.phase in (Phase.DECIDED, Phase.ANSWERED)

    def add_loss(self, loss: Tensor) -> None:
        """Add the elements of a micro-batch's loss to ``loss``."""
        loss = transfer(loss, self.scale.device).detach()
        if loss.dtype in HALF_DTYPES:  # a sum in half may be inf
            loss = loss.float()
        if loss.dim():
            loss = loss.sum()
        self.loss = loss if self.loss is None else self.loss + loss

    def veto(self, flag: bool | Tensor) -> None:
        """Have the optimizers skip where ``flag``, a bool or 0-d, is True; before ``decide``."""
        if isinstance(flag, bool):  # filled on the device: a copy from main memory would wait
            wanted = torch.full_like(self.loss_nonfinite, VETOED * flag)
        else:
            wanted = transfer(flag, self.scale.device) * VETOED
        # not in place: a scaler that the user drives learns of it in ``decide``
        self.loss_nonfinite = torch.maximum(self.loss_nonfinite, wanted)

    def unscale(self, weights: MasterWeights) -> None:
        """Unscale one optimizer's gradients, and keep their statistics; once decided."""
        self._keep_stats(weights, self._stats[weights])
        weights.unscale_(self.grad_scale)

    def unscale_early(self, weights: MasterWeights) -> None:
        """Unscale one optimizer's gradients because another loss is about to add its own."""
        if self.is_decided:
            self.unscale(weights)
            return
        verdict = torch.zeros_like(self._verdict)
        flag, rule = self.loss_nonfinite, self.scaler.rule
        stats = self._stats_of(weights, None)
        evidence = Evidence(*stats, flag, flag)
        # squares are judged with the gradients of all optimizers, later
        how = None, None, rule, NO_SQUARES, None, verdict, self._backend
        decide(evidence, self.scale, *how)
        self._keep_stats(weights, stats)
        earlier = self._found_earlier
        found = verdict[0]
        self._found_earlier = found if earlier is None else torch.maximum(earlier, found)
        weights.unscale_(verdict[2])

    def decide(
        self,
        record: Record,
        ranks: Ranks,
        max_norm: float | None = None,
        undoable: bool = False,
        outlying: Limit | None = None,
        known: Mapping[MasterWeights, Gradients] | None = None,
    ) -> None:
        """Judge the gradients of all waiting optimizers, and move the scale.

        Args:
            record: receives the outcome.
            ranks: the processes that decide together.
            max_norm: clip the gradients of all optimizers together to this 2-norm.
            undoable: keep copies so that ``undo`` may follow. Eager torch in one process always
                keeps them.
            outlying: the window of the scaler, and what an outlier is; None: nothing is.
            known: gradients by optimizer, where they were asked for already.
        """
        self.max_norm = max_norm
        stats = [self._stats_of(weights, (known or {}).get(weights)) for weights in self.waiting]
        self._stats = dict(zip(self.waiting, stats, strict=True))
        amax, square_sum = self._joined_stats(stats)
        eager = not DECIDE.uses_triton(self._backend, self.scale)
        if undoable or (eager and not ranks.several):
            moved = [self.scaler.scale_memory] if self.moves_scale else []
            window = [] if outlying is None else [outlying.window]
            self._undo = Undo([*moved, record.numbers, *window])
        flag = self.loss_nonfinite
        earlier = flag if self._found_earlier is None else self._found_earlier
        if ranks.several:
            mine = Evidence(amax, square_sum, flag, earlier)
            taken = record.numbers[CLEAN]
            evidence, loss, squares = ranks.agree(mine, self.scale, taken, self._loss())
            amax, square_sum, agreed, earlier = evidence
            # in place: it is the scaler's own where the user has scaled the loss
            flag.copy_(agreed)
        if outlying is not None:
            if not ranks.several:
                loss, squares = self._loss(), square_sum
            evidence = Evidence(amax, squares, flag, earlier)
            flag = torch.empty_like(flag)  # ``outliers`` reads one flag and writes another
            outliers(evidence, self.scale, loss, outlying, record.numbers, flag, self._backend)
        # with backoff_on_fault a fault moves the scale as an overflow does; the record notes which
        apart = self.moves_scale and self.scaler.backoff_on_fault
        state = self.scaler.scale_state if self.moves_scale and not apart else None
        evidence = Evidence(amax, square_sum, flag, earlier)
        rule = self.scaler.rule
        # stages of a pipeline do not know the optimizers of others, and decide alike
        bound = OF_ANY_MEAN if ranks.staged else squares_of(w.optimizer for w in self.waiting)
        how = max_norm, state, rule, bound, record, self._verdict, self._backend
        decide(evidence, self.scale, *how)
        if apart:
            self.scaler.note_amax(amax)
            self.scaler.move_scale(self.found_inf, self._flag)
        if not self.moves_scale:
            self.scaler.note_flag(self._flag)
            for weights in self.waiting:
                self.scaler.record_decision(weights.optimizer, self.found_inf, amax)
        self.phase = Phase.DECIDED

    def _loss(self) -> Tensor:
        """Return the loss, 0-d float32 where the scale is; NaN: not known."""
        if self.loss is None:
            return torch.full_like(self.scale, torch.nan)
        return self.loss.float()

    def undo(self) -> bool:
        """Put scale and record back as they were before ``decide``, which may be called again.

        Returns:
            whether a decision was taken back.
        """
        moved = self.can_be_undone
        self._undo()  # also after a ``decide`` that failed half-way
        if moved:
            self.phase = Phase.REOPENED
        return moved

    def give_up(self, skip: Tensor) -> None:
        """Put scale and record back, since no step follows; not after a ``skip``, 0-d, not 0."""
        self._undo(unless=skip)

    def drop_copies(self) -> None:
        """Drop the copies: an optimizer has stepped or skipped."""
        self._undo = Undo()

    def _keep_stats(self, weights: MasterWeights, stats: Stats) -> None:
        """Keep copies of statistics: the kernels write the next ones to the same memory."""
        amax, square_sum = stats
        self._judged[weights] = amax.clone(), square_sum.clone()

    def _joined_stats(self, stats: Sequence[Stats]) -> Stats:
        if len(stats) == 1:
            return stats[0]
        empty = torch.zeros(0, device=self.scale.device)
        amax, square_sum = zip(*stats, strict=True) if stats else ((), ())
        return torch.cat([empty, *amax]), torch.cat([empty, *square_sum])

    def _dense_stats(self, weights: MasterWeights, gradients: Gradients) -> Stats:
        """Return statistics of dense gradients, of which several ranks may hold the same."""
        stats = []
        for lists, copies in weights.by_copies(gradients):
            amax, square_sum = grad_stats(lists, self.scale.device, self._backend)
            stats.append((amax, square_sum if copies == 1 else square_sum / copies))
        if len(stats) == 1:
            return stats[0]
        amaxes, square_sums = zip(*stats, strict=True)
        return torch.stack(amaxes).amax(0), torch.cat(square_sums)

    def _stats_of(self, weights: MasterWeights, gradients: Gradients | None) -> Stats:
        """Return statistics of the gradients that carry, or carried, this decision's scale."""
        device = self.scale.device
        if weights.decision is not self:
            # unscaled early, or cleared: this loss has the statistics of then, or none
            nothing = torch.zeros(len(weights.parameters()), device=device)
            return self._judged.get(weights, (nothing, torch.zeros(0, device=device)))
        if gradients is None:
            gradients = weights.gradients()
        amax, square_sum = self._dense_stats(weights, gradients)
        if not gradients.any_sparse:
            return amax, square_sum
        sparse = grad_stats(weights.sparse_gradients(), device, self._backend)
        return torch.maximum(amax, sparse[0]), torch.cat([square_sum, sparse[1]])
