"""Leaves of nested values, as torch's pytrees have them: in every forward, so without their price.

Tuples, lists, dictionaries and what is in most of them are walked here; the rest is torch's.
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
    if kind is tuple or kind is list:
        return [leaf for item in value for leaf in leaves(item)]
    if kind is dict:
        return [leaf for item in value.values() for leaf in leaves(item)]
    return tree_leaves(value)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return ``torch.utils._pytree.tree_map(function, value)``."""
    kind = type(value)
    if kind in _PLAIN:
        return function(value)
    if kind is tuple:
        return tuple([mapped(function, item) for item in value])
    if kind is list:
        return [mapped(function, item) for item in value]
    if kind is dict:
        return {key: mapped(function, item) for key, item in value.items()}
    return tree_map(function, value)
