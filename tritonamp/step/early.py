"""Decisions that the user asks for before the step: ``unscale_`` and ``clip_grad_norm_``."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tritonamp.distributed.sharding import by_mesh, total_norm
from tritonamp.kernels._inference import leaves_inference_mode
from tritonamp.step.decision import Decision
from tritonamp.step.pending import PendingDecisions


class EarlyDecisions:
    """Makes decisions of one ``Amp`` between backward and step.

    Args:
        pending: decisions that optimizers wait for.
    """

    def __init__(self, pending: PendingDecisions) -> None:
        self._pending = pending
        self._weights = pending.weights

    @leaves_inference_mode
    def unscale_(self, optimizer: Optimizer, by_scaler: bool = False) -> Tensor | None:
        """Put the true gradients of one optimizer into ``.grad`` of its params.

        Args:
            optimizer: an enabled optimizer.
            by_scaler: whether ``GradScaler.unscale_`` calls, so that an ``update`` will follow.

        Returns:
            0-d flag, not 0 if a gradient, or the loss behind it, is not finite; None if there are
            no scaled gradients.

        Raises:
            RuntimeError: the gradients are true already.
        """
        w = self._weights[optimizer]
        found_inf = None
        if w.has_true_gradients:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since its last step()"
            )
        for decision in self._pending.decisions_of(optimizer, moves_scale=not by_scaler):
            # Copies are kept, since a veto, or a batch that is given up, may take this decision
            # back.
            self._pending.decide(decision, undoable=True)
            # gradients of an earlier loss were unscaled when the next loss was scaled
            if w.decision is decision:
                decision.unscale(w)
                w.show_true_gradients()
                found_inf = decision.found_inf
        return found_inf

    @leaves_inference_mode
    def clip_grad_norm_(self, optimizers: Sequence[Optimizer], max_norm: float) -> Tensor:
        """Clip the gradients of ``optimizers`` together.

        Args:
            optimizers: enabled optimizers.
            max_norm: largest 2-norm of all their gradients, unscaled.

        Returns:
            the norm before clipping, 0-d.
        """
        decisions: list[Decision] = []
        all_scaled = True
        for optimizer in optimizers:
            for decision in self._pending.decisions_of(optimizer, moves_scale=True):
                if decision not in decisions:
                    decisions.append(decision)
            all_scaled = all_scaled and self._weights[optimizer].decision in decisions
        if len(decisions) == 1 and all_scaled and not decisions[0].is_decided:
            # the step multiplies by the clip coefficient, at no extra pass
            self._pending.decide(decisions[0], max_norm, undoable=True)
            return decisions[0].norm
        # Scaled gradients of several losses have no common norm, because each loss has a scale of
        # its own. So all gradients are unscaled, and clipped in place, as true ones are.
        for decision in decisions:
            self._pending.decide(decision, undoable=True)
        norms = [self._true_norm(optimizer) for optimizer in optimizers]
        total = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
        total = self._pending.ranks.norm_of_stages(total)
        params = [p for o in optimizers for g in o.param_groups for p in g["params"]]
        # torch does not mix tensors of several meshes in one call
        for alike in by_mesh(params):
            nn.utils.clip_grads_with_norm_(alike, max_norm, total)
        return total

    def _true_norm(self, optimizer: Optimizer) -> Tensor:
        """Unscale one optimizer's gradients and return their norm; 0 if they will be skipped."""
        w = self._weights[optimizer]
        if not w.has_true_gradients:
            self.unscale_(optimizer)
        norm = total_norm([g.float() for g in w.all_gradients()])
        # Gradients of a skip may be inf or NaN. Their norm would spoil the clipping of the others,
        # which another loss may let step.
        for decision in self._pending.decisions_of(optimizer, moves_scale=True):
            if decision.is_decided:
                skip = decision.found_inf.to(norm.device) != 0
                norm = torch.where(skip, torch.zeros_like(norm), norm)
        return norm
