"""One decision per loss: the gradients it scaled are good, and every optimizer it feeds steps, or
none does.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.diagnosis.log import SkipLog
from tritonamp.distributed.ranks import Evidence, Ranks
from tritonamp.kernels.decide import CLEAN, DECIDE, decide
from tritonamp.kernels.grad_stats import grad_stats
from tritonamp.scaler import GradScaler
from tritonamp.step.masters import MasterWeights


class Decision:
    """From a loss being scaled to the step (or skip) of the optimizers it feeds; micro-batches
    share one.

    Attributes:
        scaler: whose scale the loss carries; moved once when the decision is made, unless the user
            calls ``update``.
        scale: 0-d, the scale that the backward used.
        loss_nonfinite: 0-d flag of the loss (the largest over micro-batches).
        feeds: the optimizers that have not stepped yet.
        blocks: how many ``with scale_loss`` blocks we are inside of.
        zeroed: those of them whose gradients the user has cleared since.
        unmade: it was made for a step that then failed.
        reported: the policy's answer to it was given.
        made: whether found_inf, norm and grad_scale, the results of ``decide`` (0-d), are there.
    """

    def __init__(
        self,
        scaler: GradScaler,
        scale: Tensor,
        loss_nonfinite: Tensor,
        feeds: Iterable[MasterWeights],
        automatic: bool,
        backend: str,
    ) -> None:
        self.scaler, self.scale, self.loss_nonfinite = scaler, scale, loss_nonfinite
        self.feeds, self.automatic = list(feeds), automatic
        self.zeroed: set[MasterWeights] = set()
        self.blocks = 0
        self.made = self.unmade = self.reported = False
        self._verdict = scale.new_zeros(3)
        self.found_inf, self.norm, self.grad_scale = self._verdict.unbind()
        self._found_earlier: Tensor | None = None
        self._judged: dict[
            MasterWeights, tuple[Tensor, Tensor]
        ] = {}  # statistics of what was unscaled since
        self._before: list[tuple[Tensor, Tensor]] = []
        self._backend = backend

    def unscale_early(self, weights: MasterWeights) -> None:
        """Unscales one optimizer's gradients because another loss is about to add its own to them."""
        if self.made:
            weights.unscale_(self.grad_scale)
            return
        verdict = torch.zeros_like(self._verdict)
        flag, rule = self.loss_nonfinite, self.scaler.rule
        stats = self._stats_of(weights)
        decide(*stats, flag, flag, self.scale, None, None, rule, None, verdict, self._backend)
        self._remember([weights], [stats])
        earlier = self._found_earlier
        self._found_earlier = verdict[0] if earlier is None else torch.maximum(earlier, verdict[0])
        weights.unscale_(verdict[2])

    def make(
        self,
        log: SkipLog,
        batches: Sequence[Any],
        ranks: Ranks,
        max_norm: float | None = None,
        undoable: bool = False,
    ) -> None:
        """Judges the gradients of all optimizers that the loss feeds, and moves the scale.

        Args:
            log: hears of it, and that ``batches`` led to it.
            ranks: take part in it.
            undoable: ``unmake`` may follow. In eager torch it always may; kernels are not followed
                by copies for it.
        """
        stats = [self._stats_of(weights) for weights in self.feeds]
        amax, square_sum = self._joined(stats)
        flag = self.loss_nonfinite
        earlier = flag if self._found_earlier is None else self._found_earlier
        record = log.record(
            [weights.parameters() for weights in self.feeds], self.scale.device, ranks.members
        )
        if ranks.several:
            mine = Evidence(amax, square_sum, flag, earlier)
            amax, square_sum, agreed, earlier = ranks.agree(mine, self.scale, record.numbers[CLEAN])
            flag.copy_(agreed)  # a scaler that the user drives has the same flag
        if (undoable or not DECIDE.uses_triton(self._backend, self.scale)) and not ranks.several:
            self._before = [
                (tensor, tensor.clone()) for tensor in (*self.scaler.scale_state, record.numbers)
            ]
            self._remember(self.feeds, stats)
        moves_in_two = (
            self.automatic and self.scaler.backoff_on_fault
        )  # the record hears of a fault
        state = self.scaler.scale_state if self.automatic and not moves_in_two else None
        rule = self.scaler.rule
        decide(
            amax,
            square_sum,
            flag,
            earlier,
            self.scale,
            max_norm,
            state,
            rule,
            record,
            self._verdict,
            self._backend,
        )
        if moves_in_two:
            self.scaler.note(amax)
            self.scaler.move(self.found_inf, flag)
        log.decided(rule, batches)
        self.made = True
        if not self.automatic:
            for weights in self.feeds:
                self.scaler.record(weights.optimizer, self.found_inf, amax)

    def unmake(self, log: SkipLog) -> None:
        """What ``make`` moved goes back, where it noted how things were. ``make`` may follow again."""
        before, self._before = self._before, []
        for tensor, value in before:
            tensor.copy_(value)
        if self.made and before:
            log.take_back()
            self.made, self.unmade = False, True

    def _remember(
        self, feeds: Iterable[MasterWeights], stats: Iterable[tuple[Tensor, Tensor]]
    ) -> None:
        """The kernels write the next ones to the same memory."""
        for weights, (amax, square_sum) in zip(feeds, stats, strict=True):
            self._judged[weights] = amax.clone(), square_sum.clone()

    def _joined(self, stats: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        if len(stats) == 1:
            return stats[0]
        empty = torch.zeros(0, device=self.scale.device)
        return torch.cat([empty, *(amax for amax, _ in stats)]), torch.cat(
            [empty, *(squares for _, squares in stats)]
        )

    def _stats_of(self, weights: MasterWeights) -> tuple[Tensor, Tensor]:
        """Of the gradients that carry or carried this decision's scale: magnitudes by parameter,
        sums of squares.
        """
        device = self.scale.device
        if weights.scaled_by is not self:
            none = (
                torch.zeros(len(weights.parameters()), device=device),
                torch.zeros(0, device=device),
            )
            return self._judged.get(weights, none)
        amax, square_sum = grad_stats(weights.lists(), device, self._backend)
        if not weights.sparse:
            return amax, square_sum
        of_sparse = grad_stats(weights.sparse_lists(), device, self._backend)
        return torch.maximum(amax, of_sparse[0]), torch.cat([square_sum, of_sparse[1]])
