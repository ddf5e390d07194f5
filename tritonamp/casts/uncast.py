"""The FP32 inputs of an enabled model that were cast to half.

A module that computes in FP32 reads them. Otherwise a value above 65504 would reach it as inf.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

# by cast tensor or its base, the tensor that it came from; both are weak, because the caller holds
# the original during the forward only, and autograd may hold the cast tensor for much longer
_originals: Any = WeakTensorKeyDictionary()


def remember(given: Iterable[Any], cast: Iterable[Any]) -> None:
    """Note the tensors that were cast.

    Args:
        given: arguments of the model.
        cast: the same arguments, as the model gets them.
    """
    for old, new in zip(given, cast, strict=True):
        if new is not old and _is_one_tensor(new):
            _originals[_base(new)] = weakref.ref(old)


def uncast(value: Any) -> Any:
    """Return the FP32 tensor behind an argument, or behind the tensor that it is a view of.

    Returns ``value`` if there is none, or if ``value`` was written to since.
    """
    if torch.compiler.is_compiling() or not len(_originals) or not _is_one_tensor(value):
        return value
    base = _base(value)
    original = _originals.get(base, lambda: None)()
    if original is None or value._version:
        return value
    if base is value:
        return original
    if original.stride() != base.stride():
        return value
    offset = value.storage_offset() - base.storage_offset() + original.storage_offset()
    return original.as_strided(value.size(), value.stride(), offset)


def _base(tensor: Any) -> Any:
    """Return the tensor that ``tensor`` is a view of, as one of a subclass mostly is, or itself."""
    return tensor._base if tensor._is_view() else tensor


def _is_one_tensor(value: Any) -> bool:
    """Return whether ``value`` is a tensor that does not wrap others, as a ``DTensor`` does."""
    return type(value) is Tensor or (
        isinstance(value, Tensor) and not is_traceable_wrapper_subclass(value)
    )
