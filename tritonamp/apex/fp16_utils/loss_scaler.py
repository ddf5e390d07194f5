"""LossScaler and DynamicLossScaler, which FP16_Optimizer scales with."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class LossScaler:
    """A loss scale that does not change."""

    def __init__(self, scale: float = 1.0) -> None:
        self.cur_scale = scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return False: a fixed scale does not look."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Do nothing, whether a step was taken or skipped for ``overflow``."""

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def scale_gradient(
        self, module: Any, grad_in: Iterable[Tensor], grad_out: Any
    ) -> tuple[Tensor, ...]:
        """Return the gradients times the scale, as a module's backward hook does."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Do the backward of the scaled loss, which is FP32."""
        (loss.float() * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A loss scale that falls by ``scale_factor`` at an overflow and rises after a clean window.

    It does not fall below 1.

    Args:
        init_scale: the scale of the first step.
        scale_window: so many steps in a row without overflow raise the scale.
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
        """Whether a gradient holds a value that is not finite. Reads the device."""
        finite = [torch.isfinite(param.grad).all() for param in params if param.grad is not None]
        return bool(finite) and not bool(torch.stack(finite).all())

    def update_scale(self, overflow: bool) -> None:
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
