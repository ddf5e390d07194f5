"""One decision per loss: the gradients it scaled are good, and every optimizer it feeds steps, or none does."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tritonamp.diagnostics import SkipLog
from tritonamp.kernels.decide import decide
from tritonamp.kernels.grad_stats import grad_stats
from tritonamp.masters import MasterWeights
from tritonamp.scaler import GradScaler


class Decision:
    """From a loss being scaled to the step (or skip) of the optimizers it feeds; micro-batches share one.

    Attributes:
        scaler: whose scale the loss carries; moved once when the decision is made, unless the user calls ``update``.
        scale: 0-d, the scale that the backward used.
        loss_nonfinite: 0-d flag of the loss (the largest over micro-batches).
        feeds: the optimizers that have not stepped yet.
        blocks: how many ``with scale_loss`` blocks we are inside of.
        zeroed: those of them whose gradients the user has cleared since.
        found_inf, norm, grad_scale: results of ``decide``, None until made.
    """

    def __init__(
        self, scaler: GradScaler, scale: Tensor, loss_nonfinite: Tensor, feeds: Iterable[MasterWeights], automatic: bool
    ) -> None:
        self.scaler, self.scale, self.loss_nonfinite = scaler, scale, loss_nonfinite
        self.feeds, self.automatic = list(feeds), automatic
        self.zeroed: set[MasterWeights] = set()
        self.blocks = 0
        self.found_inf: Tensor | None = None
        self.norm: Tensor | None = None
        self.grad_scale: Tensor | None = None
        self._found_earlier: list[Tensor] = []

    @property
    def made(self) -> bool:
        return self.found_inf is not None

    def unscale_early(self, weights: MasterWeights) -> None:
        """Unscales one optimizer's gradients because another loss is about to add its own to them."""
        if not self.made:
            amax, square_sum = self._stats([weights])
            found_inf, _, grad_scale = decide(amax, square_sum, self.loss_nonfinite, self.scale, None)
            self._found_earlier.append(found_inf)
        else:
            assert self.grad_scale is not None
            grad_scale = self.grad_scale
        weights.unscale_(grad_scale)

    def make(self, log: SkipLog, max_norm: float | None = None) -> None:
        """Judges the gradients of all optimizers that the loss feeds, and moves the scale."""
        amax, square_sum = self._stats(self.feeds)
        found_inf, self.norm, self.grad_scale = decide(amax, square_sum, self.loss_nonfinite, self.scale, max_norm)
        for earlier in self._found_earlier:
            found_inf = torch.maximum(found_inf, earlier)
        self.found_inf = found_inf
        log.record(self._named_amax(amax), found_inf, self.loss_nonfinite, self.scale, self.grad_scale)
        if self.automatic:
            self.scaler.move(found_inf, self.loss_nonfinite)
        else:
            for weights in self.feeds:
                self.scaler.record(weights.optimizer, found_inf)

    def _judged(self, feeds: Iterable[MasterWeights]) -> list[tuple[Tensor, Tensor]]:
        """(parameter of the model, its gradient) for all gradients that carry this decision's scale."""
        return [pair for weights in feeds if weights.scaled_by is self for pair in weights.scaled_gradients()]

    def _stats(self, feeds: Iterable[MasterWeights]) -> tuple[Tensor, Tensor]:
        return grad_stats([grad for _, grad in self._judged(feeds)], self.scale.device)

    def _named_amax(self, amax: Tensor) -> dict[Tensor, Tensor]:
        params = [param for param, _ in self._judged(self.feeds)]
        return dict(zip(params, amax.unbind(), strict=True))
