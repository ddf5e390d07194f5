"""Leaves of nested values are those of torch's pytrees, in the same order."""

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from tritonamp.nested import leaves, map_leaves

Pair = namedtuple("Pair", "first second")


class OwnDict(dict[str, Any]):
    """No node of torch's pytrees: a leaf."""


TREES: dict[str, Any] = {
    "tensor": torch.ones(2),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "arguments": ((torch.ones(2), 3), {"mask": None, "name": "x"}),
    "order of insertion": {"b": 1, "a": [2, {"d": 3, "c": 4}]},
    "empty": ((), {}),
    "named tuple": [Pair(1, [2, torch.ones(1)])],
    "ordered": OrderedDict(b=(1, 2), a=3),
    "leaf of another class": (OwnDict(a=1), object()),
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_same_as_pytrees(tree: Any) -> None:
    expected = tree_leaves(tree)
    found = leaves(tree)
    assert len(found) == len(expected)
    assert all(a is b for a, b in zip(found, expected, strict=True))

    def wrapped(leaf: Any) -> tuple[str, int]:
        return "leaf", id(leaf)

    def is_leaf(value: Any) -> bool:
        return isinstance(value, tuple) and value[:1] == ("leaf",)

    ours, theirs = map_leaves(wrapped, tree), tree_map(wrapped, tree)
    assert type(ours) is type(theirs)
    assert tree_leaves(ours, is_leaf=is_leaf) == tree_leaves(theirs, is_leaf=is_leaf)
