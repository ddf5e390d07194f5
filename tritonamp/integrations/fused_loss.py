"""Fused losses for transformers, whose own losses copy half logits to FP32."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import has_compiled_regions
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss import loss_utils

from tritonamp import functional
from tritonamp.integrations.unread_logits import LayerCall, UnreadLogits, leaves_logits_unread
from tritonamp.policy import HALF_DTYPES

# they use logits for cross entropy alone (transformers 5.23)
_LOSSES = frozenset(
    (loss_utils.ForCausalLMLoss, loss_utils.ForMaskedLMLoss, loss_utils.ForTokenClassification)
)

_PLAIN = {nn.Parameter}  # weights of a subclass may be shards, or have a format of their own


class _StaysHalf(torch.Tensor):
    """Half logits that ``float`` leaves half, until cross entropy reads them."""

    def float(self, memory_format: Any = torch.preserve_format) -> Tensor:
        return self

    def cross_entropy(self, target: Tensor, **kwargs: Any) -> Tensor:
        """Return ``torch.nn.functional.cross_entropy`` of these logits."""
        return functional.cross_entropy(self.as_subclass(torch.Tensor), target, **kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.nn.functional.cross_entropy:
            return super().__torch_function__(func, types, args, kwargs)
        logits, *others = args
        return logits.cross_entropy(*others, **(kwargs or {}))


class _Rows(_StaysHalf):
    """The inputs of the last layer instead of logits, for ``linear_cross_entropy``."""

    call: LayerCall

    @classmethod
    def of(cls, call: LayerCall) -> "_Rows":
        """Return the rows of ``call``."""
        rows = call.rows.as_subclass(cls)
        rows.call = call
        return rows

    def view(self, *size: Any) -> Tensor:
        """Return rows for the shape (-1, v), which losses use, and logits for other shapes."""
        rows, weight = self.call.rows, self.call.weight
        if size != (-1, len(weight)):
            return self.call.logits().as_subclass(_StaysHalf).view(*size)
        return _Rows.of(self.call._replace(rows=rows.reshape(-1, rows.shape[-1])))

    def cross_entropy(self, target: Tensor, **kwargs: Any) -> Tensor:
        """Return the loss of the logits, of which one chunk exists at a time."""
        rows, weight, bias, _ = self.call
        given = {name: kwargs[name] for name in ("ignore_index", "reduction")}
        return functional.linear_cross_entropy(rows, weight, target, bias, **given)


class FusedLoss:
    """A loss whose cross entropy reads half logits, without FP32 copies of logits or gradient.

    It calls ``tritonamp.functional.cross_entropy``, which computes in FP32. For ``UnreadLogits`` it
    calls ``linear_cross_entropy``, so they are never computed.

    Args:
        stock: a loss function of transformers that uses logits for cross entropy alone.
    """

    def __init__(self, stock: Callable[..., Tensor]) -> None:
        functools.update_wrapper(self, stock)
        self._stock = stock

    def __call__(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss as FP32."""
        half = logits.dtype in HALF_DTYPES
        if not half or torch.compiler.is_compiling():  # which leaves the copy out by itself
            return self._stock(logits, *args, **kwargs)
        if isinstance(logits, UnreadLogits):
            if logits.computed is None:
                return self._stock(_Rows.of(logits.call), *args, **kwargs)
            logits = logits.view(logits.shape)  # any operation returns a plain tensor
        return self._stock(logits.as_subclass(_StaysHalf), *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the stock loss."""
        return functools.partial, (self._stock,)


def fuse_loss(model: nn.Module) -> None:
    """Replace the model's loss function by a ``FusedLoss``, if it is one of ``_LOSSES``.

    Args:
        model: model of transformers, or a wrapper such as PEFT's.
    """
    own = _find_pretrained(model)
    if own is not None and own.loss_function in _LOSSES:
        own.loss_function = FusedLoss(own.loss_function)


def without_logits(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the model's fused loss never holds all logits at once.

    It changes nothing if the last layer is not a plain linear one, is sharded, has adapters or is
    compiled.
    """
    own = _find_pretrained(model)
    if own is None or not isinstance(own.loss_function, FusedLoss):
        return contextlib.nullcontext()
    layer = own.get_output_embeddings()
    plain = type(layer) is nn.Linear and "forward" not in vars(layer)
    if not plain or type(layer.weight) not in _PLAIN or has_compiled_regions(model):
        return contextlib.nullcontext()
    return leaves_logits_unread(layer)


def _find_pretrained(model: nn.Module) -> PreTrainedModel | None:
    return next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
