"""Known facts of tensors' memory, and the exact values behind overflows."""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tritonamp.diagnosis.replay.verdicts import Eps, Event
from tritonamp.watched.ops import OpCall, float64_copy, is_finite
from tritonamp.watched.places import Place


@dataclass
class MemoryFacts:
    """Known facts of the values in some memory, which several tensors may share."""

    label: str = ""  # name of a tensor that a model was called with
    origin: Event | None = None  # event that made values inf or NaN
    eps: Eps | None = None  # added to numbers, of which some are hardly larger
    softmax: Place | None = None  # where a softmax computed the values
    maker: Place | None = None  # where the values were computed
    unwritten: bool = False  # allocated, and not written to yet
    # values in float64 behind an overflow, of each view by its layout
    exact: dict[Hashable, Tensor] = field(default_factory=dict)


class Memories:
    """Known facts of tensors' memory, which views share, while the memory lives.

    Values that overflowed are followed in float64 from op to op.
    """

    def __init__(self) -> None:
        # while a storage lives, all its views have one Python object for it (torch 2.11 to 2.15)
        self._facts: WeakKeyDictionary[torch.UntypedStorage, MemoryFacts] = WeakKeyDictionary()

    def of(self, tensor: Tensor) -> MemoryFacts:
        """Return the known facts of the memory of ``tensor``."""
        return self._facts.setdefault(tensor.untyped_storage(), MemoryFacts())

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor, with the same known facts."""
        copy = tensor.detach().clone()
        self._facts[copy.untyped_storage()] = replace(self.of(tensor), exact={})
        values = self.exact(tensor)
        if values is not None:
            self.put(copy, values)
        return copy

    def exact(self, tensor: Tensor) -> Tensor | None:
        """Return the float64 values of ``tensor``, in its shape; None: not known."""
        return self.of(tensor).exact.get(_layout(tensor))

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Note the float64 values of one view."""
        self.of(tensor).exact[_layout(tensor)] = values

    def results(self, call: OpCall) -> list[Tensor]:
        """Return the op's results for exact values; none where the op cannot run again.

        An inf of which nothing is known counts as the largest number of its format.
        """
        if call.schema.name == "as_strided":  # reads memory by another layout than a copy's
            return []
        return call.in_float64(self._widened)

    def _widened(self, tensor: Tensor) -> Tensor:
        known = self.exact(tensor)
        if known is not None:
            return known.clone()
        if tensor.dtype is not torch.float64 and not is_finite(tensor):
            limit = torch.finfo(tensor.dtype).max
            tensor = tensor.clamp(-limit, limit)
        return float64_copy(tensor)


def _layout(tensor: Tensor) -> Hashable:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
