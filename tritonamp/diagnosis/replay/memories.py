"""Known facts of tensors' memory, and the exact values behind overflows."""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tritonamp.diagnosis.replay.verdicts import Event
from tritonamp.watched.ops import OpCall, is_finite, storage_id
from tritonamp.watched.places import Place


@dataclass
class MemoryFacts:
    """Known facts of the values in some memory, which several tensors may share."""

    origin: Event | None = None  # event that made values inf or NaN
    eps: tuple[float, torch.dtype] | None = None  # added, and the format where it is 0
    maker: Place | None = None  # where the values were computed
    unwritten: bool = False  # allocated, and not written to yet


class Memories:
    """Known facts of tensors' memory, by storage, which views share.

    Values that overflowed are followed in float64 from op to op, while their memory lives.
    """

    def __init__(self) -> None:
        self._facts: dict[int, MemoryFacts] = defaultdict(MemoryFacts)
        # the memory, and values of each view by layout
        self._exact: dict[int, tuple[StorageWeakRef, dict[Hashable, Tensor]]] = {}

    def of(self, tensor: Tensor) -> MemoryFacts:
        """Return the known facts of the memory of ``tensor``."""
        return self._facts[storage_id(tensor)]

    def renew(self, tensor: Tensor, unwritten: bool) -> None:
        """Note that the memory is new. It may reuse the address of freed memory."""
        self._facts[storage_id(tensor)] = MemoryFacts(unwritten=unwritten)
        self.forget(tensor)

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor, with the same known facts."""
        copy = tensor.detach().clone()
        self._facts[storage_id(copy)] = replace(self.of(tensor))
        values = self.exact(tensor)
        if values is not None:
            self.put(copy, values)
        return copy

    def exact(self, tensor: Tensor) -> Tensor | None:
        """Return the float64 values of ``tensor``, in its shape; None: not known."""
        memory, views = self._exact.get(storage_id(tensor), (None, {}))
        return None if memory is None or memory.expired() else views.get(_layout(tensor))

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Note the values of one view."""
        self._exact = {key: known for key, known in self._exact.items() if not known[0].expired()}
        memory = StorageWeakRef(tensor.untyped_storage())
        self._exact.setdefault(storage_id(tensor), (memory, {}))[1][_layout(tensor)] = values

    def forget(self, tensor: Tensor) -> None:
        """Forget all views of the memory of ``tensor``, because it was written to, or is new."""
        self._exact.pop(storage_id(tensor), None)

    def results(self, call: OpCall) -> list[Tensor]:
        """Return the op's results for exact values; none where the op cannot run again.

        An inf of which nothing is known counts as the largest number of its format.
        """
        if call.schema.name == "as_strided":  # reads memory by another layout than a copy's
            return []
        return call.in_float64(self._of)

    def _of(self, tensor: Tensor) -> Tensor:
        known = self.exact(tensor)
        if known is not None:
            return known.clone()
        if tensor.dtype is not torch.float64 and not is_finite(tensor):
            limit = torch.finfo(tensor.dtype).max
            tensor = tensor.clamp(-limit, limit)
        return tensor.to(torch.float64, copy=True)


def _layout(tensor: Tensor) -> Hashable:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
