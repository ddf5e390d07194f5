"""The graph that autograd has recorded behind a tensor."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction


def nodes(tensor: Tensor) -> Iterator[Any]:
    """Yield each autograd node behind ``tensor`` once, beginning with its own."""
    found, todo = set[object](), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [following for following, _ in node.next_functions]
            yield node


def is_custom(node: Any) -> bool:
    """Return whether a node belongs to a ``torch.autograd.Function``, which may hide a graph."""
    return isinstance(node, BackwardCFunction)


def leaves(tensor: Tensor) -> set[Tensor]:
    """Return the tensors that a backward from ``tensor`` gives gradients to."""
    return {node.variable for node in nodes(tensor) if hasattr(node, "variable")}
