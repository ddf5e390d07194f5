"""The tables of one device, which are filled on the host and copied to the device."""

import ctypes
import functools
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritonamp.kernels._memory_order import memory_strides
from tritonamp.kernels._tables import CODES, Table, stored
from tritonamp.kernels._transfer import upload

MIN_CHUNK, MAX_CHUNK = 1 << 12, 1 << 16
"""Bounds of the number of elements of a chunk; multiples of every kernel's tile."""
PROGRAMS = 4096
"""Number of programs to aim at, several times a GPU's capacity, so that few are idle at the end."""

Rows = list[tuple[int, list[Tensor]]]
"""Rows of one table: the place of each row in the lists, and the tensors that kernels access."""
Kind = tuple[tuple[torch.dtype | None, ...], bool]
"""Properties that the rows of a table share: the dtype of each list (None if it repeats "params"),
and whether all pointers are multiples of 16 bytes.
"""


class DeviceTables:
    """The tables of one device, in one piece of memory, so that one copy sends them.

    ::

        columns   sizes              table 0 | table 1 | ...     int64, each row as wide as all
                  first chunks       table 0 | table 1 | ...     tables together
                  numbers            table 0 | table 1 | ...
                  pointers of a list table 0 | table 1 | ...     one row for each list
        rows      of chunks          table 0 | table 1 | ...     int32

    Args:
        device: device of the tables.
        lists: lists of tensors on all devices, by name.
        may_repeat: names of the lists that may repeat "params", as in ``TensorLists``.
        numbers: index of each tensor in the results of kernels.
        places: places in the lists of the tensors on this device.
        before: number of chunks on earlier devices.

    Attributes:
        tables: one table for each kind of row.
        copies: list name, place, and the copy that kernels access instead of the tensor there.
    """

    def __init__(
        self,
        device: torch.device,
        lists: Mapping[str, Sequence[Tensor]],
        may_repeat: frozenset[str],
        numbers: Sequence[int],
        places: list[int],
        before: int,
    ) -> None:
        self.copies: list[tuple[str, int, Tensor]] = []
        # One kernel build serves one set of dtypes and one alignment, so each kind of row is a
        # launch of its own.
        kinds = self._rows_by_kind(lists, may_repeat, places)
        self._order = [[i for i, _ in rows] for rows in kinds.values()]
        # places whose pointers must stay aligned; a single element is never loaded as a vector
        self._vectors = [[i for i, used in rows if used[0].numel() > 1] for rows in kinds.values()]
        contents = [_Contents.of(rows, numbers) for rows in kinds.values()]
        nothing = torch.zeros((len(lists) + 3, 0), dtype=torch.int64)  # cat refuses an empty list
        columns = torch.cat([nothing, *(c.columns for c in contents)], 1)
        # the int32 rows are viewed as int64, so that all tables are one tensor and one copy
        self._host = torch.cat([columns.flatten(), *(c.rows.view(torch.int64) for c in contents)])
        # a ctypes view of the tensor's memory, because tensors are slower to write to
        self._memory = (ctypes.c_int64 * len(self._host)).from_address(self._host.data_ptr())
        on_cpu = device.type == "cpu"
        self._device = self._host if on_cpu else torch.empty_like(self._host, device=device)
        self._width = columns.shape[1]
        self._column = {name: k for k, name in enumerate(lists, start=3)}  # after the numbers
        self.tables = self._views(device, list(lists), list(kinds), contents, before)
        self._send(0, len(self._host))

    def _views(
        self,
        device: torch.device,
        names: Sequence[str],
        kinds: Sequence[Kind],
        contents: Sequence["_Contents"],
        before: int,
    ) -> list[Table]:
        """Return tables that are views of the device's memory."""
        size = (len(names) + 3) * self._width
        columns = self._device[:size].view(-1, self._width)
        rows = self._device[size:].view(torch.int32)
        tables = []
        for (dtypes, aligned), c, order in zip(kinds, contents, self._order, strict=True):
            numel, first, number, *pointers = columns[:, : len(order)].unbind()
            table = Table(
                device=device,
                pointers=dict(zip(names, pointers, strict=True)),
                numel=numel,
                first=first,
                number=number,
                rows=rows[: c.chunks],
                chunk=c.chunk,
                chunks=c.chunks,
                before=before,
                dtypes=dict(zip(names, dtypes, strict=True)),
                aligned=aligned,
            )
            tables.append(table)
            columns, rows = columns[:, c.columns.shape[1] :], rows[len(c.rows) :]
            before += c.chunks
        return tables

    def _rows_by_kind(
        self, lists: Mapping[str, Sequence[Tensor]], may_repeat: frozenset[str], places: list[int]
    ) -> dict[Kind, Rows]:
        # insertion order, because the order of the tables is that of the partial sums
        kinds: dict[Kind, Rows] = {}
        for i in places:
            given = [tensors[i] for tensors in lists.values()]
            if not given[0].numel():  # a row without chunks would belong to no program
                continue
            # the first list's order in memory, because kernels use one offset for all lists
            strides = memory_strides(given[0])
            used, dtypes = [], []
            for name, tensor in zip(lists, given, strict=True):
                repeats = name in may_repeat and tensor is lists["params"][i]
                dtypes.append(None if repeats else tensor.dtype)
                # a repeated tensor is not loaded, and codes already lie in the order of memory
                is_loaded = not repeats and tensor.dtype not in CODES
                used.append(self._kernel_tensor(name, i, tensor, strides) if is_loaded else tensor)
            aligned = _aligned([t.data_ptr() for t in used if t.numel() > 1])
            kinds.setdefault((tuple(dtypes), aligned), []).append((i, used))
        return kinds

    def _kernel_tensor(self, name: str, i: int, tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
        """Return ``tensor``, or a copy with ``strides``: a kernel uses one offset for all lists."""
        fits = tensor.numel() <= 1 or tensor.stride() == strides
        if fits and tensor.dtype == stored(tensor.dtype):
            return tensor
        copy = torch.empty_strided(
            tensor.shape, strides, dtype=stored(tensor.dtype), device=tensor.device
        )
        self.copies.append((name, i, copy))
        return copy

    def fits_pointers(self, name: str, pointers: Sequence[int]) -> bool:
        """Tell whether the pointers have the alignment that the kernels were built for."""
        used = self._kernel_pointers(name, pointers)
        return all(
            _aligned([used[i] for i in vectors])
            for table, vectors in zip(self.tables, self._vectors, strict=True)
            if table.aligned
        )

    def send_pointers(self, name: str, pointers: Sequence[int]) -> None:
        """Replace the pointers of one list, and send them to the device."""
        used = self._kernel_pointers(name, pointers)
        at = self._column[name] * self._width
        for order in self._order:
            self._memory[at : at + len(order)] = [used[i] for i in order]
            at += _even(len(order))
        # only this list's row of the columns is sent; nothing else of a plan moves
        self.send_row(name)

    def slots(self, name: str) -> Iterator[tuple[int, int]]:
        """Yield the place of each tensor of a list, and the address in main memory of its pointer.

        ``send_row`` sends pointers that were written there.
        """
        at = self._column[name] * self._width
        for order in self._order:
            for k, i in enumerate(order, start=at):
                yield i, self._host.data_ptr() + 8 * k
            at += _even(len(order))

    def send_row(self, name: str) -> None:
        """Send the pointers of one list to the device."""
        begin = self._column[name] * self._width
        self._send(begin, begin + self._width)

    def _kernel_pointers(self, name: str, pointers: Sequence[int]) -> Sequence[int]:
        """Return the pointers, with those of copied tensors replaced by those of their copies."""
        instead = {i: copy.data_ptr() for copied, i, copy in self.copies if copied == name}
        return [instead.get(i, p) for i, p in enumerate(pointers)] if instead else pointers

    def _send(self, begin: int, end: int) -> None:
        if self._device is not self._host:  # the interpreter's kernels read main memory
            upload(self._host[begin:end], self._device[begin:end])


class _Contents(NamedTuple):
    """The contents of one table, on the host.

    Both tensors are padded to a multiple of 16 bytes, so that every table starts at one.

    Attributes:
        columns: sizes, first chunks, numbers, and pointers by list; int64 of shape (3 + lists,
            rows).
        rows: row that each chunk belongs to, int32 of shape (chunks,).
        chunk: elements of a chunk.
        chunks: number of chunks.
    """

    columns: Tensor
    rows: Tensor
    chunk: int
    chunks: int

    @classmethod
    def of(cls, rows: Rows, numbers: Sequence[int]) -> "_Contents":
        sizes = [used[0].numel() for _, used in rows]
        chunk = _chunk(sum(sizes))
        counts = [-(-size // chunk) for size in sizes]
        firsts = [0, *itertools.accumulate(counts)][:-1]
        pointers = zip(*([t.data_ptr() for t in used] for _, used in rows), strict=True)
        columns = torch.tensor([sizes, firsts, [numbers[i] for i, _ in rows], *pointers])
        # int32, because every program loads one entry, and there may be thousands of chunks
        of_chunks = torch.arange(len(rows), dtype=torch.int32).repeat_interleave(
            torch.tensor(counts)
        )
        return cls(
            columns=pad(columns, (0, _even(len(rows)) - len(rows))),
            rows=pad(of_chunks, (0, -len(of_chunks) % 4)),
            chunk=chunk,
            chunks=len(of_chunks),
        )


def _aligned(pointers: Sequence[int]) -> bool:
    # One OR of all addresses shows whether each is a multiple of 16, faster than one test each.
    return functools.reduce(operator.or_, pointers, 0) % 16 == 0


def _even(rows: int) -> int:
    """Return the padded number of columns, so that tables start at multiples of 16 bytes."""
    return rows + rows % 2


def _chunk(numel: int) -> int:
    # closed form instead of autotuning: chunks decide the order of partial sums, and so their bits
    return min(max(-(-numel // PROGRAMS // MIN_CHUNK) * MIN_CHUNK, MIN_CHUNK), MAX_CHUNK)
