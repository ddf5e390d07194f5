"""The graph that autograd has recorded behind a tensor."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor


def nodes(tensor: Tensor) -> Iterator[Any]:
    """Yield each autograd node behind ``tensor`` once, beginning with its own."""
    found, todo = set[object](), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [following for following, _ in node.next_functions]
            yield node


def gradient_leaves(found: Iterable[Any]) -> set[Tensor]:
    """Return the tensors among ``nodes`` that a backward gives gradients to."""
    return {node.variable for node in found if hasattr(node, "variable")}
