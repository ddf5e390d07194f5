"""Accelerate: ``enable(accelerator, level="O2")`` before ``accelerator.prepare``.

The loop stays as it is.
"""

import dataclasses
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn

import tritonamp
from tritonamp.class_swap import Swapped, install, is_installed, uninstall
from tritonamp.policy import HALF_DTYPES

ENGINES = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.FSDP,
)
DTYPES = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16}
# levels without a dtype of their own, which other levels, and policies, have
LEVELS_OF_ANY_DTYPE = (None, "O0", "O1", "O2", "O3")


def enable(accelerator: accelerate.Accelerator, **settings: Any) -> None:
    """Make ``accelerator.prepare`` enable the models and optimizers of one call.

    After that ``accelerator.amp`` is their handle. The accelerator's ``backward``,
    ``clip_grad_norm_``, ``clip_grad_value_``, ``unscale_gradients``, ``autocast``, ``save_state``
    and ``load_state`` use the handle. Reading ``step_was_skipped`` waits for the device. The
    accelerator's ``log`` adds ``amp.metrics()`` without a wait, and ``free_memory`` disables the
    models.

    Args:
        accelerator: an Accelerator in a single process or under DDP or FSDP2. Its
            ``mixed_precision`` "fp16" or "bf16" sets the default of ``dtype``; tritonamp does the
            casts.
        settings: keywords of ``tritonamp.enable``: ``level``, ``dtype`` (default: the dtype of
            ``mixed_precision``, else the dtype in which the model was loaded), ``scaler``, fields
            of ``Policy`` and others.

    Raises:
        ValueError: the accelerator computes in FP8, has already prepared a model or an optimizer,
            or runs another engine, such as FSDP1.
    """
    if accelerator.mixed_precision not in DTYPES:
        raise ValueError(
            f"accelerator: expected mixed_precision one of {', '.join(DTYPES)}, got "
            f"{accelerator.mixed_precision!r}: tritonamp does the casts"
        )
    if accelerator.distributed_type not in ENGINES:
        raise ValueError(
            f"accelerator: expected one of {', '.join(map(str, ENGINES))}, got "
            f"{accelerator.distributed_type}: other engines have loss scales and masters of their "
            "own"
        )
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError(
            "accelerator: expected FSDP2, whose shards can be FP32 masters, got FSDP1: say "
            "FullyShardedDataParallelPlugin(fsdp_version=2), or fsdp_version: 2 in its config"
        )
    # private (accelerate 1.15): prepared models, whose forward runs under its autocast for good
    if accelerator._optimizers or (accelerator.native_amp and accelerator._models):
        raise ValueError(
            "accelerator: it has prepared a model or an optimizer already: call enable before "
            "accelerator.prepare"
        )
    if settings.get("level") in LEVELS_OF_ANY_DTYPE and settings.get("policy") is None:
        settings = {"dtype": DTYPES[accelerator.mixed_precision], **settings}
    _keep_outputs(accelerator)
    if is_installed(accelerator):  # by an earlier call, with other settings
        uninstall(accelerator)
    install(accelerator, _EnabledAccelerator, None, settings)
    accelerator.native_amp, accelerator.scaler = False, None


def _keep_outputs(accelerator: accelerate.Accelerator) -> None:
    """Remove the half ``output_dtype`` that Accelerate gives FSDP2; the policy casts outputs."""
    plugin: Any = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    given = None if plugin is None else plugin.mixed_precision_policy
    if given is not None and given.output_dtype in HALF_DTYPES:
        plugin.mixed_precision_policy = dataclasses.replace(given, output_dtype=None)


class _EnabledAccelerator(Swapped, accelerate.Accelerator):
    """An Accelerator that uses an ``Amp`` for mixed precision.

    Attributes:
        amp: handle of the prepared models; None until an optimizer is prepared.
    """

    _belongings = ("amp", "_settings")
    amp: tritonamp.Amp | None
    scaler: Any
    _settings: dict[str, Any]

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        result = super().prepare(*args, **kwargs)
        prepared = result if isinstance(result, (tuple, list)) else (result,)  # FSDP2: a list
        optimizers = [o for o in prepared if isinstance(o, AcceleratedOptimizer)]
        # none, or only optimizers of an earlier call, which Accelerate returns as they are
        if all(self.amp is not None and getattr(o, "amp", None) is self.amp for o in optimizers):
            return result
        models = [m for m in prepared if isinstance(m, nn.Module)]
        if self.amp is not None or not models:
            raise RuntimeError(
                "accelerator.prepare: expected all models and optimizers at once, got an optimizer "
                "without its model, or after others: prepare all models and optimizers in one "
                "call, and call accelerator.free_memory() before the next ones (a Trainer on "
                "several GPUs in one process is of this kind: use torchrun, or show it one GPU; so "
                "is one whose model transformers has sharded itself: use fsdp=True)"
            )
        self.amp = tritonamp.enable(models, [o.optimizer for o in optimizers], **self._settings)
        self.scaler = _SavedWithScaler(self.amp)
        for optimizer in optimizers:
            install(optimizer, _EnabledOptimizer, self.amp, len(optimizers) == 1)
        return result

    def free_memory(self, *objects: Any) -> Any:
        if self.amp is not None:
            self.amp.disable()
            self.amp = self.scaler = None
            for optimizer in filter(is_installed, self._optimizers):
                uninstall(optimizer)
        return super().free_memory(*objects)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        if self.amp is None:
            return super().backward(loss, **kwargs)
        with self.amp.scale_loss(
            loss / self.gradient_accumulation_steps, self.amp.fed_by(loss)
        ) as scaled:
            scaled.backward(**kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        if self.amp is None:
            return super().unscale_gradients(optimizer)
        if optimizer is not None:
            wrapped = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
            optimizer = [o.optimizer if isinstance(o, AcceleratedOptimizer) else o for o in wrapped]
        self.amp.unscale_(optimizer)

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self.amp is not None and norm_type == 2 and self._are_all_that_step(parameters):
            return self.amp.clip_grad_norm_(max_norm)  # inside the step
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def _are_all_that_step(self, parameters: list[Tensor]) -> bool:
        """Return whether the list has all masters, or all of the models' trainable parameters."""
        assert self.amp is not None
        masters, given = list(self.amp.master_params()), set(parameters)
        trained = {p for model in self._models for p in model.parameters() if p.requires_grad}
        return given >= set(masters) or (len(trained) == len(masters) and given >= trained)

    def log(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        numbers = {} if self.amp is None else self.amp.metrics()
        super().log({**numbers, **values}, *args, **kwargs)

    def autocast(self, autocast_handler: Any = None) -> Any:
        if self.amp is None or autocast_handler is not None:
            return super().autocast(autocast_handler)
        return self.amp.autocast()


class _EnabledOptimizer(Swapped, AcceleratedOptimizer):
    """A wrapper around an enabled optimizer that reads a skip only on request.

    Its copies hold a plain optimizer, so they are plain wrappers.
    """

    _belongings = ("amp", "alone")
    _kept_by_copies = False
    amp: tritonamp.Amp
    alone: bool  # the only one that was prepared

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        if self.gradient_state.sync_gradients:  # with several, before another one's decision comes
            self._is_overflow = not self.alone and self._last_was_skip()

    @property
    def step_was_skipped(self) -> bool:
        return self._is_overflow or (self.alone and self._last_was_skip())

    def _last_was_skip(self) -> bool:
        history = self.amp.history
        return bool(history) and history[-1].cause is not None


class _SavedWithScaler:
    """The Amp's GradScaler with the Amp's state, which goes into Accelerate's ``scaler.pt``."""

    def __init__(self, amp: tritonamp.Amp) -> None:
        self.state_dict = amp.state_dict
        self.load_state_dict = amp.load_state_dict
        self._scaler = amp.scaler

    def _lazy_init_scale_growth_tracker(self, _: Any) -> None:
        """Keep the loaded scale; Accelerate's ``load_state`` calls this under FSDP2."""

    def __getattr__(self, name: str) -> Any:
        if name == "_scaler":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._scaler, name)
