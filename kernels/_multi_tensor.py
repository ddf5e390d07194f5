"""Lists of tensors for kernels that take any number of tensors in one launch."""

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritonamp.kernels._implementations import Implementations
from tritonamp.kernels._tables import DTYPES, DeviceTables, Table
from tritonamp.kernels.device import INTERPRETED, runs_triton

_dtype = operator.attrgetter("dtype")


class TensorLists:
    """Named lists of n tensors each; those at one place have the same shape and device.

    A list may change from step to step: pointers are sent to the device only when they changed,
    without waiting. A tensor that does not lie in memory like the first list's tensor, without
    gaps, is worked on in a copy. A list of ``may_repeat`` that holds the very tensor of "params" at
    some place holds nothing there. In the place of sharded tensors there are this rank's parts.

    Attributes:
        numbers: of the tensors, ascending, in what kernels write for each tensor.
        size: of that.
        may_repeat: names of lists that may hold the tensors of "params" again.
    """

    def __init__(
        self, *, may_repeat: Iterable[str] = ("copies",), **lists: Sequence[Tensor]
    ) -> None:
        self.may_repeat = frozenset(may_repeat)
        self._n = self.size = 0
        self.numbers: Sequence[int] = ()
        self._lists: dict[str, Sequence[Tensor]] = {}
        self._to_check: dict[str, bool] = {}  # lists that were set, and whether they are lasting
        self._known: dict[str, _Known] = {}
        self._repeats: dict[str, list[bool]] = {}
        self._parts: list[DeviceTables] = []
        self._suit_kernels = False
        self._kept: dict[tuple[str, torch.device], Tensor] = {}
        for name, tensors in lists.items():
            self.set(name, tensors)

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, name: str) -> Sequence[Tensor]:
        return self._lists[name]

    def set(self, name: str, tensors: Sequence[Tensor], lasting: bool = False) -> None:
        """Put a list in the place of an earlier one of that name; another length starts anew.

        Args:
            name: of the list.
            tensors: as many as the other lists have.
            lasting: the tensors are the same from step to step: what they are like is looked at
                only where another object, or other memory, takes the place of one.
        """
        if len(tensors) != self._n:
            self.number(range(len(tensors)), len(tensors))
        self._lists[name] = _local(tensors)
        self._to_check[name] = lasting

    def number(self, numbers: Sequence[int], size: int) -> None:
        """Start anew, for lists of these ``numbers`` out of ``size``, unless they are those."""
        if numbers != self.numbers or size != self.size:
            self._n, self.numbers, self.size = len(numbers), numbers, size
            self._lists, self._known, self._to_check = {}, {}, {}

    def release(self, *names: str) -> None:
        """Let go of these lists' tensors until they are set again; remember where they were."""
        for name in names:
            self._lists[name] = ()
            self._to_check.pop(name, None)

    def kept(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory that stays where it is as long as its shape does; zeros at first."""
        tensor = self._kept.get((name, device))
        if tensor is None or tensor.shape != shape:
            tensor = self._kept[name, device] = torch.zeros(shape, dtype=dtype, device=device)
        return tensor

    def all_kept(self, name: str) -> list[Tensor]:
        """Return that memory on all devices."""
        return [tensor for (kept_name, _), tensor in self._kept.items() if kept_name == name]

    def uses_triton(
        self, backend: str, operation: Implementations, names: Iterable[str] | None = None
    ) -> bool:
        """Tell whether ``operation`` on these lists runs its kernel.

        Kernels do not take float64, nor wrapper subclasses.

        Args:
            backend: "auto", "triton" or "eager".
            operation: whose kernel it is.
            names: the lists that it works on; None: all.
        """
        if not self._n or torch.compiler.is_compiling():
            return False
        first = next(iter(self._lists.values()))[0]  # _build looks at the others, once
        if not operation.uses_triton(backend, first):
            return False
        self._follow(names)
        return self._suit_kernels

    @property
    def tables(self) -> list[Table]:
        return [table for part in self._parts for table in part.tables]

    @contextmanager
    def launches(
        self, written: Sequence[str] = (), names: Iterable[str] | None = None
    ) -> Iterator[list[Table]]:
        """Yield the tables, for a ``with`` block that launches kernels on the lists.

        Args:
            written: lists that the kernels write to.
            names: lists that they work on; None: all.
        """
        self._follow(names)
        names = self._lists if names is None else names
        copies = [
            copy
            for part in self._parts
            for copy in part.copies
            if copy[0] in names and self._lists[copy[0]]
        ]
        for name, i, copy in copies:
            copy.copy_(self._lists[name][i])
        yield self.tables
        for name, i, copy in copies:
            if name in written:
                self._lists[name][i].copy_(copy)
        for name in written:
            if name in ("params", "copies"):  # autograd may have saved them
                torch.autograd.graph.increment_version(self._lists[name])

    def _follow(self, names: Iterable[str] | None) -> None:
        """Bring what the tables have of these lists up to date."""
        to_check = {
            n: self._to_check.pop(n) for n in list(self._to_check) if names is None or n in names
        }
        if not to_check:
            return
        build = False
        addresses: dict[int, list[int]] = {}  # two names may stand for one list
        for name, lasting in to_check.items():
            tensors, before = self._lists[name], self._known.get(name)
            if id(tensors) not in addresses:
                addresses[id(tensors)] = list(map(Tensor.data_ptr, tensors))
            pointers = addresses[id(tensors)]
            ids = list(map(id, tensors))
            if lasting and before is not None and pointers == before.pointers and ids == before.ids:
                continue
            kinds = [*map(_dtype, tensors), *map(Tensor.stride, tensors)]
            if name == next(iter(self._lists)):
                kinds += map(Tensor.numel, tensors)  # the other lists have the same shapes
            self._known[name] = _Known(ids, pointers, kinds)
            if before is None or kinds != before.kinds:
                build = True
            elif pointers != before.pointers:
                build = build or not all(part.follow(name, pointers) for part in self._parts)
        if build or any(
            repeats != self._repeats.get(name) for name, repeats in self._repeated().items()
        ):
            self._build()

    def _repeated(self) -> dict[str, list[bool]]:
        """Return by name where the lists that may repeat others do."""
        params = self._lists.get("params", ())
        found = {name: self._lists[name] for name in self.may_repeat if self._lists.get(name)}
        return {
            name: [True] if tensors is params else list(map(operator.is_, tensors, params))
            for name, tensors in found.items()
        }

    def _build(self) -> None:
        for name in [
            name for name, tensors in self._lists.items() if len(tensors) < self._n
        ]:  # released
            del self._lists[name]
            self._known.pop(name, None)
        self._repeats = self._repeated()
        tensors = [t for tensors in self._lists.values() for t in tensors]
        one_device = all(
            len({t.device for t in row}) == 1 for row in zip(*self._lists.values(), strict=True)
        )
        places: dict[torch.device, list[int]] = {}
        for i, tensor in enumerate(next(iter(self._lists.values()))):
            places.setdefault(tensor.device, []).append(i)
        runs = INTERPRETED or all(map(runs_triton, places))
        self._suit_kernels = runs and one_device and all(map(_suits_kernels, tensors))
        self._parts, before = [], 0
        if self._suit_kernels:
            for device, here in places.items():
                self._parts.append(
                    DeviceTables(device, self._lists, self.may_repeat, self.numbers, here, before)
                )
                before += sum(table.chunks for table in self._parts[-1].tables)
            self._suit_kernels = before > 0


def shipped_lists(
    aligned: bool, may_repeat: Iterable[str] = ("copies",), **dtypes: torch.dtype | str
) -> TensorLists:
    """Return lists of one small tensor each, for ``shipped``; a name repeats that list."""
    lists = TensorLists(may_repeat=may_repeat)
    for name, dtype in dtypes.items():
        if isinstance(dtype, str):
            lists.set(name, lists[dtype])
        else:
            lists.set(name, [torch.empty(4096 + 8, dtype=dtype)[0 if aligned else 1 :][:4096]])
    lists._to_check.clear()
    lists._parts = [DeviceTables(torch.device("cpu"), lists._lists, lists.may_repeat, [0], [0], 0)]
    lists._repeats = lists._repeated()
    return lists


class _Known(NamedTuple):
    """What is known of a list without holding on to its tensors.

    The same object at the same address is as it was.
    """

    ids: list[int]
    pointers: list[int]
    kinds: list[Any]


def _local(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return of sharded tensors (DTensor) the parts of this rank."""
    if len(tensors) and hasattr(tensors[0], "_local_tensor"):
        return [tensor._local_tensor for tensor in tensors]  # type: ignore[attr-defined]
    return tensors


def _suits_kernels(tensor: Tensor) -> bool:
    return tensor.dtype in DTYPES and not is_traceable_wrapper_subclass(tensor)
