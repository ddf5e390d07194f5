"""The graph that autograd has recorded behind a tensor."""

from collections.abc import Iterable, Iterator, Sequence
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


def reads_leaves(tensor: Tensor, spans: Sequence[tuple[int, int]], most: int = 1000) -> bool:
    """Return whether a backward of ``tensor`` reaches leaves on a way around some forwards.

    Args:
        tensor: the loss.
        spans: for each forward, the sequence numbers of its first node, and after its last one.
        most: number of nodes outside of the forwards from which on the result is True.
    """
    found, todo = set[object](), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in found:
            continue
        found.add(node)
        if hasattr(node, "variable") or len(found) > most:
            return True
        number = node._sequence_nr()
        if not any(first <= number < end for first, end in spans):
            todo += [following for following, _ in node.next_functions]
    return False


def gradient_leaves(found: Iterable[Any]) -> set[Tensor]:
    """Return the tensors among ``nodes`` that a backward gives gradients to."""
    return {node.variable for node in found if hasattr(node, "variable")}
