"""What tensors with an overflow in them would hold if the format went on."""

from collections.abc import Hashable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tritonamp.watched.ops import OpCall, floats, is_finite, storage


class ExactValues:
    """Follows overflowed values in float64, from op to op, while their memory lives."""

    def __init__(self) -> None:
        # by storage: the memory, and by layout the values of each view of it
        self._known: dict[int, tuple[StorageWeakRef, dict[Hashable, Tensor]]] = {}

    def get(self, tensor: Tensor) -> Tensor | None:
        """Return the float64 values of ``tensor``, of its shape; None: nothing is known."""
        memory, views = self._known.get(storage(tensor), (None, {}))
        return None if memory is None or memory.expired() else views.get(_layout(tensor))

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Note the values of one view."""
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        memory = StorageWeakRef(tensor.untyped_storage())
        self._known.setdefault(storage(tensor), (memory, {}))[1][_layout(tensor)] = values

    def forget(self, tensor: Tensor) -> None:
        """Forget all views of the memory of ``tensor``: it was written to, or is new."""
        self._known.pop(storage(tensor), None)

    def results(self, call: OpCall) -> list[Tensor]:
        """Return what the op would give for exact values; none where it cannot be run again.

        An inf that nothing is known of counts as the largest number of its format.
        """
        if call.schema.name == "as_strided":  # reads memory by another layout than a copy's
            return []
        return floats(call.again(self._of, torch.float64))

    def _of(self, tensor: Tensor) -> Tensor:
        known = self.get(tensor)
        if known is not None:
            return known.clone()
        if tensor.dtype is not torch.float64 and not is_finite(tensor):
            limit = torch.finfo(tensor.dtype).max
            tensor = tensor.clamp(-limit, limit)
        return tensor.to(torch.float64, copy=True)


def _layout(tensor: Tensor) -> Hashable:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
