"""Facts of many tensors at once, by which a step is compared with earlier steps.

The Python functions are the specification. Once ``use_native`` has built ``_native.cpp``, C++
answers for lists of plain tensors in a thirtieth of the time.
"""

import itertools
import operator
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._native import PLAIN_STEPS, build

# attrgetter with map keeps the loop over the tensors in C
_grad = operator.attrgetter("grad")
_version = operator.attrgetter("_version")  # private, but as old as autograd: counts writes
_device = operator.attrgetter("device")
_dtype = operator.attrgetter("dtype")


class _InPython:
    """Stand-in for the C++ module. Each function returns None, so that Python answers."""

    @staticmethod
    def ask(*given: Any) -> Any:
        return None

    addresses = versions = facts = dense = grads = count_write = leaf_versions = ask
    note_versions = steady_record = ask
    run_under = None  # casts/context.py has its own way


_native: Any = _InPython


def use_native() -> None:
    """Switch to the C++ module if it can be built; the first build takes seconds."""
    global _native
    if not PLAIN_STEPS:
        _native = build().module or _InPython


def is_native() -> bool:
    """Tell whether C++ answers."""
    return _native is not _InPython


def addresses(tensors: Sequence[Tensor]) -> bytes:
    """Return the addresses of the tensors' first elements, 64 bits each."""
    # None, or no bytes for an empty list: then Python answers, here and below
    return _native.addresses(tensors) or _packed(map(Tensor.data_ptr, tensors))


def versions(tensors: Sequence[Tensor]) -> bytes:
    """Return torch's count of writes to each tensor, 64 bits each."""
    return _native.versions(tensors) or _packed(map(_version, tensors))


def note_versions(tensors: list[Tensor], into: "array[int]", span: range) -> None:
    """Write torch's counts of writes to some neighbours among ``tensors`` to the same places.

    Args:
        tensors: tensors.
        into: 64-bit numbers, one for each tensor.
        span: places of the neighbours.
    """
    # without a copy of the list and of the numbers, because each step asks twice
    if not _native.note_versions(tensors, into, span.start, span.stop):
        of = slice(span.start, span.stop)
        into[of] = array("Q", map(_version, tensors[of]))


def leaf_versions(values: tuple[Any, ...]) -> tuple[list[int], bool] | None:
    """Return torch's counts of writes, and whether any tensor is on a GPU; None: look one by one.

    It answers where this thread records gradients, without autocast, transforms, dispatch modes or
    tracing, and all values are plain tensors that are part of no graph.
    """
    found: tuple[list[int], bool] | None = _native.leaf_versions(values)
    return found


def numbers(answer: bytes) -> Sequence[int]:
    """Return the 64-bit facts in ``answer`` as a sequence with a number for each tensor."""
    return array("Q", answer)


def grads(params: Sequence[Tensor]) -> list[Tensor | None]:
    """Return ``.grad`` of each tensor."""
    return _native.grads(params) or list(map(_grad, params))


def dense(tensors: Sequence[Tensor | None]) -> Sequence[int]:
    """Return the places of dense tensors, without those of None and of sparse tensors."""
    if _native.dense(tensors):
        return range(len(tensors))
    return [i for i, t in enumerate(tensors) if t is not None and not t.is_sparse]


def facts(lists: Sequence[Sequence[Tensor]]) -> tuple[Any, bytes]:
    """Return the facts that decide how kernels access lists of dense tensors of one length.

    Returns:
        The layout (devices, dtypes, sizes, strides, and the places where a list holds the tensor of
        the first list), and the addresses of the elements, 64 bits each, list after list.
    """
    found: tuple[Any, bytes] | None = _native.facts(lists)
    if found is not None:
        return found
    # identities of repeated tensors belong to the layout, because kernels leave repeated lists out
    kind = [
        (
            bytes(map(operator.is_, tensors, lists[0])),
            *map(_device, tensors),
            *map(_dtype, tensors),
            *map(Tensor.stride, tensors),
            *map(Tensor.size, tensors),
        )
        for tensors in lists
    ]
    return kind, _packed(map(Tensor.data_ptr, itertools.chain.from_iterable(lists)))


def count_write(tensors: Sequence[Tensor]) -> None:
    """Tell autograd of a write to each tensor, because it cannot see what kernels write."""
    if not _native.count_write(tensors):
        torch.autograd.graph.increment_version(tensors)


def _packed(values: Any) -> bytes:
    return array("Q", values).tobytes()
