"""Attributes of initialized optimizers that scripts use, most of them when they resume."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

_LAZY = "_amp_lazy_init", "_lazy_init_maybe_master_weights"


class Stash:
    """``optimizer._amp_stash``; copies of the optimizer have none.

    Attributes:
        lazy_init_called: True. Setting it has no effect, because ``initialize`` makes the masters.
    """

    def __init__(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
        self.lazy_init_called = True
        self._optimizer = optimizer
        self._models = models

    def __reduce__(self) -> Any:
        return type(None), ()

    @property
    def all_fp32_from_fp16_params(self) -> list[Tensor]:
        """FP32 masters of half parameters, in the order of the groups."""
        own = {param for model in self._models for param in model.parameters()}
        every = (param for group in self._optimizer.param_groups for param in group["params"])
        return [param for param in every if param not in own] if own else []


def put_stash(optimizer: Any, models: Sequence[nn.Module]) -> None:
    """Give an optimizer that has its masters the names that scripts look for."""
    optimizer._amp_stash = Stash(optimizer, models)
    for name in _LAZY:
        setattr(optimizer, name, _nothing_to_do)


def take_stash(optimizer: Any) -> None:
    """Take back what ``put_stash`` gave."""
    for name in ("_amp_stash", *_LAZY):
        delattr(optimizer, name)


def _nothing_to_do() -> None:
    """Masters are in the groups since ``initialize``."""
