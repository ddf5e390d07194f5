"""Copy containers with some items replaced. The copies have the originals' classes.

Originals keep their items. Where a class does not allow such a copy, functions return None.
"""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, MutableMapping
from typing import Any

import torch


def sequence_of(value: Any, changed: dict[int, Any]) -> Any:
    """Return a list, tuple, named tuple or deque like ``value``, with items replaced by index."""
    kind = type(value)
    items = [changed.get(i, item) for i, item in enumerate(value)]
    if kind is list:
        return items
    if torch.compiler.is_compiling():  # torch.compile cannot follow the checks below
        named = isinstance(value, tuple) and hasattr(value, "_fields")
        return kind(*items) if named else kind(items)
    copied = _tuple if isinstance(value, tuple) else _copy
    return _first(value, changed, [lambda: copied(value, changed), lambda: kind(items)])


def mapping_of(value: Any, changed: dict[Any, Any]) -> Any:
    """Return a mapping like ``value``, with items replaced by key."""
    kind = type(value)
    if kind is dict:
        return {**value, **changed}
    if kind is OrderedDict:  # torch.compile cannot follow a copy of these two
        return OrderedDict({**value, **changed})
    if kind is defaultdict:
        return defaultdict(value.default_factory, {**value, **changed})
    makers = [lambda: _copy(value, changed)] if isinstance(value, MutableMapping) else []
    return _first(value, changed, [*makers, lambda: kind({**value, **changed})])


def object_of(value: Any, changed: dict[str, Any]) -> Any:
    """Return a dataclass or another plain object like ``value``, with attributes replaced."""
    try:
        result = copy.copy(value)
        for name, attribute in changed.items():
            # by object's own, because a dataclass may be frozen
            object.__setattr__(result, name, attribute)
    except Exception:
        return None
    return result


def _first(value: Any, changed: dict[Any, Any], makers: list[Callable[[], Any]]) -> Any:
    """Return the first result of ``makers`` that has the class and the new items, or None."""
    for make in makers:
        try:
            result = make()
            if type(result) is type(value) and all(result[k] is v for k, v in changed.items()):
                return result
        except Exception:  # a class of the user's own may raise anything
            continue
    return None


def _tuple(value: Any, changed: dict[int, Any]) -> Any:
    """Return a tuple of the class of ``value``, whose constructor may take other arguments."""
    result = tuple.__new__(type(value), [changed.get(i, item) for i, item in enumerate(value)])
    if hasattr(value, "__dict__"):
        vars(result).update(vars(value))
    return result


def _copy(value: Any, changed: dict[Any, Any]) -> Any:
    """Return a shallow copy with items replaced, or None if ``value`` changed with it.

    A shallow copy may share memory with the original. The items of ``value`` are put back then.
    """
    result = copy.copy(value)
    before = {key: value[key] for key in changed}
    try:
        for key, item in changed.items():
            result[key] = item
    finally:
        shared = [key for key, item in before.items() if value[key] is not item]
        for key in shared:
            value[key] = before[key]
    return None if shared else result
