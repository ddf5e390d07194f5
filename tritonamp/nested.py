"""Leaves of nested values, as in torch's pytrees, but fast enough for every forward.

This module handles tuples, lists, dictionaries and plain leaves, and leaves all other classes to
torch.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_PLAIN = frozenset({Tensor, int, float, bool, str, type(None)})


def leaves(value: Any) -> list[Any]:
    """Return ``torch.utils._pytree.tree_leaves(value)``."""
    kind = type(value)
    if kind in _PLAIN:
        return [value]
    if kind is not tuple and kind is not list and kind is not dict:
        return tree_leaves(value)
    found = []
    for item in value.values() if kind is dict else value:
        if type(item) in _PLAIN:
            found.append(item)
        else:
            found += leaves(item)
    return found


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return ``torch.utils._pytree.tree_map(function, value)``."""
    kind = type(value)
    if kind in _PLAIN:
        return function(value)
    if kind is tuple or kind is list:
        items = [function(i) if type(i) in _PLAIN else map_leaves(function, i) for i in value]
        return items if kind is list else tuple(items)
    if kind is dict:
        return {key: map_leaves(function, item) for key, item in value.items()}
    if hasattr(kind, "_make") and isinstance(value, tuple):  # its constructor may be of its own
        return kind._make([map_leaves(function, item) for item in value])
    return tree_map(function, value)
