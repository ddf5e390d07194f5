"""Run a backward again at other loss scales, to find those at which all gradients are finite."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError

from tritonamp.watched.ops import is_finite

MIN_EXPONENT = -24  # of the loss scales that are tried


class Backward:
    """The backward from some outputs to the parameters, at any loss scale.

    It starts at the tensors of the output that require a gradient.

    Args:
        output: output of the forward.
        grad_outputs: gradients of the output's tensors, with the loss scale in them; None: the
            output is a loss.
        scale: loss scale that ``grad_outputs`` carry.
        params: parameters by name.
        edits: returns a block in which checkpoints compute their segments again with the edits of
            the forward.
    """

    def __init__(
        self,
        output: Any,
        grad_outputs: Sequence[Tensor | None] | None,
        scale: float,
        params: Mapping[str, Tensor],
        edits: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        pairs = zip(outputs, grad_outputs or [None] * len(outputs), strict=True)
        kept = [
            (t, g) for t, g in pairs if t.requires_grad and (grad_outputs is None or g is not None)
        ]
        self.outputs = [t for t, _ in kept]
        self.seeds = [g for _, g in kept if g is not None]
        self.scale = scale
        self.params = params
        self._edits = edits

    @property
    def is_possible(self) -> bool:
        """Whether it can run: from a loss, or from outputs with gradients, to some parameter."""
        is_loss = len(self.outputs) == 1 and self.outputs[0].numel() == 1
        return bool(self.outputs and self.params) and (is_loss or bool(self.seeds))

    def gradients(self, scale: float) -> dict[str, Tensor]:
        """Return the gradients at a loss scale by name, without parameters that get none."""
        outputs, params = self.outputs, list(self.params.values())
        seeds = [g * (scale / self.scale) for g in self.seeds] or None
        if seeds is None:
            outputs = [t.float() * scale for t in outputs]
        try:
            grads: Any = torch.autograd.grad(
                outputs, params, seeds, retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            # the one way into checkpoints of this kind
            torch.autograd.backward(outputs, seeds, retain_graph=True)
            grads = tuple(p.grad for p in params)
            for p in params:
                p.grad = None
        return {name: g for name, g in zip(self.params, grads, strict=True) if g is not None}

    def fits(self, scale: float) -> bool:
        """Return whether all gradients are finite at a loss scale."""
        try:
            grads = self.gradients(scale)
        except CheckpointError:  # the segment differs without the edits
            with self._edits():
                grads = self.gradients(scale)
        return all(map(is_finite, grads.values()))

    def largest_scale(self, below: float) -> float | None:
        """Return the largest power of two at which all gradients are finite, by bisection."""
        low, high = MIN_EXPONENT, math.frexp(below)[1]
        if not self.fits(2.0**low):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(2.0**middle) else (low, middle)
        return 2.0**low
