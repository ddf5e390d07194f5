"""Which memory a launch may touch, and which of it has no values yet."""

import contextlib
import ctypes
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from gpuless.ptx.arithmetic import Array
from gpuless.ptx.memory import Region
from gpuless.tensors import CudaTensor
from torch import Tensor

from tritonamp.kernels import _launch, _multi_tensor

UNWRITTEN = np.uint64(0xFFADFFADFFADFFAD)
"""What new memory is filled with: in floats a NaN that no arithmetic makes; no address has it."""
REMEMBERED = 100  # new tensors


def in_main_memory(x: Tensor) -> Tensor:
    """Return the values of a tensor of the GPU in software; other tensors as they are."""
    return x.inner if isinstance(x, CudaTensor) else x


def extent(x: Tensor) -> int:
    """Return how many bytes there are from the first element to the last, included."""
    if not x.numel():
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (steps + 1) * x.element_size()


class New(NamedTuple):
    """A tensor that was made without values.

    Attributes:
        begin: its address.
        memory: its elements, as integers of their width.
        written: which bytes have been written.
        tensor: kept alive, so that no other gets its memory.
    """

    begin: int
    memory: Array
    written: Array
    tensor: Tensor


class TrackedMemory:
    """What is known of tensors in main memory while kernels run.

    Of results of launches, and of what ``torch.empty_like`` and ``Tensor.new_empty`` make, it is
    known which bytes kernels have written, or torch, as far as they changed. Everything else counts
    as written. Kernels may touch their arguments, and by addresses in tables every tensor of a
    ``TensorLists``.
    """

    def __init__(self) -> None:
        self._lists: weakref.WeakSet[Any] = weakref.WeakSet()
        self._new: deque[New] = deque(maxlen=REMEMBERED)

    def of_argument(self, x: Tensor, name: str, tag: int) -> list[Region]:
        """Return an argument's memory, ``tag`` above its real addresses."""
        size, begin = extent(x), x.data_ptr()
        if not size:
            return []
        return [Region(begin + tag, size, begin, name, self._written(begin, size))]

    def of_lists(self) -> list[tuple[Region, Sequence[Tensor]]]:
        """Return what addresses in tables lead to, and whose memory it is; what overlaps is one."""
        spans = []
        for name, x in self._listed():
            if size := extent(x):
                spans.append((x.data_ptr(), x.data_ptr() + size, name, x))
        merged: list[tuple[int, int, str, list[Tensor]]] = []
        for begin, end, name, x in sorted(spans, key=lambda span: span[:2]):
            if merged and begin < merged[-1][1]:
                first, last, known, tensors = merged[-1]
                merged[-1] = first, max(last, end), known, [*tensors, x]
            else:
                merged.append((begin, end, name, [x]))
        return [(Region(b, e - b, b, name), tensors) for b, e, name, tensors in merged]

    def _listed(self) -> Iterator[tuple[str, Tensor]]:
        for lists in self._lists:
            for name, tensors in lists._lists.items():
                yield from ((f"{name}[{i}]", in_main_memory(x)) for i, x in enumerate(tensors))
            for plan in lists._plans.values():
                for name, i, copy in plan.copies:
                    yield f"copy of {name}[{i}]", in_main_memory(copy)

    def _written(self, begin: int, size: int) -> Array | None:
        for new in self._new:
            start = begin - new.begin
            if start >= 0 and start + size <= len(new.written):
                changed = new.memory != UNWRITTEN.astype(new.memory.dtype)  # torch writes, too
                new.written[:] |= np.repeat(changed, new.memory.itemsize)
                return new.written[start : start + size]
        return None

    def unwritten(self, x: Tensor) -> int:
        """Return how many bytes of a result no kernel wrote."""
        x = in_main_memory(x)
        written = self._written(x.data_ptr(), extent(x))
        return 0 if written is None else int((~written).sum())

    def _note_new(self, made: Tensor) -> Tensor:
        x = in_main_memory(made)
        if x.device.type != "cpu" or x.element_size() < 2 or not x.numel():
            return made
        begin, size = x.data_ptr(), extent(x)
        width = min(x.element_size(), 8)
        memory = np.frombuffer((ctypes.c_uint8 * size).from_address(begin), f"u{width}")
        memory[:] = UNWRITTEN.astype(memory.dtype)
        end = begin + size
        apart = (n for n in self._new if n.begin >= end or n.begin + len(n.written) <= begin)
        self._new = deque(apart, maxlen=REMEMBERED)
        self._new.append(New(begin, memory, np.zeros(size, np.bool_), x))
        return made

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Inside, new tensors and lists of tensors are noted."""
        like, new, strided = torch.empty_like, Tensor.new_empty, Tensor.new_empty_strided
        of_launches = _launch._new
        start = _multi_tensor.TensorLists.__init__

        def empty_like(*args: Any, **kwargs: Any) -> Tensor:
            return self._note_new(like(*args, **kwargs))

        def new_empty(*args: Any, **kwargs: Any) -> Tensor:
            return self._note_new(new(*args, **kwargs))

        def new_empty_strided(*args: Any, **kwargs: Any) -> Tensor:
            return self._note_new(strided(*args, **kwargs))

        def results(*args: Any) -> list[Tensor]:
            return [self._note_new(result) for result in of_launches(*args)]

        def started(lists: Any, *args: Any, **kwargs: Any) -> None:
            self._lists.add(lists)
            start(lists, *args, **kwargs)

        with (
            mock.patch.object(torch, "empty_like", empty_like),
            mock.patch.object(Tensor, "new_empty", new_empty),
            mock.patch.object(Tensor, "new_empty_strided", new_empty_strided),
            mock.patch.object(_launch, "_new", results),
            mock.patch.object(_multi_tensor.TensorLists, "__init__", started),
        ):
            yield
