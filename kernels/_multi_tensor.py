"""Lists of tensors for kernels that take any number of tensors in one launch."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._facts import addresses, count_write, identities, metadata
from tritonamp.kernels._implementations import Implementations
from tritonamp.kernels._layout import Known, Layout, kernel_devices
from tritonamp.kernels._tables import Table
from tritonamp.kernels.device import INTERPRETED, is_capturing, runs_triton

_LAYOUTS = 8  # ways to lie in memory whose tables are kept: of losses and sets of gradients in turn


class TensorLists:
    """Named lists of n tensors each; those at one place have the same shape and device.

    A list may change from step to step: pointers are sent to the device only when they changed,
    without waiting. Lists that lie in memory as earlier ones did use the tables of those, so that
    it costs little to go to and fro; what a CUDA graph captures has tables of its own, which
    nothing writes to later. A tensor that does not lie there like the first list's tensor, without
    gaps, is worked on in a copy. A list of ``may_repeat`` that holds the very tensor of "params" at
    some place holds nothing there. In the place of sharded tensors there are this rank's parts.

    Attributes:
        may_repeat: names of lists that may hold the tensors of "params" again.
        numbers: of the tensors, ascending, in what kernels write for each tensor.
        size: of that.
    """

    def __init__(
        self, *, may_repeat: Iterable[str] = ("copies",), **lists: Sequence[Tensor]
    ) -> None:
        self.may_repeat = frozenset(may_repeat)
        self._n = self.size = 0
        self.numbers: Sequence[int] = ()
        self._lists: dict[str, Sequence[Tensor]] = {}
        self._to_check: dict[str, bool] = {}  # lists that were set, and whether they are lasting
        self._lasting: dict[str, bool] = {}  # those that are
        self._known: dict[str, Known] = {}
        self._layouts: dict[tuple[str, ...], list[Layout]] = {}  # the last used one first
        self._current: dict[Any, Layout] = {}  # by names; until a list is set
        self._kept: dict[tuple[str, torch.device, tuple[int, ...]], Tensor] = {}
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
        if lasting:
            self._lasting[name] = True
        self._current = {}

    def renew(self, name: str, tensors: Sequence[Tensor | None]) -> bool:
        """Put a list in the place of the last one of that name, which lay as it does but elsewhere.

        Lasting lists are looked at again.

        Args:
            name: of a list that was looked at, and is not one that may repeat "params".
            tensors: as many; None where one is missing.

        Returns:
            False: it does not lie so; nothing has changed.
        """
        known = self._known.get(name)
        if known is None or metadata(tensors) != known.metadata:
            return False
        self._lists[name] = tensors  # type: ignore[assignment]
        pointers = addresses(tensors)  # type: ignore[arg-type]
        kept = (name,) if pointers == known.pointers else None
        self._current = {names: at for names, at in self._current.items() if names == kept}
        self._known[name] = known._replace(pointers=pointers)
        self._to_check |= self._lasting
        return True

    def number(self, numbers: Sequence[int], size: int) -> None:
        """Start anew, for lists of these ``numbers`` out of ``size``, unless they are those."""
        if size != self.size:
            self._layouts = {}
        if numbers != self.numbers or size != self.size:
            self._n, self.numbers, self.size = len(numbers), numbers, size
            self._lists, self._known, self._current = {}, {}, {}
            self._to_check, self._lasting = {}, {}

    def release(self, *names: str) -> None:
        """Let go of these lists' tensors until they are set again; remember where they were."""
        for name in names:
            self._lists[name] = ()
            self._to_check.pop(name, None)
            self._lasting.pop(name, None)
        self._current.pop(None, None)

    def kept(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory that is always the same for this shape; zeros at first.

        It stays though other shapes come, for a CUDA graph that has captured it.
        """
        tensor = self._kept.get((name, device, shape))
        if tensor is None:
            tensor = torch.zeros(shape, dtype=dtype, device=device)
            self._kept[name, device, shape] = tensor
        return tensor

    def all_kept(self, name: str) -> list[Tensor]:
        """Return the memory of that name that has something for each number, on all devices."""
        return [
            tensor
            for (kept_name, _, shape), tensor in self._kept.items()
            if kept_name == name and shape[:1] == (self.size,)
        ]

    def uses_triton(
        self, backend: str, operation: Implementations, names: tuple[str, ...] | None = None
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
        first = next(iter(self._lists.values()))[0]  # a layout looks at the others, once
        if not operation.uses_triton(backend, first):
            return False
        if is_capturing(first.device):  # ``launches`` makes tables of the graph's own
            devices = kernel_devices({name: self._lists[name] for name in self._named(names)})
        else:
            devices = self.layout(names).devices
        return len(devices) > 0 and (INTERPRETED or all(map(runs_triton, devices)))

    @property
    def tables(self) -> list[Table]:
        """The tables of all lists."""
        return self.layout().tables

    def renews(self, layout: Layout, name: str) -> bool:
        """Put pointers to the list of this name into tables; False: it does not lie so."""
        known = {**layout.known, name: self._known[name]}
        return layout.follow(self.may_repeat, self.numbers, known)

    @contextmanager
    def launches(
        self, written: Sequence[str] = (), names: tuple[str, ...] | None = None
    ) -> Iterator[Layout]:
        """Yield the tables, for a ``with`` block that launches kernels on the lists.

        Args:
            written: lists that the kernels write to.
            names: lists that they work on; None: all.
        """
        layout = self.layout(names)
        for name, i, copy in layout.copies:
            copy.copy_(self._lists[name][i])
        yield layout
        for name, i, copy in layout.copies:
            if name in written:
                self._lists[name][i].copy_(copy)
        self.mark_written(written)

    def mark_written(self, names: Sequence[str]) -> None:
        """Count a write to each tensor of these lists that autograd may have saved."""
        for name in names:
            if name in ("params", "copies"):
                count_write(self._lists[name])

    def _named(self, names: tuple[str, ...] | None) -> tuple[str, ...]:
        if names is not None:
            return names
        return tuple(name for name, tensors in self._lists.items() if len(tensors) == self._n)

    def layout(self, names: tuple[str, ...] | None = None) -> Layout:
        """Return the tables of these lists (None: of all) with the pointers as they are now."""
        capturing = is_capturing(next(iter(self._lists.values()))[0].device)
        layout = None if capturing else self._current.get(names)
        if layout is None:
            found = self._named(names)
            known = self._look_at(found)
            if capturing:
                return self._built(found, known)
            layout = self._current[names] = self._following(found, known)
        return layout

    def _following(self, names: tuple[str, ...], known: dict[str, Known]) -> Layout:
        """Return tables that are there and take the lists' pointers, or new ones."""
        kept = self._layouts.setdefault(names, [])
        for k, layout in enumerate(kept):
            if layout.follow(self.may_repeat, self.numbers, known):
                if k:
                    kept.insert(0, kept.pop(k))
                return layout
        kept.insert(0, self._built(names, known))
        del kept[_LAYOUTS:]
        return kept[0]

    def _built(self, names: tuple[str, ...], known: dict[str, Known]) -> Layout:
        lists = {name: self._lists[name] for name in names}
        return Layout(lists, self.may_repeat, self.numbers, known)

    def _look_at(self, names: tuple[str, ...]) -> dict[str, Known]:
        """Return what is known of these lists, up to date."""
        looked_at: dict[int, Known] = {}  # two names may stand for one list
        for name in names:
            tensors = self._lists[name]
            lasting = self._to_check.pop(name, None)
            if lasting is not None:  # it was set since
                known = looked_at.get(id(tensors))
                self._known[name] = known or _known(tensors, lasting, self._known.get(name))
            looked_at[id(tensors)] = self._known[name]
        return {name: self._known[name] for name in names}


def _known(tensors: Sequence[Tensor], lasting: bool, before: Known | None) -> Known:
    """Return what is known of a list: the very ``before`` where nothing has changed.

    Args:
        tensors: the list.
        lasting: the same object at the same address is taken to be as it was.
        before: what was known of the list that had its name.
    """
    pointers, ids = addresses(tensors), identities(tensors)
    same = before is not None and (pointers, ids) == (before.pointers, before.ids)
    if same and lasting and before:
        return before
    found = metadata(tensors)
    if same and before and found == before.metadata:
        return before
    return Known(ids, pointers, found)


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
    return lists


def _local(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return of sharded tensors (DTensor) the parts of this rank."""
    if len(tensors) and hasattr(tensors[0], "_local_tensor"):
        return [tensor._local_tensor for tensor in tensors]  # type: ignore[attr-defined]
    return tensors
