"""The forwards that led to the next decision, recorded so that a failing one can run again."""

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tritonamp.ambient import AmbientWatch, is_traced
from tritonamp.distributed.pipeline import Work, pipeline_work
from tritonamp.kernels._dynamo import never_alone
from tritonamp.kernels._facts import leaf_versions
from tritonamp.kernels.device import is_capturing
from tritonamp.nested import leaves
from tritonamp.step.snapshots import Snapshot, Storage
from tritonamp.watched.forwards import Spectator
from tritonamp.watched.graph import reads_leaves

MOST = 4  # forwards per decision, the last ones
KNOWN = 64  # outputs that are known as such, if they come as arguments


class Forwards(Spectator):
    """Snapshots of the forwards since the last decision, with their batches until the next one.

    Args:
        gradients: whether gradients that arrive at outputs are kept, to run the backward again.
    """

    def __init__(self, gradients: bool) -> None:
        self.recent: list[Snapshot] = []  # of the last decision
        self.holds_recent = False  # they hold their batches until the next decision
        self.follows_losses = gradients  # ``note_loss`` is to be called
        self._gradients = gradients
        self._snapshots: deque[Snapshot] = deque(maxlen=MOST)
        self._watch = AmbientWatch()
        self._outputs: deque[tuple[int, Storage]] = deque(maxlen=KNOWN)
        self._returned = 0  # outputs so far
        self._decisions = 0  # so far

    @never_alone  # torch.compile would warn that it cannot trace ``leaf_versions``
    def before(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        method: str = "__call__",
    ) -> Snapshot | None:
        """Record a forward that is about to run, or return None.

        Forwards without gradients, traced ones, those on memory without values, and those that a
        CUDA graph captures are not recorded.
        """
        values = (*args, *kwargs.values()) if kwargs else args
        versions, on_gpu = leaf_versions(values) or (None, False)
        if versions is None and (not torch.is_grad_enabled() or is_traced()):
            return None
        if pipeline_work() is Work.SHAPES:
            return None
        earlier = self._outputs, self._returned
        snapshot = Snapshot(model, args, kwargs, method, earlier, versions)
        if on_gpu:
            snapshot.gpus = [value.device for value in values if value.is_cuda]
        if snapshot.gpus and is_capturing(snapshot.gpus[0]):  # it must not read generators
            return None
        snapshot.ambient = self._watch.now(snapshot.gpus)
        snapshot.is_exact, snapshot.decisions = self._watch.is_exact, self._decisions
        if self._gradients:
            snapshot.begin()
        self._snapshots.append(snapshot)
        return snapshot

    def after(self, snapshot: Snapshot, output: Any) -> None:
        """Note the output of a forward."""
        for value in (output,) if type(output) is Tensor else leaves(output):
            if isinstance(value, Tensor) and value.layout is torch.strided:
                self._outputs.append((self._returned, weakref.ref(value.untyped_storage())))
                self._returned += 1
        if self._gradients:
            snapshot.follow(output)

    def note_loss(self, loss: Tensor) -> None:
        """Note a loss of the next decision, before its backward."""
        if torch.compiler.is_compiling() or not self._snapshots:
            return
        spans = [snapshot.span for snapshot in self._snapshots]
        reads = reads_leaves(loss, spans)
        for snapshot in self._snapshots:
            snapshot.has_loss = True
            snapshot.is_bypassed |= reads

    def ran_before_last(self, snapshot: Snapshot) -> bool:
        """Return whether another decision came between a forward and the last decision.

        That decision may have changed weights.
        """
        return snapshot.decisions < self._decisions - 1

    def failed(self, snapshot: Snapshot) -> None:
        """Forget a forward that raised, because it led to no decision."""
        if snapshot in self._snapshots:
            self._snapshots.remove(snapshot)

    def pop_all(self, others: Sequence[Sequence[Tensor]] = ()) -> list[Snapshot]:
        """Return the forwards of the decision that is being made, and start a new list.

        A forward stays in the new list if it trains only parameters that wait for another decision,
        and no gradient has arrived at its outputs yet. A GAN makes its fakes before the
        discriminator's step, and runs their backward after it.

        Args:
            others: parameters of each optimizer that waits for another decision.
        """
        taken = list(self._snapshots)
        self._decisions += 1
        self.recent = taken if self.holds_recent else [s.weakened() for s in taken]
        self._snapshots.clear()
        if others and self._gradients:
            later = {param for params in others for param in params}
            for snapshot in taken:
                trained = {param for param in snapshot.model.parameters() if param.requires_grad}
                if trained and trained <= later and snapshot.grad_outputs is None:
                    self._snapshots.append(snapshot)
        return taken


def note_scaled(forwards: weakref.ref[Forwards], loss: Tensor) -> None:
    """Note a loss that a scaler scales, while the model is enabled."""
    found = forwards()
    if found is not None:
        found.note_loss(loss)
