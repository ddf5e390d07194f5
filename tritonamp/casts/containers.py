"""Copy containers with other items. The copies have the originals' classes.

Originals keep their items. Where a class does not allow such a copy, functions return the original.
"""

import copy
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch


def sequence_of(value: Any, items: list[Any]) -> Any:
    """Return a list, tuple, named tuple or deque like ``value`` with these items; else ``value``.

    Args:
        value: sequence to copy.
        items: new items, as many as ``value`` has.
    """
    kind = type(value)
    if kind is list:
        return items
    if torch.compiler.is_compiling():  # it cannot ask by ``is``
        named = isinstance(value, tuple) and hasattr(value, "_fields")
        return kind(*items) if named else kind(items)
    pairs = list(enumerate(items))
    if isinstance(value, tuple):
        return _first(value, pairs, [lambda: _tuple(value, items), lambda: kind(items)])
    return _first(value, pairs, [lambda: _copy(value, pairs), lambda: kind(items)])


def mapping_of(value: Any, items: dict[Any, Any], changed: Iterable[Any]) -> Any:
    """Return a mapping like ``value`` with these items; else ``value``.

    Args:
        value: mapping to copy.
        items: all items of the copy, under the keys of ``value``.
        changed: keys whose items differ from those of ``value``.
    """
    kind = type(value)
    if kind is dict:
        return items
    if kind is OrderedDict:  # torch.compile cannot follow a copy of these two
        return OrderedDict(items)
    if kind is defaultdict:
        return defaultdict(value.default_factory, items)
    pairs = [(key, items[key]) for key in changed]
    makers = [lambda: _copy(value, pairs)] if isinstance(value, MutableMapping) else []
    return _first(value, pairs, [*makers, lambda: kind(items)])


def object_of(value: Any, attributes: dict[str, Any], changed: Iterable[str]) -> Any:
    """Return a copy of a dataclass or another plain object with these attributes; else ``value``.

    Args:
        value: object to copy.
        attributes: attributes of the copy by name.
        changed: names of the attributes that differ from those of ``value``.
    """
    try:
        result = copy.copy(value)
        for name in changed:  # by object's own, because a dataclass may be frozen
            object.__setattr__(result, name, attributes[name])
    except Exception:
        return value
    return result


def _first(value: Any, pairs: list[tuple[Any, Any]], makers: list[Callable[[], Any]]) -> Any:
    """Return the first result of ``makers`` that has the class and the new items, or ``value``."""
    for make in makers:
        try:
            result = make()
            if type(result) is type(value) and all(result[key] is item for key, item in pairs):
                return result
        except Exception:  # a class of the user's own may raise anything
            continue
    return value


def _tuple(value: Any, items: list[Any]) -> Any:
    """Return a tuple of the class of ``value``, whose constructor may take other arguments."""
    result = tuple.__new__(type(value), items)
    if hasattr(value, "__dict__"):
        vars(result).update(vars(value))
    return result


def _copy(value: Any, pairs: list[tuple[Any, Any]]) -> Any:
    """Return a shallow copy with some items replaced, or None if ``value`` changed with it.

    A shallow copy may share memory with the original. The items of ``value`` are put back then.
    """
    result = copy.copy(value)
    before = [(key, value[key]) for key, _ in pairs]
    try:
        for key, item in pairs:
            operator.setitem(result, key, item)
        if all(value[key] is item for key, item in before):
            return result
    except BaseException:
        _write_back(value, before)
        raise
    _write_back(value, before)
    return None


def _write_back(value: Any, before: list[tuple[Any, Any]]) -> None:
    for key, item in before:
        if value[key] is not item:
            value[key] = item
