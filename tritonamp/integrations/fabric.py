"""Lightning Fabric: ``Fabric(plugins=MixedPrecision(level="O2"))``."""

import functools
import sys
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from lightning.fabric import Fabric, wrappers
from lightning.fabric.strategies.strategy import Strategy
from torch import Tensor, nn
from torch.optim import Optimizer

from tritonamp.class_swap import Swapped, install, is_installed
from tritonamp.integrations.precision import EnabledPrecision, restore_forwards

SAVED_AS = "tritonamp"
"""The key of loss scales and counts in checkpoints of ``fabric.save``."""


class MixedPrecision(EnabledPrecision):
    """A precision plugin that enables the models and optimizers that Fabric sets up.

    All of them share one handle. A model without an optimizer is enabled by its first forward, by
    ``fabric.autocast()``, or with the next optimizer. ``fabric.clip_gradients`` clips the true
    gradients; with one optimizer and the 2-norm it does so inside of the step. If a gradient is inf
    or NaN the step is skipped, so ``error_if_nonfinite`` has no effect. ``fabric.save`` of a state
    with an optimizer, and ``fabric.load``, include the loss scales and counts.

    Args:
        settings: keywords of ``tritonamp.enable``: ``level``, ``dtype`` (default: the dtype in
            which the model was loaded), ``scaler``, fields of ``Policy`` and others.

    Attributes:
        amp: the handle, for ``stats()``, ``metrics()``, ``ema()`` and others; None before
            ``fabric.setup``. Read it after the last model and optimizer are set up, because it
            changes with each of them.

    Raises:
        ValueError: ``tritonamp.enable`` refuses the settings, in ``fabric.setup``.
        RuntimeError: a model or an optimizer is set up after the first ``fabric.backward``; a loss
            comes without an optimizer; or the first call of a model without one is of another
            method than its forward, through DDP.
    """

    _unused = (
        "MixedPrecision is not in use: give it to Fabric(plugins=...), and call "
        "fabric.setup(model, optimizer)"
    )

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._waiting: list[nn.Module] = []  # set up, not enabled yet
        self._has_trained = False

    # setup

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module itself; its setup has begun.

        Fabric passes only models to a plugin, so from now on the strategy passes it the optimizers.
        """
        strategy = _calling_fabric(sys._getframe(1)).strategy
        if not is_installed(strategy):
            install(strategy, _EnablingStrategy, self)
        return module

    def _add_model(self, model: nn.Module) -> None:
        self._check_untrained()
        self._waiting.append(model)

    def _add_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Enable all models and optimizers together, because a loss may feed several of them."""
        self._check_untrained()
        # a cell of a notebook may set the same ones up again
        models = list(dict.fromkeys(self._models + self._waiting))
        optimizers = list(dict.fromkeys(self._optimizers + optimizers))
        self.teardown()
        self._waiting = models  # if the optimizers are refused, other ones may follow
        self._enable(models, optimizers)
        self._waiting = []

    def _check_untrained(self) -> None:
        if self._has_trained:
            raise RuntimeError(
                "fabric.setup: expected all models and optimizers before the first "
                "fabric.backward, got one after it: set it up earlier, or call "
                "fabric.strategy.precision.teardown(), which ends the mixed precision of those "
                "before"
            )

    def teardown(self) -> None:
        """Disable all models and optimizers; further ones can be set up then."""
        for model in self._models:
            restore_forwards(model)
        if self._models:
            self._current_amp().disable()
        self._models, self._optimizers, self._has_trained = [], [], False

    def forward_context(self) -> AbstractContextManager[None]:
        """Return the context for a forward, and for ``fabric.autocast()``: the op policy."""
        if self._waiting:
            _check_forwards(self._waiting)
            self._add_optimizers([])
        return super().forward_context()

    def __deepcopy__(self, memo: dict[int, Any]) -> "MixedPrecision":
        """Return the plugin itself; copies of a model that Fabric has set up hold it."""
        return self

    def __reduce__(self) -> Any:
        """Return the pickle of an unused plugin, for a whole model in ``torch.save``."""
        return functools.partial(type(self), **self._settings), ()

    # a step

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward of the scaled loss."""
        if not self._optimizers:
            raise RuntimeError(
                "fabric.backward: no optimizer was set up together with a model or after it, so no "
                "step could take the loss scale off the gradients: call fabric.setup(model, "
                "optimizer), or fabric.setup_module(model) and then "
                "fabric.setup_optimizers(optimizer), before it"
            )
        self._has_trained = True
        super().backward(tensor, model, *args, **kwargs)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, closure: Any = None
    ) -> Any:
        """Run the closure, if there is one, and one step or one skip."""
        result = None if closure is None else closure()
        optimizer.step()
        return result

    def _clip_norm(self, optimizer: Optimizer, max_norm: float, norm_type: float) -> Tensor:
        if norm_type == 2 and self._optimizers == [optimizer]:
            return self._current_amp().clip_grad_norm_(max_norm)
        self.unscale_gradients(optimizer)
        return nn.utils.clip_grad_norm_(self.main_params(optimizer), max_norm, norm_type)


class _EnablingStrategy(Strategy, Swapped):  # in this order: Python keeps the layout of an ABC
    """A strategy that tells its MixedPrecision of setups, clipping, saves and loads."""

    _belongings = ("_plugin",)
    _plugin: MixedPrecision

    def setup_module(self, module: nn.Module) -> nn.Module:
        module = super().setup_module(module)
        self._plugin._add_model(module)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        optimizer = super().setup_optimizer(optimizer)
        self._plugin._add_optimizers([optimizer])
        return optimizer

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        return self._plugin._clip_norm(optimizer, max_norm, norm_type)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], *options: Any, **named: Any
    ) -> None:
        if any(isinstance(value, Optimizer) for value in state.values()):
            state = {**state, SAVED_AS: self._plugin.state_dict()}
        super().save_checkpoint(path, state, *options, **named)

    def load_checkpoint(
        self, path: Any, state: Any = None, *options: Any, **named: Any
    ) -> dict[str, Any]:
        rest = super().load_checkpoint(path, state, *options, **named)
        if state:
            saved = rest.pop(SAVED_AS, {})
            if self._plugin.amp is not None:  # None: a model alone, for inference
                self._plugin.load_state_dict(saved)
        return rest


def _check_forwards(models: list[nn.Module]) -> None:
    """Refuse to enable a module whose ``forward`` stands for another method during this call.

    Fabric puts back the ``forward`` that it has found, which would hide the enabled one.
    """
    for module in (module for model in models for module in model.modules()):
        forward = vars(module).get("forward")
        if getattr(forward, "__module__", None) == wrappers.__name__:
            del vars(module)["forward"]  # Fabric leaves it there after an error
            raise RuntimeError(
                f"fabric.setup({type(module).__name__}): expected a forward first, because no "
                "optimizer was set up, got a call of another method: enter fabric.autocast() "
                "once before it"
            )


def _calling_fabric(frame: FrameType | None) -> Fabric:
    """Return the Fabric whose setup runs, from the stack at ``frame`` and outwards."""
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Fabric):
            return caller
        frame = frame.f_back
    raise RuntimeError(
        "MixedPrecision.convert_module: expected a call by fabric.setup(model, optimizer) or "
        "fabric.setup_module(model)"
    )
