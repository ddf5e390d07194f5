"""Optimizers of the API before ``amp.initialize``: ``amp.init(...).wrap_optimizer(optimizer)``."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

import tritonamp
from tritonamp.apex.amp.run import AmpRun


class OptimWrapper:
    """An optimizer with ``scale_loss``; everything else is the optimizer's own.

    Args:
        handle: handle of ``amp.init``; losses and steps do not change while its casts are off.
        num_loss: number of ``scale_loss`` blocks before each step; each has its own loss scale.
    """

    def __init__(self, optimizer: Optimizer, handle: Any, num_loss: int = 1) -> None:
        self._optimizer = optimizer
        self._handle = handle
        self._num_loss = num_loss
        self._loss_idx = 0
        if handle.is_active() and getattr(optimizer, "_amp_run", None) is None:
            policy = tritonamp.Policy(loss_scale=handle.loss_scale, half_parameters=True)
            AmpRun([], [optimizer], policy, num_losses=num_loss).casts_functions()

    @classmethod
    def of(cls, optimizer: Any, handle: Any) -> "OptimWrapper":
        """Return ``optimizer`` if it is an OptimWrapper, else a wrapper for a single loss."""
        return optimizer if isinstance(optimizer, cls) else cls(optimizer, handle)

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Yield the scaled loss, for its backward inside the block."""
        run = getattr(self._optimizer, "_amp_run", None)
        if run is None or not self._handle.is_active():
            yield loss
            return
        loss_id = self._loss_idx % self._num_loss
        self._loss_idx += 1
        with run.scale_loss(loss, [self._optimizer], run.scalers, loss_id) as scaled:
            yield scaled

    def step(self, closure: Any = None) -> Any:
        """Step, or skip if a gradient since the last step was not finite.

        Raises:
            RuntimeError: a closure was passed.
        """
        self._loss_idx = 0
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return repr(self._optimizer)
