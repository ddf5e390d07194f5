"""The tables of lists that lie in memory in one way: rows, and the pointers that are there now."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritonamp.kernels._device_tables import DeviceTables
from tritonamp.kernels._facts import numbers as numbers_of
from tritonamp.kernels._tables import DTYPES, Table

T = TypeVar("T")


class Known(NamedTuple):
    """What is remembered of a list, without holding on to its tensors.

    Attributes:
        ids: which tensors they are, as ``identities`` has it.
        pointers: to their memory, as ``addresses`` has it.
        metadata: how they lie.
    """

    ids: bytes
    pointers: bytes
    metadata: Any


class Layout:
    """The tables of lists that lie in memory in one way.

    Args:
        lists: by name, those that kernels work on.
        may_repeat: see ``TensorLists``.
        numbers: see ``TensorLists``.
        known: of these lists.

    Attributes:
        devices: where the tensors are; none where kernels do not take them.
        tables: of these devices.
        copies: list, place, and what kernels work on in the place of the tensor there.
        known: of the lists whose pointers are in the tables.
    """

    def __init__(
        self,
        lists: Mapping[str, Sequence[Tensor]],
        may_repeat: frozenset[str],
        numbers: Sequence[int],
        known: Mapping[str, Known],
    ) -> None:
        self._numbers = numbers
        self._may_repeat = may_repeat
        self.known = known
        self._repeats = _repeats(known, may_repeat)
        self._parts: list[DeviceTables] = []
        self.tables: list[Table] = []
        self.devices = kernel_devices(lists)
        for device in self.devices:
            places = [i for i, t in enumerate(next(iter(lists.values()))) if t.device == device]
            before = sum(table.chunks for table in self.tables)
            part = DeviceTables(device, lists, may_repeat, numbers, places, before)
            self._parts.append(part)
            self.tables += part.tables
        self.copies = [copy for part in self._parts for copy in part.copies]
        self._prepared: dict[Any, Any] = {}

    def prepared(self, name: str, prepare: Callable[[], T]) -> T:
        """Return what ``prepare`` made of these tables when it was first asked for by this name."""
        if name not in self._prepared:
            self._prepared[name] = prepare()
        found: T = self._prepared[name]
        return found

    def follow(
        self, may_repeat: frozenset[str], numbers: Sequence[int], known: Mapping[str, Known]
    ) -> bool:
        """Take the pointers of other lists, and return whether these tables can.

        Where they cannot, since the lists lie in another way, nothing has changed.
        """
        if numbers != self._numbers or may_repeat != self._may_repeat:
            return False
        new = [name for name, k in known.items() if k is not self.known[name]]
        if not new:
            return True
        if any(known[name].metadata != self.known[name].metadata for name in new):
            return False
        can_repeat = any(name == "params" or name in may_repeat for name in new)
        if can_repeat and _repeats(known, may_repeat) != self._repeats:
            return False
        moved = {
            name: numbers_of(known[name].pointers)
            for name in new
            if known[name].pointers != self.known[name].pointers
        }
        if not all(part.takes(name, at) for part in self._parts for name, at in moved.items()):
            return False
        for part in self._parts:
            for name, pointers in moved.items():
                part.follow(name, pointers)
        self.known = known
        return True


def kernel_devices(lists: Mapping[str, Sequence[Tensor]]) -> list[torch.device]:
    """Return where the tensors are; nowhere if kernels do not take them, or none has elements."""
    rows = list(zip(*lists.values(), strict=True))
    suited = (
        any(row[0].numel() for row in rows)
        and all(len({t.device for t in row}) == 1 for row in rows)
        and all(_suits_kernels(t) for row in rows for t in row)
    )
    return list(dict.fromkeys(row[0].device for row in rows)) if suited else []


def _suits_kernels(tensor: Tensor) -> bool:
    return tensor.dtype in DTYPES and not is_traceable_wrapper_subclass(tensor)


def _repeats(known: Mapping[str, Known], may_repeat: frozenset[str]) -> dict[str, list[bool]]:
    """Return by name where the lists that may repeat "params" do."""
    return {
        name: list(map(operator.eq, numbers_of(k.ids), numbers_of(known["params"].ids)))
        for name, k in known.items()
        if name in may_repeat
    }
