"""Lightning: ``Trainer(plugins=[MixedPrecision(level="O2")])``."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from tritonamp.integrations.precision import EnabledPrecision, restore_forwards
from tritonamp.policy import HALF_DTYPES


class MixedPrecision(EnabledPrecision, Precision):
    """A precision plugin that enables the model and its optimizers while the Trainer runs.

    ``training_step`` and the other steps run under the op policy. O3 has no op policy, so steps
    should then call ``self(x)``, whose inputs become half. Gradients are clipped inside the
    optimizer's step. If a model or a callback overrides ``on_before_optimizer_step`` or
    ``configure_gradient_clipping``, these hooks see true FP32 gradients, at the cost of one pass
    over the gradients. The Trainer's loggers get ``amp.metrics()`` every ``log_every_n_steps``,
    without a wait.

    Args:
        settings: keywords of ``tritonamp.enable``: ``level``, ``dtype`` (default: the dtype in
            which the model was loaded), ``scaler``, fields of ``Policy`` and others.

    Attributes:
        amp: handle of the last run, for ``stats()``, ``explain()`` and others; None before the
            first run.

    Raises:
        ValueError: ``tritonamp.enable`` refuses the settings, when the Trainer starts.
    """

    _unused = "MixedPrecision is not in use: give it to Trainer(plugins=[...]), and fit or validate"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._came_in_half = False
        self._logged = -1  # the last batch whose metrics loggers have

    # the run

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Enable the model and the optimizers after the strategy has placed and wrapped them."""
        self._came_in_half = any(p.dtype in HALF_DTYPES for p in model.parameters())
        self._enable([model], optimizers)
        self._logged = -1
        return model, optimizers, lr_schedulers

    def teardown(self) -> None:
        """Disable model and optimizers. The strategy has already moved the model to the CPU."""
        if not self._models:
            return
        (model,), self._models = self._models, []
        restore_forwards(model)
        amp = self._current_amp()
        device = next((p.device for p in amp.master_params()), None)
        if device is not None:
            model.to(device)  # where the masters are
        amp.disable()
        model.cpu()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the model's FP32 values again, if the model was half.

        Lightning loads before ``connect``, so it has rounded the values to half.
        """
        if not self._models or not self._came_in_half or "state_dict" not in checkpoint:
            return  # ModelParallelStrategy has loaded an enabled model
        module = next(m for m in self._models[0].modules() if isinstance(m, LightningModule))
        module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)

    # a step

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Run ``model.backward`` on the scaled loss, for optimizers with trainable parameters."""
        with self._toggled_off():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @contextlib.contextmanager
    def _toggled_off(self) -> Iterator[None]:
        """Restore gradients of parameters whose masters ``toggle_optimizer`` has switched off.

        ``toggle_optimizer`` changes ``requires_grad`` of the masters only, so the backward adds to
        the gradients of the model's parameters.
        """
        masters = (master for _, master in self._current_amp().named_master_params())
        pairs = zip(self._models[0].parameters(), masters, strict=True)
        grads = {p: p.grad for p, master in pairs if p.requires_grad and not master.requires_grad}
        for p in grads:
            p.grad = None
        try:
            yield
        finally:
            for p, grad in grads.items():
                p.grad = grad

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure (forward and backward), the hooks, and one step or one skip."""
        closure_result = closure()
        if closure_result is None and model.automatic_optimization:
            return None  # training_step returned None
        if _has_gradient_hook(model):
            self.unscale_gradients(optimizer)
        self._after_closure(model, optimizer)
        optimizer.step(**kwargs)
        self._log_metrics(model.trainer)
        return closure_result

    def _log_metrics(self, trainer: Any) -> None:
        """Log ``amp.metrics()`` at the steps at which Lightning logs its own metrics."""
        # private (lightning 2.6): the condition and the step number of its own callbacks
        wanted = trainer._logger_connector.should_update_logs
        batch = trainer.fit_loop.epoch_loop._batches_that_stepped
        if trainer.loggers and wanted and batch != self._logged:  # once, with several optimizers
            self._logged, metrics = batch, self._current_amp().metrics()
            for logger in trainer.loggers if metrics else ():
                logger.log_metrics(metrics, step=batch)

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip the true gradients; by norm, and with one optimizer, inside of its step."""
        optimizer = getattr(optimizer, "optimizer", optimizer)  # of a LightningOptimizer
        by_norm = gradient_clip_algorithm == GradClipAlgorithmType.NORM
        if clip_val <= 0:
            return
        if by_norm and len(self._optimizers) == 1:
            self._current_amp().clip_grad_norm_(clip_val)
        else:
            self.unscale_gradients(optimizer)
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)


def _has_gradient_hook(model: LightningModule) -> bool:
    """Return whether a hook of the model or a callback may read the gradients before the step."""
    hook, trainer = "on_before_optimizer_step", cast(Any, model.trainer)
    return (
        is_overridden("configure_gradient_clipping", model)
        or is_overridden(hook, model)
        or any(is_overridden(hook, callback, Callback) for callback in trainer.callbacks)
    )
