"""Casts of nested inputs and outputs."""

import dataclasses
from collections import UserList, deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from tritonamp.casts.containers import mapping_of, object_of, sequence_of
from tritonamp.policy import HALF_DTYPES


class Cast(NamedTuple):
    """A cast of tensors by dtype. Tensors of other dtypes than ``sources`` pass unchanged."""

    sources: tuple[torch.dtype, ...]
    target: torch.dtype
    passes: tuple[type, ...] = ()  # classes of tensors that pass, whatever their dtype


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
    if type(value) is Tensor:
        return TO[cast.target](value) if value.dtype in cast.sources else value
    try:
        return _cast(value, cast)[0]
    except RecursionError:
        return value


def _cast(value: Any, cast: Cast) -> tuple[Any, bool]:
    """Return the cast value, and whether anything changed.

    The flag is needed because torch.compile cannot compare objects by ``is``.
    """
    if isinstance(value, Tensor):
        if value.dtype not in cast.sources or isinstance(value, cast.passes):
            return value, False
        return value.to(cast.target), True
    if value is None:  # torch.compile cannot ask None whether it is a dataclass
        return value, False
    if isinstance(value, PackedSequence):
        data, changed = _cast(value.data, cast)
        return (value._replace(data=data), True) if changed else (value, False)
    if isinstance(value, (list, tuple, deque, UserList)):
        items = [_cast(item, cast) for item in value]
        if not any(changed for _, changed in items):
            return value, False
        return _unless_same(value, sequence_of(value, [item for item, _ in items]))
    is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if isinstance(value, MutableMapping) or (isinstance(value, Mapping) and not is_dataclass):
        return _cast_inside(value, _items(value), cast, mapping_of)
    if is_dataclass:
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return _cast_inside(
            value, [(name, getattr(value, name)) for name in names], cast, object_of
        )
    if isinstance(value, (nn.Module, type)):
        return value, False
    if _has_to(value):
        return _with_to(value, cast)
    if cast.target is torch.float32 and _is_distribution(type(value)):
        return _cast_inside(value, vars(value).items(), cast, object_of)
    return value, False


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


def _cast_inside(
    value: Any,
    items: Iterable[tuple[Any, Any]],
    cast: Cast,
    remade: Callable[[Any, dict[Any, Any], list[Any]], Any],
) -> tuple[Any, bool]:
    """Return a container or its copy with cast items, and whether any item changed.

    Args:
        value: container.
        items: keys and items of the container.
        cast: cast to apply.
        remade: function that returns a copy of a container, given all items and the keys of the
            changed ones.
    """
    inside = {key: _cast(item, cast) for key, item in items}
    changed = [key for key, (_, changes) in inside.items() if changes]
    if not changed:
        return value, False
    return _unless_same(value, remade(value, {k: item for k, (item, _) in inside.items()}, changed))


def _unless_same(value: Any, new: Any) -> tuple[Any, bool]:
    return new, torch.compiler.is_compiling() or new is not value


def _with_to(value: Any, cast: Cast) -> tuple[Any, bool]:
    try:
        new = value.to(cast.target)
        return new, new is not value
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return value, False  # its ``to`` is about something else
