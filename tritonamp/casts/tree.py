"""Casts of nested inputs and outputs."""

import dataclasses
from collections import UserList, deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from tritonamp.casts.containers import mapping_of, object_of, sequence_of
from tritonamp.casts.unread import unread
from tritonamp.policy import HALF_DTYPES


class Cast(NamedTuple):
    """A cast of tensors by dtype. Tensors of other dtypes than ``sources`` pass unchanged."""

    sources: tuple[torch.dtype, ...]
    target: torch.dtype
    passes: tuple[type, ...] = ()  # classes of tensors that pass, whatever their dtype
    is_unread: bool = False  # whether the cast waits until an operation reads the tensor


TO: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
    torch.float32: Tensor.float,
}
"""``Tensor.to`` by dtype, at half the cost."""


def to_half(dtype: torch.dtype) -> Cast:
    """Return the cast of FP32 and the other half format. FP64, integers and complex pass."""
    return Cast((torch.float32, *HALF_DTYPES), dtype)


def from_half(dtype: torch.dtype) -> Cast:
    """Return the cast of half tensors to ``dtype``. Everything else passes."""
    return Cast(HALF_DTYPES, dtype)


def cast_tree(value: Any, cast: Cast) -> Any:
    """Return ``value`` with every tensor inside it cast; the same object where nothing changed.

    It looks into lists, tuples, named tuples, deques, mappings and dataclasses, which keep their
    type. It calls ``obj.to(dtype)`` of other objects that have this method. A cast to FP32 also
    casts distributions. A container that cannot be made with other items is returned unchanged, and
    so is one that contains itself.
    """
    if type(value) is Tensor and not cast.is_unread:
        return TO[cast.target](value) if value.dtype in cast.sources else value
    try:
        new = _cast(value, cast)
        return value if new is None else new
    except RecursionError:
        return value


def _cast(value: Any, cast: Cast) -> Any:
    """Return the cast value; None where nothing changes, or nothing can.

    Without None the caller would have to compare by ``is``, which torch.compile cannot.
    """
    if isinstance(value, Tensor):
        passes = value.dtype not in cast.sources or isinstance(value, cast.passes)
        if passes:
            return None
        return unread(value, cast.target) if cast.is_unread else value.to(cast.target)
    if isinstance(value, PackedSequence):
        data = _cast(value.data, cast)
        return None if data is None else value._replace(data=data)
    if isinstance(value, (list, tuple, deque, UserList)):
        return _cast_inside(value, enumerate(value), cast, sequence_of)
    if isinstance(value, MutableMapping):  # a ModelOutput is a dataclass, too
        return _cast_inside(value, _items(value), cast, mapping_of)
    # torch.compile cannot ask None whether it is a dataclass
    if value is None or isinstance(value, (nn.Module, type)):
        return None
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        attributes = [(name, getattr(value, name)) for name in names]
        return _cast_inside(value, attributes, cast, object_of)
    if isinstance(value, Mapping):
        return _cast_inside(value, _items(value), cast, mapping_of)
    if _has_to(value):
        return _with_to(value, cast)
    if cast.target is torch.float32 and _is_distribution(type(value)):
        return _cast_inside(value, vars(value).items(), cast, object_of)
    return None


def _cast_inside(
    value: Any,
    items: Iterable[tuple[Any, Any]],
    cast: Cast,
    remade: Callable[[Any, dict[Any, Any]], Any],
) -> Any:
    """Return a copy of a container with cast items; None where no item changes.

    Args:
        value: container.
        items: keys and items of the container.
        cast: cast to apply.
        remade: function that returns a copy of a container, given the changed items by key.
    """
    new = [(key, _cast(item, cast)) for key, item in items]
    changed = {key: item for key, item in new if item is not None}
    return remade(value, changed) if changed else None


def _items(value: Any) -> Any:
    if isinstance(value, dict):
        return value.items()
    try:
        return list(value.items())
    except Exception:  # a class of the user's own may raise anything
        return ()


def _has_to(value: Any) -> bool:
    try:
        return hasattr(value, "to")
    except Exception:  # as above
        return False


def _is_distribution(cls: type) -> bool:
    """Return whether a class is a distribution with parameters, as torch's and diffusers' are.

    One reason to cast: a divergence of half parameters, computed outside a forward, leaves the half
    range.
    """
    return hasattr(cls, "sample") and hasattr(cls, "mode")


def _with_to(value: Any, cast: Cast) -> Any:
    try:
        new = value.to(cast.target)
        return None if new is value else new
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None  # its ``to`` is about something else
