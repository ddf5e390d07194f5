"""The tensors that an operation of torch reads and writes, with numbers of elements.

Each operation reads each argument once and writes each result once. The exceptions:

- Views and new memory move nothing. An expanded tensor has the elements of its own memory.
- A lookup reads as many elements as it returns. A write by indices reads and writes those alone.
- An operation that overwrites its argument does not read it.
"""

import math
from typing import Any

from gpuless.facts import facts
from gpuless.nested import tensors_of
from torch import Tensor

from tritonamp.watched.ops import UNWRITTEN

NO_WORK = UNWRITTEN | {"_unsafe_view", "_reshape_alias", "lift_fresh", "resize_", "set_"}
OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_"}
LOOKUPS = {"embedding", "index", "index_select", "gather"}
"""Operations that read as many elements of their first argument as they return."""
TARGETS_READ = {"nll_loss_forward", "nll_loss2d_forward"}
"""Operations that read as many elements of their first argument as there are targets."""
SIZES_READ = {"nll_loss_backward", "nll_loss2d_backward"}
"""Operations that read only the sizes of their second argument."""
SCATTERS = {
    "index_put_": 2, "_index_put_impl_": 2, "index_add_": 3, "index_copy_": 3, "scatter_": 3,
    "scatter_add_": 3,
}  # fmt: skip
"""Position of the argument with the values. The first argument is written at some indices only."""

Moved = list[tuple[Tensor, int]]
"""Tensors, with the numbers of elements that are read or written."""


def own(x: Tensor) -> int:
    """Return the number of different elements of a tensor, which may be expanded."""
    sizes = zip(x.shape, x.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) if x.numel() else 0


def touched(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[Moved, Moved]:
    """Return the tensors that an operation reads, and those that it writes.

    Args:
        func: the operation, an overload of ATen.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        result: result of the call.
    """
    known = facts(func)
    written = tensors_of(known.writes(args, kwargs))
    results = [] if known.is_in_place else tensors_of([result])
    given = tensors_of([*args, *kwargs.values()]) if known.reads_values else []
    writes = {id(x): (x, own(x)) for x in written + results}
    reads = {id(x): (x, own(x)) for x in given}
    if known.name in OVERWRITES or func._overloadname == "out":
        reads = {key: read for key, read in reads.items() if key not in writes}
    first = id(args[0]) if args else 0
    if known.name in LOOKUPS:
        reads[first] = args[0], result.numel()
    elif known.name in TARGETS_READ:
        reads[first] = args[0], args[1].numel()
    elif known.name in SIZES_READ:
        del reads[id(args[1])]
    elif known.name in ("index_put", "_unsafe_index_put"):  # in place on a real GPU
        return [(args[2], own(args[2]))], [(result, args[2].numel())]
    elif known.name in SCATTERS:
        place = SCATTERS[known.name]
        values = args[place]
        number = values.numel() if isinstance(values, Tensor) else args[place - 1].numel()
        reads[first] = args[0], number
        if first in writes:
            writes[first] = args[0], number
    return list(reads.values()), list(writes.values())


def is_cast(reads: Moved, writes: Moved) -> bool:
    """Return whether a copy is from one floating format to another."""
    source, target = reads[0][0].dtype, writes[0][0].dtype
    return source != target and source.is_floating_point and target.is_floating_point
