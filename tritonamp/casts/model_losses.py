"""The loss that a model of transformers computes from ``labels=``, without FP32 logits.

transformers' losses begin with ``logits.float()``, which copies all logits. ``ModelLoss`` gives
them ``unread`` logits. If the last layer is a plain linear one, that layer returns unread logits,
too, so that only chunks of them are ever computed.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tritonamp import functional
from tritonamp.casts.unread import may_be_unread, unread, unread_call
from tritonamp.casts.unread_values import LayerCall
from tritonamp.policy import HALF_DTYPES

_PLAIN = {nn.Parameter}  # weights of a subclass may be shards, or have a format of their own


class ModelLoss:
    """A model's loss function, called with unread logits instead of half ones.

    Args:
        stock: a loss function of transformers, or one that a user has set.

    Attributes:
        may_leave_out: whether the last layer may return logits that are not computed yet.
    """

    def __init__(self, stock: Callable[..., Tensor]) -> None:
        functools.update_wrapper(self, stock)
        self.may_leave_out = True
        self._stock = stock

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss."""
        if may_be_unread():  # torch.compile leaves the copy out by itself
            args = tuple(map(_unread, args))
            kwargs = {name: _unread(value) for name, value in kwargs.items()}
        return self._stock(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the stock loss."""
        return functools.partial, (self._stock,)


def _unread(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in HALF_DTYPES
    return unread(value, value.dtype) if is_half else value


def install_loss(model: nn.Module) -> Callable[[], None]:
    """Make a ``ModelLoss`` of the loss function of a transformers model.

    Args:
        model: any model, or a wrapper such as PEFT's.

    Returns:
        function that restores the loss function.
    """
    own = _with_loss(model)
    if own is None or isinstance(own.loss_function, ModelLoss):
        return lambda: None
    was_set = vars(own).get("_loss_function")  # private (transformers 5.23)
    loss = ModelLoss(own.loss_function)
    own.loss_function = loss

    def restore() -> None:
        if own.loss_function is loss and was_set is None:
            del own._loss_function
        elif own.loss_function is loss:
            own.loss_function = was_set

    return restore


def _with_loss(model: nn.Module) -> Any:
    """Return the module of a transformers model with a loss, or None."""
    module: Any
    for module in model.modules():
        if isinstance(getattr(type(module), "loss_function", None), property):
            return module if module.loss_type or module.get_output_embeddings() else None
        if module is not model and _is_compiled(module):
            return None
    return None


def _is_compiled(module: nn.Module) -> bool:
    # private (torch 2.11 to 2.15): attributes that ``torch.compile`` and ``Module.compile`` set
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


@contextlib.contextmanager
def computes_logits(model: nn.Module) -> Iterator[None]:
    """Have the model's last layer compute its logits at once inside the block.

    For callers that read the logits in addition to the loss.
    """
    own = _with_loss(model)
    loss = None if own is None else own.loss_function
    if not isinstance(loss, ModelLoss):
        yield
        return
    before, loss.may_leave_out = loss.may_leave_out, False
    try:
        yield
    finally:
        loss.may_leave_out = before


def without_logits(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the model's last layer returns unread logits.

    It changes nothing if that layer is not a plain linear one, has adapters, hooks of gradients or
    a forward of its own, or is sharded or compiled.
    """
    own = _with_loss(model)
    if own is None or not isinstance(own.loss_function, ModelLoss):
        return contextlib.nullcontext()
    layer = own.get_output_embeddings()
    if not own.loss_function.may_leave_out or not _is_plain(layer):
        return contextlib.nullcontext()
    return leaves_logits_unread(layer)


def _is_plain(layer: Any) -> bool:
    if type(layer) is not nn.Linear or "forward" in vars(layer) or _is_compiled(layer):
        return False
    # private (torch 2.11 to 2.15): their gradients would not be computed
    has_hooks = layer._backward_hooks or layer._backward_pre_hooks
    return type(layer.weight) in _PLAIN and not has_hooks


@contextlib.contextmanager
def leaves_logits_unread(layer: nn.Linear) -> Iterator[None]:
    """Make ``layer`` return unread logits inside the block, if they are half and many.

    Few logits (``LinearHead.chunk_rows``) are computed at once, because they take less memory than
    the gradient of the weight, and the backward then need not compute them again.

    Args:
        layer: a linear layer with a plain weight, and without a forward set on the instance.
    """
    layer.forward = functools.partial(_forward_unread, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del layer.forward


def _forward_unread(layer: nn.Linear, input: Tensor) -> Tensor:
    kind = input.device.type
    casts = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if casts else input.dtype
    features = input.shape[-1]
    many = input.numel() > functional.LinearHead.chunk_rows(features) * features
    if many and dtype in HALF_DTYPES and may_be_unread():
        return unread_call(LayerCall(input, layer.weight, layer.bias, dtype))
    return type(layer).forward(layer, input)
