"""LossScaler and DynamicLossScaler, the loss scales of FP16_Optimizer."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class LossScaler:
    """A loss scale that does not change."""

    def __init__(self, scale: float = 1.0) -> None:
        self.cur_scale = scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return False, because a fixed scale does not check gradients."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Do nothing, because the scale is fixed."""

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def scale_gradient(
        self, module: Any, grad_in: Iterable[Tensor], grad_out: Any
    ) -> tuple[Tensor, ...]:
        """Return the gradients times the scale, as a module's backward hook does."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the backward of the scaled FP32 loss."""
        (loss.float() * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A loss scale that falls at an overflow, but not below 1, and rises after a clean window.

    Args:
        init_scale: scale of the first step.
        scale_factor: factor by which the scale falls and rises.
        scale_window: number of steps in a row without overflow after which the scale rises.
    """

    def __init__(
        self, init_scale: float = 2.0**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return whether a gradient holds inf or NaN. Waits for the device."""
        finite = [torch.isfinite(param.grad).all() for param in params if param.grad is not None]
        return bool(finite) and not bool(torch.stack(finite).all())

    def update_scale(self, overflow: bool) -> None:
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
