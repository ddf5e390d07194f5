"""Casts of nested inputs and outputs."""

import copy
import dataclasses
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from tritonamp.policy import HALF_DTYPES


class Cast(NamedTuple):
    """What becomes of tensors by their dtype; those of no source dtype pass."""

    sources: tuple[torch.dtype, ...]
    target: torch.dtype
    passes: tuple[type, ...] = ()  # classes of tensors that pass, whatever their dtype


TO: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
    torch.float32: Tensor.float,
}
"""``Tensor.to`` by dtype, at half the price."""


def to_half(dtype: torch.dtype) -> Cast:
    """Return the cast of FP32 and the other half format; FP64, integers and complex pass."""
    return Cast((torch.float32, *HALF_DTYPES), dtype)


def from_half(dtype: torch.dtype) -> Cast:
    """Return the cast of half tensors to ``dtype``; everything else passes."""
    return Cast(HALF_DTYPES, dtype)


def cast_tree(value: Any, cast: Cast) -> Any:
    """Return ``value`` with every tensor inside it cast; the same object where nothing changed.

    Looks into lists, tuples, named tuples, mappings and dataclasses, which keep their type, and
    calls ``obj.to(dtype)`` on other objects that have it. To FP32, distributions are cast, too.
    """
    if type(value) is Tensor:
        return TO[cast.target](value) if value.dtype in cast.sources else value
    return _cast(value, cast)[0]


def _cast(value: Any, cast: Cast) -> tuple[Any, bool]:
    """Return the cast value, and whether anything changed: torch.compile cannot ask by ``is``."""
    if isinstance(value, Tensor):
        if value.dtype not in cast.sources or isinstance(value, cast.passes):
            return value, False
        return value.to(cast.target), True
    if value is None:  # torch.compile cannot ask None whether it is a dataclass
        return value, False
    if isinstance(value, PackedSequence):
        data, changed = _cast(value.data, cast)
        return (value._replace(data=data), True) if changed else (value, False)
    if isinstance(value, (list, tuple)):
        items = [_cast(item, cast) for item in value]
        if not any(changed for _, changed in items):
            return value, False
        new = [item for item, _ in items]
        named = isinstance(value, tuple) and hasattr(value, "_fields")
        return (type(value)(*new) if named else type(value)(new)), True
    if isinstance(value, MutableMapping):
        return _with(
            value, {key: _cast(item, cast) for key, item in value.items()}, operator.setitem
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        # object's own, because a dataclass may be frozen
        return _with(
            value, {name: _cast(getattr(value, name), cast) for name in names}, object.__setattr__
        )
    if isinstance(value, (nn.Module, type)):
        return value, False
    if hasattr(value, "to"):
        return _with_to(value, cast)
    if cast.target is torch.float32 and _is_distribution(type(value)):
        inside = {name: _cast(item, cast) for name, item in vars(value).items()}
        return _with(value, inside, object.__setattr__)
    return value, False


def _is_distribution(cls: type) -> bool:
    """Tell whether objects of a class hold the parameters of a distribution: torch's, diffusers'.

    A divergence computed of them outside a forward, for one, leaves the half range.
    """
    return hasattr(cls, "sample") and hasattr(cls, "mode")


def _with(
    value: Any, items: dict[Any, tuple[Any, bool]], put: Callable[..., None]
) -> tuple[Any, bool]:
    """Return a copy of ``value`` with those of ``items`` put in that changed."""
    if not any(changed for _, changed in items.values()):
        return value, False
    new = {key: item for key, (item, _) in items.items()}
    if type(value) is dict:
        return new, True
    if type(value) is OrderedDict:  # torch.compile cannot follow a copy of these two
        return OrderedDict(new), True
    if type(value) is defaultdict:
        return defaultdict(value.default_factory, new), True
    result = copy.copy(value)
    for key, (item, changed) in items.items():
        if changed:
            put(result, key, item)
    return result, True


def _with_to(value: Any, cast: Cast) -> tuple[Any, bool]:
    try:
        new = value.to(cast.target)
        return new, new is not value
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return value, False  # its ``to`` is about something else
