"""A plan: tables and launches for lists of tensors, valid for all lists of one kind."""

import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritonamp.kernels._device_tables import DeviceTables
from tritonamp.kernels._facts import numbers as numbers_of
from tritonamp.kernels._tables import CODES, DTYPES

T = TypeVar("T")


class Facts(NamedTuple):
    """The facts that decide which kernels run on lists of tensors, and on which memory.

    Attributes:
        kind: names of the lists, numbers and their size, and layout of the tensors. Lists of one
            kind share a plan.
        pointers: addresses of the elements, 64 bits each, list after list. They may change between
            steps.
    """

    kind: tuple[Any, ...]
    pointers: bytes


class Plan:
    """The tables for lists of one kind, and the launches that read them.

    A plan is built once, from the tensors one by one. A later step sends the pointers that have
    changed and repeats the launches. A plan holds no tensor of the lists.

    Args:
        lists: lists of tensors, by name.
        scalars: names of lists of 0-d tensors, which get tables of their own.
        may_repeat: names of the lists that may repeat "params", as in ``TensorLists``.
        numbers: index of each tensor in the results of kernels.
        facts: facts of ``lists``.

    Attributes:
        devices: devices of the tensors; empty if kernels do not accept them.
        tables: tables of ``lists`` without ``scalars``, on these devices.
        scalar_tables: tables of ``scalars``.
        copies: list name, place, and the copy that kernels access instead of the tensor there.
        launches: launches that read the tables, by name.
    """

    def __init__(
        self,
        lists: Mapping[str, Sequence[Tensor]],
        scalars: Collection[str],
        may_repeat: frozenset[str],
        numbers: Sequence[int],
        facts: Facts,
    ) -> None:
        self._names = list(lists)
        self._kind, self._pointers = facts
        # kept with the plan, because they read its tables
        self.launches: dict[Hashable, Any] = {}
        self.devices = _kernel_devices(lists)
        # a table's rows have one number of elements for all lists, which step counts do not share
        shaped = {name: tensors for name, tensors in lists.items() if name not in scalars}
        apart = {name: tensors for name, tensors in lists.items() if name in scalars}
        parts = _parts(self.devices, shaped, may_repeat, numbers)
        scalar_parts = _parts(self.devices if apart else [], apart, frozenset(), numbers)
        self.tables = [table for part in parts for table in part.tables]
        self.scalar_tables = [table for part in scalar_parts for table in part.tables]
        self.copies = [copy for part in (*parts, *scalar_parts) for copy in part.copies]
        self._parts = {name: scalar_parts if name in apart else parts for name in lists}

    def fits(self, facts: Facts) -> bool:
        """Tell whether this plan can launch on lists that have ``facts``."""
        # Tensors may move between steps, as gradients do. Aligned ones must stay aligned, because
        # kernels were compiled for that.
        return facts.kind == self._kind and all(
            part.fits_pointers(name, numbers_of(pointers))
            for name, pointers in self._moved_lists(facts)
            for part in self._parts[name]
        )

    def send_pointers(self, facts: Facts) -> None:
        """Send the pointers that have changed to the tables."""
        for name, pointers in self._moved_lists(facts):
            for part in self._parts[name]:
                part.send_pointers(name, numbers_of(pointers))
        self._pointers = facts.pointers

    def slots(self, name: str) -> dict[int, int]:
        """Return the address in main memory of each pointer of a list, by place of the tensor.

        Tensors without elements have none. ``send_written`` sends what was written there.
        """
        return dict(slot for part in self._parts[name] for slot in part.slots(name))

    def send_written(self, name: str) -> None:
        """Send the pointers of one list after other code has written them to the slots."""
        for part in self._parts[name]:
            part.send_row(name)
        # not known here: the next lists that are compared send all pointers
        self._pointers = b""

    def prepared(self, name: Hashable, prepare: Callable[[], T]) -> T:
        """Return the result of ``prepare``, which is called once for each name."""
        if name not in self.launches:
            self.launches[name] = prepare()
        found: T = self.launches[name]
        return found

    def _moved_lists(self, facts: Facts) -> Iterator[tuple[str, bytes]]:
        """Yield name and new pointers of each list that has moved."""
        # one comparison of bytes is the whole cost of a step whose tensors stayed
        if facts.pointers == self._pointers or not self.devices:
            return
        length = len(facts.pointers) // len(self._names)
        for k, name in enumerate(self._names):
            of_list = slice(k * length, (k + 1) * length)
            if facts.pointers[of_list] != self._pointers[of_list]:
                yield name, facts.pointers[of_list]


def _parts(
    devices: Sequence[torch.device],
    lists: Mapping[str, Sequence[Tensor]],
    may_repeat: frozenset[str],
    numbers: Sequence[int],
) -> list[DeviceTables]:
    """Return the tables of each device."""
    parts: list[DeviceTables] = []
    for device in devices:
        places = [i for i, t in enumerate(next(iter(lists.values()))) if t.device == device]
        # chunks are numbered over all devices, since each has its own slot among the partial sums
        before = sum(table.chunks for part in parts for table in part.tables)
        parts.append(DeviceTables(device, lists, may_repeat, numbers, places, before))
    return parts


def _kernel_devices(
    lists: Mapping[str, Sequence[Tensor]],
) -> list[torch.device]:
    """Return the devices of the tensors, or none if kernels cannot run on these lists.

    Kernels need an element somewhere, one device at each place, and dtypes of ``DTYPES`` and
    ``CODES``.
    """
    rows = list(zip(*lists.values(), strict=True))
    suited = (
        any(row[0].numel() for row in rows)
        and all(len({t.device for t in row}) == 1 for row in rows)
        and all(map(_suits_kernels, itertools.chain(*rows)))
    )
    return list(dict.fromkeys(row[0].device for row in rows)) if suited else []


def _suits_kernels(tensor: Tensor) -> bool:
    is_known = tensor.dtype in DTYPES or tensor.dtype in CODES
    return is_known and not is_traceable_wrapper_subclass(tensor)
