"""Lists of tensors as tables of pointers on the device, for kernels that take any number of tensors
in one launch.
"""

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritonamp.kernels._implementations import Implementations
from tritonamp.kernels._upload import Upload
from tritonamp.kernels.device import INTERPRETED, runs_triton, tl, triton

DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}  # that kernels take
MIN_CHUNK, MAX_CHUNK = (
    1 << 12,
    1 << 16,
)  # elements that one program works on; multiples of every kernel's tile
PROGRAMS = (
    4096  # aimed at: several times what a GPU holds, so that the last ones do not leave it idle
)
NUM_WARPS = 8

_dtype = operator.attrgetter("dtype")


class Table(NamedTuple):
    """Those tensors of the lists that one launch takes: they share the device, each list's dtype,
    and the alignment.

    Attributes:
        pointers: by list, int64 of shape (rows,).
        numel, first, number: int64 of shape (rows,): elements, the first chunk, the tensor's
            number.
        rows: int32 of shape (chunks,): the row that each chunk belongs to.
        chunk: elements of a chunk. ``chunks``: how many, ``before``: how many the earlier tables
            have.
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
        """What the list's pointers point to, for a kernel; None where the list repeats an earlier
        one.
        """
        dtype = self.dtypes[name]
        return None if dtype is None else getattr(tl, DTYPES[_stored(dtype)])


class TensorLists:
    """Named lists of n tensors each. Tensors at the same place of all lists have the same shape and
    device.

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
        self._parts: list[_Part] = []
        self._suit_kernels = False
        self._kept: dict[tuple[str, torch.device], Tensor] = {}
        for name, tensors in lists.items():
            self.set(name, tensors)

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, name: str) -> Sequence[Tensor]:
        return self._lists[name]

    def set(self, name: str, tensors: Sequence[Tensor], lasting: bool = False) -> None:
        """Puts a list in the place of an earlier one of the same name. A list of another length
        starts anew.

        Args:
            lasting: the tensors are the same from step to step: what they are like is looked at
                only where another object, or other memory, takes the place of one.
        """
        if len(tensors) != self._n:
            self.number(range(len(tensors)), len(tensors))
        self._lists[name] = _local(tensors)
        self._to_check[name] = lasting

    def number(self, numbers: Sequence[int], size: int) -> None:
        """Starts anew, with the lists to be set for these ``numbers`` out of ``size``, unless they
        are those.
        """
        if numbers != self.numbers or size != self.size:
            self._n, self.numbers, self.size = len(numbers), numbers, size
            self._lists, self._known, self._to_check = {}, {}, {}

    def release(self, *names: str) -> None:
        """Lets go of the tensors of these lists until they are set again; remembers where they
        were.
        """
        for name in names:
            self._lists[name] = ()
            self._to_check.pop(name, None)

    def kept(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Memory that stays where it is as long as its shape does; zeros at first."""
        tensor = self._kept.get((name, device))
        if tensor is None or tensor.shape != shape:
            tensor = self._kept[name, device] = torch.zeros(shape, dtype=dtype, device=device)
        return tensor

    def all_kept(self, name: str) -> list[Tensor]:
        """That memory on all devices."""
        return [tensor for (kept_name, _), tensor in self._kept.items() if kept_name == name]

    def uses_triton(
        self, backend: str, operation: Implementations, names: Iterable[str] | None = None
    ) -> bool:
        """Tell whether ``operation`` on these lists runs its kernel. Kernels do not take float64,
        nor wrapper subclasses.

        Args:
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
        """Yields the tables, for a ``with`` block that launches kernels on the lists ``names``
        (None: on all).

        Args:
            written: those that they write to.
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
        """Brings what the tables have of these lists up to date."""
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
        """Where the lists that may repeat others do, by name."""
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
                    _Part(device, self._lists, self.may_repeat, self.numbers, here, before)
                )
                before += sum(table.chunks for table in self._parts[-1].tables)
            self._suit_kernels = before > 0


def shipped_lists(
    aligned: bool, may_repeat: Iterable[str] = ("copies",), **dtypes: torch.dtype | str
) -> TensorLists:
    """Lists of one small tensor each, for ``shipped``; a name instead of a dtype repeats that list."""
    lists = TensorLists(may_repeat=may_repeat)
    for name, dtype in dtypes.items():
        if isinstance(dtype, str):
            lists.set(name, lists[dtype])
        else:
            lists.set(name, [torch.empty(4096 + 8, dtype=dtype)[0 if aligned else 1 :][:4096]])
    lists._to_check.clear()
    lists._parts = [_Part(torch.device("cpu"), lists._lists, lists.may_repeat, [0], [0], 0)]
    lists._repeats = lists._repeated()
    return lists


class _Known(NamedTuple):
    """What is known of a list without holding on to its tensors. The same object at the same
    address is as it was.
    """

    ids: list[int]
    pointers: list[int]
    kinds: list[Any]


class _Part:
    """The tables of one device, in one piece of memory."""

    def __init__(
        self,
        device: torch.device,
        lists: dict[str, Sequence[Tensor]],
        may_repeat: frozenset[str],
        numbers: Sequence[int],
        places: list[int],
        before: int,
    ) -> None:
        self.copies: list[tuple[str, int, Tensor]] = []  # list, place, what kernels work on instead
        kinds: dict[tuple[Any, ...], list[tuple[int, list[Tensor]]]] = {}
        for i in places:
            given = [tensors[i] for tensors in lists.values()]
            if given[0].numel():
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

        width = sum(
            len(rows) + len(rows) % 2 for rows in kinds.values()
        )  # keeps the columns of tables aligned
        host = torch.zeros((len(lists) + 3, width), dtype=torch.int64)
        self._columns, self._host = {name: k + 3 for k, name in enumerate(lists)}, host
        self._device = host if device.type == "cpu" else torch.empty_like(host, device=device)
        self._order: list[list[int]] = []
        self._aligned: list[bool] = []
        self.tables: list[Table] = []
        at = 0
        for (dtypes, aligned), rows in kinds.items():
            sizes = [used[0].numel() for _, used in rows]
            chunk = _chunk(sum(sizes))
            counts = torch.tensor([-(-size // chunk) for size in sizes])
            end = at + len(rows)
            host[0, at:end] = torch.tensor(sizes)
            host[1, at:end] = counts.cumsum(0) - counts
            host[2, at:end] = torch.tensor([numbers[i] for i, _ in rows])
            host[3:, at:end] = torch.tensor([[t.data_ptr() for t in used] for _, used in rows]).T
            numel, first, number, *columns = self._device[:, at:end].unbind()
            chunks = int(counts.sum())
            self.tables.append(
                Table(
                    device,
                    dict(zip(lists, columns, strict=True)),
                    numel,
                    first,
                    number,
                    torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), counts).to(
                        device
                    ),
                    chunk,
                    chunks,
                    before,
                    dict(zip(lists, dtypes, strict=True)),
                    aligned,
                )
            )
            self._order.append([i for i, _ in rows])
            self._aligned.append(aligned)
            at, before = end + len(rows) % 2, before + chunks
        self._upload = Upload(device)
        self._upload.send(host, self._device)

    def _laid_out(
        self, names: list[str], i: int, given: list[Tensor], repeats: list[bool]
    ) -> list[Tensor]:
        """The tensors of one place, or copies of them, so that all have the same elements at the
        same offsets.
        """
        first = given[0]
        strides = (
            first.stride() if _is_dense(first) else torch.empty(first.shape, device="meta").stride()
        )
        used = []
        for name, tensor, repeat in zip(names, given, repeats, strict=True):
            differs = tensor.numel() > 1 and tensor.stride() != strides
            if not repeat and (differs or tensor.dtype != _stored(tensor.dtype)):
                copy = torch.empty_strided(
                    tensor.shape, strides, dtype=_stored(tensor.dtype), device=tensor.device
                )
                self.copies.append((name, i, copy))
                tensor = copy
            used.append(tensor)
        return used

    def follow(self, name: str, pointers: list[int]) -> bool:
        """Takes a list's new pointers. False: the tables must be built anew."""
        if any(copied == name for copied, _, _ in self.copies):
            return False
        at, column = 0, self._host[self._columns[name]]
        for order, aligned in zip(self._order, self._aligned, strict=True):
            found = [pointers[i] for i in order]
            if aligned and not _aligned(found):
                return False
            column[at : at + len(order)] = torch.tensor(found)
            at += len(order) + len(order) % 2
        self._upload.send(self._host, self._device)
        return True


@triton.jit
def chunk_bounds(numel_ptr, first_ptr, row, chunk, VEC: tl.constexpr):
    """Where the chunk of this program starts, ends in whole vectors of VEC elements, and ends;
    int64.
    """
    numel = tl.load(numel_ptr + row)
    begin = (tl.program_id(0) - tl.load(first_ptr + row)) * (
        chunk // VEC * VEC
    )  # tells the compiler what divides it
    end = tl.minimum(begin + chunk, numel)
    return begin, end // VEC * VEC, end


@triton.jit
def element_pointer(pointers, row, TYPE: tl.constexpr, VEC: tl.constexpr):
    """The address in a table as a pointer to elements of TYPE; a multiple of 16 bytes unless VEC is
    1.
    """
    pointer = tl.load(pointers + row).to(tl.pointer_type(TYPE))
    if VEC > 1:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def note_overflow(flag_ptr, x, rounded, mask, VEC: tl.constexpr):
    """Sets the flag where a finite ``x`` is beyond the range of what it was rounded to; a thread
    holds VEC elements.
    """
    beyond = (tl.abs(rounded.to(tl.float32)) == float("inf")) & (tl.abs(x) < float("inf")) & mask
    of_thread = tl.max(tl.reshape(beyond.to(tl.int32), (x.shape[0] // VEC, VEC)), 1)
    tl.store(flag_ptr + 0 * of_thread, 1, mask=of_thread != 0)


def _local(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Of sharded tensors (DTensor) the parts of this rank."""
    if len(tensors) and hasattr(tensors[0], "_local_tensor"):
        return [tensor._local_tensor for tensor in tensors]  # type: ignore[attr-defined]
    return tensors


def _stored(dtype: torch.dtype) -> torch.dtype:
    """What kernels work on for ``dtype``: Triton's interpreter truncates to bfloat16 and loses its
    subnormals.
    """
    return torch.float32 if INTERPRETED and dtype is torch.bfloat16 else dtype


def _suits_kernels(tensor: Tensor) -> bool:
    return tensor.dtype in DTYPES and not is_traceable_wrapper_subclass(tensor)


def _aligned(pointers: list[int]) -> bool:
    return functools.reduce(operator.or_, pointers, 0) % 16 == 0


def _chunk(numel: int) -> int:
    return min(max(-(-numel // PROGRAMS // MIN_CHUNK) * MIN_CHUNK, MIN_CHUNK), MAX_CHUNK)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie next to each other in some order, each once."""
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
