"""Hugging Face's Trainer: ``enable(trainer, level="O2")`` before ``trainer.train()``."""

import contextlib
from typing import Any

import transformers

from tritonamp.casts.model_losses import computes_logits
from tritonamp.class_swap import Swapped, install, is_installed
from tritonamp.integrations import accelerate


def enable(trainer: transformers.Trainer, *, fused_loss: bool = True, **settings: Any) -> None:
    """Make ``trainer.train`` enable model and optimizer, and disable them before it runs again.

    The Trainer keeps its loop, clipping (``max_grad_norm``, with the true norm in the log),
    accumulation, evaluation and checkpoints. ``trainer.accelerator.amp`` is the handle. The
    Trainer's training logs include ``amp.metrics()``.

    Args:
        trainer: a Trainer or an instance of a subclass. Its ``fp16`` or ``bf16`` sets the default
            of ``dtype``; tritonamp does the casts.
        fused_loss: ``fuse_loss`` of ``tritonamp.Policy``.
        settings: keywords of ``tritonamp.enable``: ``level``, ``dtype`` (default: the dtype of
            ``fp16`` or ``bf16``, else the dtype in which the model was loaded), ``scaler``, fields
            of ``Policy`` and others.

    Raises:
        ValueError: the cases of ``tritonamp.integrations.accelerate.enable``, and
            ``fp16_full_eval`` or ``bf16_full_eval``.
    """
    if trainer.args.fp16_full_eval or trainer.args.bf16_full_eval:
        raise ValueError(
            "trainer: expected fp16_full_eval and bf16_full_eval False, got one that is True: it "
            "would round the model that trains; evaluation is in half without"
        )
    accelerate.enable(trainer.accelerator, **{"fuse_loss": fused_loss, **settings})
    if not is_installed(trainer):
        install(trainer, _EnabledTrainer)


class _EnabledTrainer(Swapped, transformers.Trainer):
    """A Trainer that logs its Amp's numbers, and whose checkpoints hold FP32 values.

    ``save_model`` writes the dtype in which the model was loaded. The methods with an underscore
    are private to transformers (5.23).
    """

    _saves_checkpoint = False

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        amp = getattr(self.accelerator, "amp", None)
        if amp is not None and "loss" in logs:  # else of an evaluation, or of the whole run
            logs.update(amp.metrics())
        super().log(logs, *args, **kwargs)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """Compute the loss; if a subclass reads the logits, too, with all logits at once."""
        stock = super().compute_loss
        own = stock.__func__ is transformers.Trainer.compute_loss  # type: ignore[attr-defined]
        alone = own and not return_outputs
        with contextlib.nullcontext() if alone else computes_logits(model):
            return stock(model, inputs, return_outputs, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint, and tell ``_save``, which is called for it, that it is one."""
        self._saves_checkpoint = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saves_checkpoint = False

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the model: FP32 values for a checkpoint, else the dtype in which it was loaded."""
        if self._saves_checkpoint and state_dict is None:
            state_dict = self.accelerator.unwrap_model(self.model).state_dict()
        super()._save(output_dir, state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load a prepared model under FSDP; ``_load_optimizer_and_scheduler`` loads other models.

        A half model would round the FP32 values if it loaded them before it is enabled.
        """
        if model is not None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load model and optimizer, which are already enabled."""
        if checkpoint is not None and not self.is_fsdp_enabled:
            super()._load_from_checkpoint(checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)
