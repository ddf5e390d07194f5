"""Losses of transformers on half logits, which they widen before cross entropy."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss import loss_utils

from tritonamp import functional

# what they compute of logits is cross entropy alone (transformers 5.23)
_LOSSES = frozenset(
    (loss_utils.ForCausalLMLoss, loss_utils.ForMaskedLMLoss, loss_utils.ForTokenClassification)
)


class _StaysHalf(torch.Tensor):
    """Half logits, and views of them, that ``float`` leaves half until cross entropy reads them."""

    def float(self, memory_format: Any = torch.preserve_format) -> Tensor:
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.nn.functional.cross_entropy:
            return super().__torch_function__(func, types, args, kwargs or {})
        logits, *others = args
        return functional.cross_entropy(logits.as_subclass(torch.Tensor), *others, **(kwargs or {}))


class FusedLoss:
    """A loss whose cross entropy reads half logits: no FP32 copy of them, nor of their gradient.

    It is ``tritonamp.functional.cross_entropy``, which computes in FP32 anyway.

    Args:
        stock: one of transformers' own, that does nothing else with logits.
    """

    def __init__(self, stock: Callable[..., Tensor]) -> None:
        functools.update_wrapper(self, stock)
        self._stock = stock

    def __call__(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss, FP32."""
        half = logits.dtype in (torch.float16, torch.bfloat16)
        if not half or torch.compiler.is_compiling():  # which leaves the copy out by itself
            return self._stock(logits, *args, **kwargs)
        return self._stock(logits.as_subclass(_StaysHalf), *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Be pickled as the loss that it stands for."""
        return functools.partial, (self._stock,)


def fuse_loss(model: nn.Module) -> None:
    """Put a ``FusedLoss`` in the place of the model's loss function, where it is one of those.

    Args:
        model: of transformers, or around one, as PEFT's are.
    """
    own = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if own is not None and own.loss_function in _LOSSES:
        own.loss_function = FusedLoss(own.loss_function)
