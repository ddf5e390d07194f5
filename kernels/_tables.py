"""Tables of pointers on a device: what one launch takes of lists of tensors, and how it is read."""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonamp.kernels._upload import Upload
from tritonamp.kernels.device import INTERPRETED, WARP_SIZE, tl, triton

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
"""What kernels take."""
MIN_CHUNK, MAX_CHUNK = 1 << 12, 1 << 16
"""Elements that one program works on; multiples of every kernel's tile."""
PROGRAMS = 4096
"""Aimed at: several times what a GPU holds, so that the last ones do not leave it idle."""
NUM_WARPS = 8

Rows = list[tuple[int, list[Tensor]]]
"""Of one table: the place of each row in the lists, and the tensors that kernels work on."""


class Table(NamedTuple):
    """What one launch takes: rows that share the device, each list's dtype, and alignment.

    Attributes:
        device: where the table and its tensors are.
        pointers: by list, int64 of shape (rows,).
        numel: int64 of shape (rows,): elements.
        first: int64 of shape (rows,): the first chunk.
        number: int64 of shape (rows,): the tensor's number.
        rows: int32 of shape (chunks,): the row that each chunk belongs to.
        chunk: elements of a chunk.
        chunks: how many there are.
        before: how many the earlier tables have.
        dtypes: by list; None where the list only repeats an earlier one.
        aligned: all pointers are multiples of 16 bytes.
    """

    device: torch.device
    pointers: dict[str, Tensor]
    numel: Tensor
    first: Tensor
    number: Tensor
    rows: Tensor
    chunk: int
    chunks: int
    before: int
    dtypes: dict[str, torch.dtype | None]
    aligned: bool

    def type(self, name: str) -> Any:
        """Return a kernel's type for the list's elements; None where it repeats an earlier list."""
        dtype = self.dtypes[name]
        return None if dtype is None else getattr(tl, DTYPES[stored(dtype)])

    def launch_of(
        self,
        kernel: Any,
        names: Sequence[str],
        operands: Sequence[Tensor],
        constants: tuple[Any, ...],
        vec: int,
    ) -> tuple[Any, ...]:
        """Return what ``launch`` takes to run ``kernel`` on every chunk.

        Args:
            kernel: with the parameters in the order of what follows.
            names: lists whose pointers come first; the table's columns follow.
            operands: other tensors, after the columns.
            constants: those in front of VEC and BLOCK.
            vec: elements that a thread holds where the tensors are aligned.
        """
        vec = vec if self.aligned else 1
        pointers = [self.pointers[name] for name in names]
        tensors = (*pointers, self.numel, self.first, self.number, self.rows, *operands)
        tile = WARP_SIZE * NUM_WARPS * vec
        return (
            kernel,
            (self.chunks, 1, 1),
            tensors,
            (self.chunk,),
            (*constants, vec, tile),
            NUM_WARPS,
        )


class DeviceTables:
    """The tables of one device, in one piece of memory.

    Attributes:
        tables: one for each kind of row.
        copies: list, place, and what kernels work on in the place of the tensor there.
    """

    def __init__(
        self,
        device: torch.device,
        lists: dict[str, Sequence[Tensor]],
        may_repeat: frozenset[str],
        numbers: Sequence[int],
        places: list[int],
        before: int,
    ) -> None:
        self.copies: list[tuple[str, int, Tensor]] = []
        self.tables: list[Table] = []
        self._order: list[list[int]] = []
        kinds = self._kinds(lists, may_repeat, places)
        width = sum(map(_even, map(len, kinds.values())))
        self._columns = {name: k + 3 for k, name in enumerate(lists)}
        self._host = torch.zeros((len(lists) + 3, width), dtype=torch.int64)
        on_cpu = device.type == "cpu"
        self._device = self._host if on_cpu else torch.empty_like(self._host, device=device)
        at = 0
        for (dtypes, aligned), rows in kinds.items():
            types = dict(zip(lists, dtypes, strict=True))
            table = self._table(device, types, aligned, rows, numbers, at, before)
            self.tables.append(table)
            self._order.append([i for i, _ in rows])
            at, before = at + _even(len(rows)), before + table.chunks
        self._upload = Upload(device)
        self._upload.send(self._host, self._device)

    def _kinds(
        self, lists: dict[str, Sequence[Tensor]], may_repeat: frozenset[str], places: list[int]
    ) -> dict[tuple[tuple[torch.dtype | None, ...], bool], Rows]:
        """Return the rows by what they have to share: dtypes (None: repeats), and alignment."""
        kinds: dict[tuple[tuple[torch.dtype | None, ...], bool], Rows] = {}
        for i in places:
            given = [tensors[i] for tensors in lists.values()]
            if not given[0].numel():
                continue
            repeats = [
                name in may_repeat and tensors[i] is lists["params"][i]
                for name, tensors in lists.items()
            ]
            used = self._laid_out(list(lists), i, given, repeats)
            dtypes = tuple(
                None if repeat else t.dtype for t, repeat in zip(given, repeats, strict=True)
            )
            aligned = _aligned([t.data_ptr() for t in used if t.numel() > 1])
            kinds.setdefault((dtypes, aligned), []).append((i, used))
        return kinds

    def _laid_out(
        self, names: list[str], i: int, given: list[Tensor], repeats: list[bool]
    ) -> list[Tensor]:
        """Return a place's tensors, or copies: all with the same elements at the same offsets."""
        first = given[0]
        strides = (
            first.stride() if _is_dense(first) else torch.empty(first.shape, device="meta").stride()
        )
        used = []
        for name, tensor, repeat in zip(names, given, repeats, strict=True):
            differs = tensor.numel() > 1 and tensor.stride() != strides
            if not repeat and (differs or tensor.dtype != stored(tensor.dtype)):
                copy = torch.empty_strided(
                    tensor.shape, strides, dtype=stored(tensor.dtype), device=tensor.device
                )
                self.copies.append((name, i, copy))
                tensor = copy
            used.append(tensor)
        return used

    def _table(
        self,
        device: torch.device,
        dtypes: dict[str, torch.dtype | None],
        aligned: bool,
        rows: Rows,
        numbers: Sequence[int],
        at: int,
        before: int,
    ) -> Table:
        """Fill the columns from ``at`` on the host, and return the table that they become."""
        sizes = [used[0].numel() for _, used in rows]
        chunk = _chunk(sum(sizes))
        counts = torch.tensor([-(-size // chunk) for size in sizes])
        end, host = at + len(rows), self._host
        host[0, at:end] = torch.tensor(sizes)
        host[1, at:end] = counts.cumsum(0) - counts
        host[2, at:end] = torch.tensor([numbers[i] for i, _ in rows])
        host[3:, at:end] = torch.tensor([[t.data_ptr() for t in used] for _, used in rows]).T
        numel, first, number, *columns = self._device[:, at:end].unbind()
        of_chunks = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), counts)
        return Table(
            device=device,
            pointers=dict(zip(dtypes, columns, strict=True)),
            numel=numel,
            first=first,
            number=number,
            rows=of_chunks.to(device),
            chunk=chunk,
            chunks=int(counts.sum()),
            before=before,
            dtypes=dtypes,
            aligned=aligned,
        )

    def follow(self, name: str, pointers: list[int]) -> bool:
        """Take a list's new pointers; False: the tables must be built anew."""
        if any(copied == name for copied, _, _ in self.copies):
            return False
        at, column = 0, self._host[self._columns[name]]
        for order, table in zip(self._order, self.tables, strict=True):
            found = [pointers[i] for i in order]
            if table.aligned and not _aligned(found):
                return False
            column[at : at + len(order)] = torch.tensor(found)
            at += _even(len(order))
        self._upload.send(self._host, self._device)
        return True


@triton.jit
def chunk_bounds(numel_ptr, first_ptr, row, chunk, VEC: tl.constexpr):
    """Return where this program's chunk starts, ends in whole vectors, and ends; int64."""
    numel = tl.load(numel_ptr + row)
    begin = (tl.program_id(0) - tl.load(first_ptr + row)) * (
        chunk // VEC * VEC
    )  # tells the compiler what divides it
    end = tl.minimum(begin + chunk, numel)
    return begin, end // VEC * VEC, end


@triton.jit
def element_pointer(pointers, row, TYPE: tl.constexpr, VEC: tl.constexpr):
    """Return the address in a table as a pointer to TYPE, a multiple of 16 bytes if VEC > 1."""
    pointer = tl.load(pointers + row).to(tl.pointer_type(TYPE))
    if VEC > 1:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def note_overflow(flag_ptr, x, rounded, mask, VEC: tl.constexpr):
    """Set the flag where a finite ``x`` was rounded to infinity; a thread holds VEC elements."""
    beyond = (tl.abs(rounded.to(tl.float32)) == float("inf")) & (tl.abs(x) < float("inf")) & mask
    of_thread = tl.max(tl.reshape(beyond.to(tl.int32), (x.shape[0] // VEC, VEC)), 1)
    tl.store(flag_ptr + 0 * of_thread, 1, mask=of_thread != 0)


def stored(dtype: torch.dtype) -> torch.dtype:
    """Return what kernels work on for ``dtype``.

    Triton's interpreter truncates to bfloat16 and loses its subnormals: FP32 stands in.
    """
    return torch.float32 if INTERPRETED and dtype is torch.bfloat16 else dtype


def _aligned(pointers: list[int]) -> bool:
    return functools.reduce(operator.or_, pointers, 0) % 16 == 0


def _even(rows: int) -> int:
    """Return how many columns that many rows take: every table starts at a multiple of 16 bytes."""
    return rows + rows % 2


def _chunk(numel: int) -> int:
    return min(max(-(-numel // PROGRAMS // MIN_CHUNK) * MIN_CHUNK, MIN_CHUNK), MAX_CHUNK)


def _is_dense(tensor: Tensor) -> bool:
    """Tell whether the elements lie next to each other in some order, each once."""
    expected = 1
    steps = [
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    ]
    for stride, size in sorted(steps):
        if stride != expected:
            return False
        expected *= size
    return True
