"""Hugging Face's Trainer: ``enable(trainer, level="O2")`` before ``trainer.train()``."""

from typing import Any

import transformers

from tritonamp.integrations import accelerate


def enable(trainer: transformers.Trainer, **settings: Any) -> None:
    """Has ``trainer.train`` enable model and optimizer, and put them back when it is called again.

    The loop, its clipping (``max_grad_norm``, the true norm is logged), accumulation, evaluation
    and checkpoints stay Trainer's; ``trainer.accelerator.amp`` is the handle. What Trainer logs of
    the training has ``amp.metrics()`` in it.

    Args:
        trainer: of any subclass, with ``fp16`` and ``bf16`` False.
        settings: the keywords of ``tritonamp.enable``: ``level``, ``dtype``, ``scaler``, fields of
            ``Policy``...

    Raises:
        ValueError: as ``tritonamp.integrations.accelerate.enable``.
    """
    accelerate.enable(trainer.accelerator, **settings)
    cls = type(trainer)
    trainer.__class__ = type(cls.__name__, (_EnabledTrainer, cls), {"__module__": cls.__module__})


class _EnabledTrainer(transformers.Trainer):
    """A Trainer that logs its Amp's numbers, and whose saved models say the dtype that was saved.

    save_pretrained says that of the parameters.
    """

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        amp = getattr(self.accelerator, "amp", None)
        if amp is not None and "loss" in logs:  # else of an evaluation, or of the whole run
            logs.update(amp.metrics())
        super().log(logs, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        amp = getattr(self.accelerator, "amp", None)
        model = self.accelerator.unwrap_model(self.model)
        if (
            amp is not None
            and self.args.should_save
            and isinstance(model, transformers.PreTrainedModel)
        ):
            of_parameters, model.config.dtype = model.config.dtype, amp.policy.state_dict_dtype
            model.config.save_pretrained(output_dir or str(self.args.output_dir))
            model.config.dtype = of_parameters
