"""The FP32 inputs behind the half ones that an enabled model was given.

A module that computes in FP32 reads them. A value above 65504 would reach it as inf otherwise.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# Cast tensor to the tensor it came from. Both are weak: the caller holds the one during the
# forward, and autograd may hold the other for much longer.
_given: Any = WeakTensorKeyDictionary()


def remember(given: Iterable[Any], cast: Iterable[Any]) -> None:
    """Note the tensors that were cast.

    Args:
        given: arguments of the model.
        cast: the same arguments, as the model gets them.
    """
    for old, new in zip(given, cast, strict=True):
        if new is not old and type(new) is Tensor:
            _given[new] = weakref.ref(old)


def uncast(value: Any) -> Any:
    """Return the FP32 tensor behind an argument, or behind the tensor that it is a view of.

    Returns ``value`` where there is none, or where it was written to since.
    """
    if torch.compiler.is_compiling() or not len(_given) or type(value) is not Tensor:
        return value
    base: Any = value._base if value._is_view() else value
    original = _given.get(base, lambda: None)()
    if original is None or value._version:
        return value
    if base is value:
        return original
    if original.stride() != base.stride():
        return value
    offset = value.storage_offset() - base.storage_offset() + original.storage_offset()
    return original.as_strided(value.size(), value.stride(), offset)
