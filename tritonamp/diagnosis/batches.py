"""The forwards that led to the next decision, kept so that a failing one can be looked into."""

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten_with_path

from tritonamp.ambient import is_traced
from tritonamp.diagnosis.replay import BatchGoneError, Snapshot
from tritonamp.kernels.device import is_capturing
from tritonamp.nested import leaves, mapped

MOST = 4  # forwards of one decision; of more micro-batches the last ones


class Forwards:
    """Snapshots of the forwards since the last decision.

    They hold the batch until its decision is known.

    Args:
        gradients: also keep the gradients that arrive at the outputs, to run the backward again.

    Attributes:
        recent: those of the last decision, their batches held only while somebody else does.
        holds_recent: hold these batches until the next decision.
    """

    def __init__(self, gradients: bool) -> None:
        self.recent: list[Snapshot] = []
        self.holds_recent = False
        self._gradients = gradients
        self._snapshots: deque[Snapshot] = deque(maxlen=MOST)
        self._outputs: deque[StorageWeakRef] = deque(maxlen=4 * MOST)

    def before(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        method: str = "__call__",
    ) -> Snapshot | None:
        """Record a forward that is about to run.

        Returns:
            what ``after`` and ``failed`` take; None: the forward is of no interest, or a snapshot
            of it would be wrong.
        """
        if not torch.is_grad_enabled() or is_traced():
            return None
        values = leaves((args, kwargs))
        devices = {value.device for value in values if isinstance(value, Tensor)}
        if any(map(is_capturing, devices)):  # which must not ask generators
            return None
        snapshot = Snapshot(model, *mapped(_detached, (args, kwargs)), method=method)
        snapshot.made = frozenset(i for i, value in enumerate(values) if self._was_made(value))
        self._snapshots.append(snapshot)
        return snapshot

    def _was_made(self, value: Any) -> bool:
        """Return whether a value is no data, but what a model has made.

        That is: of this forward's graph, or an output, detached or not.
        """
        if not isinstance(value, Tensor):
            return False
        # private (torch 2.11 to 2.15): the one identity that views and detached copies share; the
        # weak references are those of torch.multiprocessing. While there is one, no other storage
        # has its identity
        made = (ref.cdata for ref in self._outputs)
        return value.grad_fn is not None or value.untyped_storage()._cdata in made

    def after(self, snapshot: Snapshot, output: Any) -> None:
        """Note the output of a forward."""
        tensors = [t for t in leaves(output) if isinstance(t, Tensor) and t.layout is torch.strided]
        self._outputs += [StorageWeakRef(t.untyped_storage()) for t in tensors]
        if self._gradients:
            snapshot.follow(output)

    def failed(self, snapshot: Snapshot) -> None:
        """Forget a forward that has raised: it led to nothing."""
        if snapshot in self._snapshots:
            self._snapshots.remove(snapshot)

    def pop_all(self) -> list[Snapshot]:
        """Hand over the forwards of the decision that is being made, and begin anew."""
        taken = list(self._snapshots)
        self.recent = taken if self.holds_recent else [s.weakened() for s in taken]
        self._snapshots.clear()
        return taken


def data_in(snapshots: Iterable[Snapshot]) -> list[list[tuple[str, Tensor]]]:
    """Return, for each forward, the floating tensors that came in from outside the models.

    Each tensor comes with its place among the arguments ("0", "images", "0['mask']"). Forwards
    whose batch was written to since are left out.
    """
    found = []
    for snapshot in snapshots:
        with contextlib.suppress(BatchGoneError):
            found.append(list(_floating(snapshot.arguments(), without=snapshot.made)))
    return found


def _floating(arguments: Any, without: frozenset[int]) -> Iterator[tuple[str, Tensor]]:
    for i, (path, leaf) in enumerate(tree_flatten_with_path(arguments)[0]):
        if i in without or not isinstance(leaf, Tensor):
            continue
        if leaf.is_floating_point() and leaf.layout is torch.strided:
            keys = [getattr(key, "key", getattr(key, "idx", key)) for key in path[1:]]
            yield "".join(f"[{key!r}]" if k else str(key) for k, key in enumerate(keys)), leaf


def _detached(value: Any) -> Any:
    """Return a tensor without the graph that it came from, other values as they are."""
    return value.detach() if isinstance(value, Tensor) and value.grad_fn is not None else value
