"""The part that Lightning's Trainer and Fabric share: a precision plugin around an ``Amp``."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

import tritonamp


class EnabledPrecision(Precision):
    """A precision plugin that calls the handle of enabled models and optimizers.

    Args:
        settings: keywords of ``tritonamp.enable``.

    Attributes:
        amp: the handle; None before there is one.
    """

    _unused = ""  # the error of a call without a handle

    def __init__(self, **settings: Any) -> None:
        self.amp: tritonamp.Amp | None = None
        self._settings = settings
        self._models: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._unscaled: set[Optimizer] = set()  # since the last backward

    def _enable(self, models: list[nn.Module], optimizers: list[Optimizer]) -> None:
        self.amp = tritonamp.enable(models, optimizers or None, **self._settings)
        self._models, self._optimizers = models, optimizers
        self.precision = "bf16-mixed" if self.amp.policy.dtype is torch.bfloat16 else "16-mixed"
        self._unscaled.clear()

    def _current_amp(self) -> tritonamp.Amp:
        if self.amp is None:
            raise RuntimeError(self._unused)
        return self.amp

    def forward_context(self) -> AbstractContextManager[None]:
        """Return the context for a step: the op policy."""
        return self._current_amp().autocast() if self._models else contextlib.nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return loss scales and counts."""
        return {} if self.amp is None else self.amp.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a run with this plugin, or with Lightning's own MixedPrecision."""
        if state_dict:
            self._current_amp().load_state_dict(state_dict)

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward of the scaled loss, for optimizers with trainable parameters."""
        amp = self._current_amp()
        feeds = [o for o in amp.fed_by(tensor) if any(p.requires_grad for p in self.main_params(o))]
        self._unscaled.difference_update(feeds)
        with amp.scale_loss(tensor, feeds) as scaled:
            super().backward(scaled, model, *args, **kwargs)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Put true FP32 gradients into the masters, once after a backward."""
        if optimizer not in self._unscaled:
            self._current_amp().unscale_(optimizer)
            self._unscaled.add(optimizer)


def restore_forwards(model: nn.Module) -> None:
    """Remove enabled forwards that Lightning has put onto modules, before these are disabled.

    A call of another method through DDP's forward leaves ``module.forward`` there.
    """
    for module in model.modules():
        if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
            del vars(module)["forward"]
