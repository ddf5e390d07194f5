"""Largest magnitude and sum of squares of gradients, the basis of a step's decision. 2 B/param.

The same pass can take a checksum of each tensor's bits.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonamp.kernels._bit_sums import bit_sum, pattern, stacked
from tritonamp.kernels._blocks import Scratch, block_size, cut, reused
from tritonamp.kernels._implementations import Implementations
from tritonamp.kernels._launch import Launch
from tritonamp.kernels._magnitudes import float_bits, magnitude
from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels._plan import Plan
from tritonamp.kernels._sample import ListSample
from tritonamp.kernels._shipped import Shipped, build_name, shipped_lists
from tritonamp.kernels._tables import DTYPES, Table, chunk_bounds, element_pointer
from tritonamp.kernels._transfer import transfer
from tritonamp.kernels.device import WARP_SIZE, tl, triton

_WARPS = 4
_STATS = "grad_stats"  # name of its launches in a plan
_CHECKED = "checked_stats"
_VECTORS = 4  # of 16 bytes that a thread waits for


@triton.jit(do_not_specialize=("chunk", "before"))
def grad_stats_kernel(
    grads_ptr, numel_ptr, first_ptr, number_ptr, rows_ptr, amax_ptr, square_ptr, checksum_ptr,
    chunk, before,
    TYPE: tl.constexpr, CHECKSUM: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce one chunk to an integer maximum, which is exact in any order, and a partial sum.

    CHECKSUM is the number of bits of an element, whose patterns are added up; 0: no checksum.
    """
    row = tl.load(rows_ptr + tl.program_id(0))
    begin, whole, end = chunk_bounds(numel_ptr, first_ptr, row, tl.program_id(0), chunk, VEC)
    grads = element_pointer(grads_ptr, row, TYPE, VEC)
    j = tl.arange(0, BLOCK)
    # integers, whose maximum is exact in any order: one pass finds amax, inf and NaN
    largest = tl.zeros([BLOCK // VEC], tl.int32)  # of the VEC neighbours that one thread holds
    squares = tl.zeros([BLOCK // VEC], tl.float32)
    if CHECKSUM:
        # a chunk has at most 2^16 patterns for each sum
        patterns = tl.zeros([BLOCK // VEC], tl.int32 if CHECKSUM == 16 else tl.int64)
    for at in range(begin, whole, BLOCK):
        g = tl.load(grads + at + j, mask=at + j < whole, other=0.0)
        # each thread reduces its own vector first, because that needs no exchange between threads
        g = tl.reshape(g, (BLOCK // VEC, VEC))
        largest = tl.maximum(largest, tl.max(magnitude(g, TYPE), 1))
        # finite bfloat16 values may overflow here, so non-finite
        # gradients are found by magnitude alone
        squares += tl.sum(g.to(tl.float32) * g.to(tl.float32), 1)
        if CHECKSUM:
            patterns += tl.sum(pattern(g, TYPE, CHECKSUM), 1)
    amax, square = tl.max(largest, 0), tl.sum(squares, 0)
    if CHECKSUM:
        checksum = tl.sum(patterns.to(tl.int64), 0)
    if whole < end:
        rest = whole + tl.arange(0, VEC)
        g = tl.load(grads + rest, mask=rest < end, other=0.0)
        amax = tl.maximum(amax, tl.max(magnitude(g, TYPE), 0))
        # behind a mask, or the sum would absorb the product as a
        # multiply-add, and lanes differ by an ulp
        square += tl.sum(tl.where(rest < end, g.to(tl.float32) * g.to(tl.float32), 0.0), 0)
        if CHECKSUM:
            checksum += tl.sum(pattern(g, TYPE, CHECKSUM), 0).to(tl.int64)
    # Chunks of a tensor meet in an integer maximum, which needs no order. A sum of floats would
    # depend on it, so each chunk keeps a sum of its own, and decide adds them in one order.
    tl.atomic_max(amax_ptr + tl.load(number_ptr + row), float_bits(amax, TYPE), sem="relaxed")
    tl.store(square_ptr + before + tl.program_id(0), square)
    if CHECKSUM:
        # a sum of integers modulo 2**64 needs no order, either
        tl.atomic_add(checksum_ptr + tl.load(number_ptr + row), checksum, sem="relaxed")


def grad_stats_triton(lists: TensorLists, device: torch.device) -> tuple[Tensor, Tensor]:
    amax, squares = _run(lists, device, _STATS)
    return amax, squares


def checked_stats_triton(lists: TensorLists, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    amax, squares, checksums = _run(lists, device, _CHECKED)
    return amax, squares, checksums


def _run(lists: TensorLists, device: torch.device, name: str) -> tuple[Tensor, ...]:
    # gradients alone: other lists would be described and compared for nothing
    with lists.launches(names=("grads",)) as plan:
        prepared = plan.prepared(name, lambda: _prepared(lists, plan.tables, name))
        results = prepared.run()
    if len(results) == 1 and results[0][0].device == device:
        return results[0]
    # each device has zeros for the chunks of the others, so that sums are sums of disjoint parts
    amaxes, *sums = (
        torch.stack([transfer(r, device) for r in rs]) for rs in zip(*results, strict=True)
    )
    return amaxes.amax(0), *(s.sum(0) for s in sums)


class Prepared(NamedTuple):
    """The launches on the tables of one plan.

    Attributes:
        results: largest magnitudes, sums of squares and, if asked for, checksums, for each device.
        launches: launches that write the results.
    """

    results: list[tuple[Tensor, ...]]
    launches: list[Launch]

    def run(self) -> list[tuple[Tensor, ...]]:
        """Run the launches, and return the results."""
        for amax, squares, *checksums in self.results:
            # atomics accumulate, so the maxima and checksums of the step before have to go
            amax.zero_()
            for checksum in checksums:
                checksum.zero_()
            if len(self.results) > 1:
                squares.zero_()  # other devices leave the chunks of this one empty
        for launch in self.launches:
            launch()
        return self.results


def prepared_stats(plan: Plan) -> Prepared | None:
    """Return the launches of an earlier ``grad_stats`` on lists of this plan; None: none ran."""
    found: Prepared | None = plan.launches.get(_STATS)
    return found


def _prepared(lists: TensorLists, tables: Sequence[Table], name: str) -> Prepared:
    results, launches = [], []
    chunks = sum(t.chunks for t in tables)
    devices = dict.fromkeys(t.device for t in tables)
    # memory of its own, because a decision may still wait for the results of ``grad_stats``
    checked = name == _CHECKED
    kept = "checked " if checked else ""
    for on in devices:
        amax = lists.kept(f"{kept}amax", (lists.size,), torch.float32, on)
        # rounded up to powers of two, so that few sizes of persistent memory exist
        room = 1 << (chunks - 1).bit_length()
        squares = lists.kept(f"{kept}squares", (room,), torch.float32, on)[:chunks]
        result: tuple[Tensor, ...] = amax, squares
        if checked:
            result = *result, lists.kept("checksums", (lists.size,), torch.int64, on)
        results.append(result)
        launches += [_launch_of(t, *result) for t in tables if t.device == on]
    return Prepared(results, launches)


def _launch_of(t: Table, amax: Tensor, squares: Tensor, checksums: Tensor | None = None) -> Launch:
    # 16 bytes of a gradient for each load
    dtype = t.dtypes["grads"]
    per_vector = 4 if dtype is torch.float32 else 8
    vec = per_vector if t.aligned else 1
    # of the gradient, which the interpreter may read as another type
    bits = 0 if checksums is None or dtype is None else 8 * dtype.itemsize
    # without a checksum no instruction touches the third operand
    operands = amax.view(torch.int32), squares, squares if checksums is None else checksums
    constants = t.type("grads"), bits
    # A thread waits for several loads at once: one vector at a time would
    # not fill the memory's pipeline.
    tile, sizes = WARP_SIZE * _WARPS * _VECTORS * vec, (t.before,)
    return t.launch_of(
        grad_stats_kernel, ("grads",), operands, constants, vec, sizes, tile=tile, num_warps=_WARPS
    )


def grad_stats_torch(lists: TensorLists, device: torch.device) -> tuple[Tensor, Tensor]:
    size, scratch, nothing = block_size(), Scratch(), torch.zeros((), device=device)
    lowest, highest, norms = [nothing] * lists.size, [nothing] * lists.size, [nothing]
    for i, grad in zip(lists.numbers, lists["grads"] if len(lists) else (), strict=True):
        g = grad.detach() if grad.numel() else grad.new_zeros(1)
        low, high = torch.aminmax(g.abs() if g.is_complex() else g)
        lowest[i], highest[i] = low.to(device), high.to(device)
        norms += _norms(g, device, size, scratch)
    # "nothing" comes first in each list, because stack refuses an empty list
    amax = torch.stack([nothing, *lowest, nothing, *highest]).view(2, -1).abs().amax(0)
    return amax[1:].float(), torch.stack(norms)[1:].square().float()


def _norms(g: Tensor, device: torch.device, size: int, scratch: Scratch) -> list[Tensor]:
    """Return norms of blocks of ``g``, computed in FP32 or wider, on ``device``."""
    dtype = torch.promote_types(g.dtype, torch.float32)
    parts = None if dtype == g.dtype else cut((g,), size)
    if parts is None:
        return [torch.linalg.vector_norm(g.to(dtype)).to(device)]
    # a large tensor is widened block by block, in memory that stays in the cache
    wide = (reused(scratch, "wide", part, dtype).copy_(part) for (part,) in parts)
    return [torch.linalg.vector_norm(part).to(device) for part in wide]


def checked_stats_torch(lists: TensorLists, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    checksums = [torch.zeros((), dtype=torch.int64, device=device)] * lists.size
    for i, grad in zip(lists.numbers, lists["grads"] if len(lists) else (), strict=True):
        checksums[i] = transfer(bit_sum(grad), device)
    amax, squares = grad_stats_torch(lists, device)
    return amax, squares, stacked(checksums, device)


def grad_stats(
    lists: TensorLists, device: torch.device, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return the largest magnitude of each tensor, in which inf and NaN show, and sums of squares.

    Args:
        lists: "grads", n dense floating tensors of any shapes, dtypes and devices.
        device: device of the results.
        backend: "auto", "triton" or "eager".

    Returns:
        amax, float32 of shape (lists.size,), which is 0 for a number without a tensor; and sums of
        squares of parts of the gradients, float32, any number of them. Both are of the values as
        they are (scaled). The next call for the same lists may overwrite them.
    """
    return GRAD_STATS.run(
        backend, lists.uses_triton(backend, GRAD_STATS, ("grads",)), lists, device
    )


def checked_stats(
    lists: TensorLists, device: torch.device, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of ``grad_stats`` and a checksum of each tensor, from one read.

    Arguments are those of ``grad_stats``.

    Returns:
        amax and sums of squares, as ``grad_stats`` returns them; and checksums, int64 of shape
        (lists.size,), as ``checksums`` describes them, which are 0 for a number without a tensor.
        The next call for the same lists may overwrite them.
    """
    return CHECKED_STATS.run(
        backend, lists.uses_triton(backend, CHECKED_STATS, ("grads",)), lists, device
    )


def checksums(tensors: Sequence[Tensor], device: torch.device, backend: str = "auto") -> Tensor:
    """Return a checksum of the bits of each tensor. The host does not wait.

    A checksum is the sum, modulo 2^64, of the bit patterns of the elements as signed integers. Its
    bits depend neither on the order of the elements nor on device or backend. One flipped bit
    always changes it. Of a sharded tensor this rank's part counts.

    Args:
        tensors: n dense tensors of any shapes, dtypes and devices.
        device: device of the result.
        backend: "auto", "triton" or "eager".

    Returns:
        checksums, int64 of shape (n,), in memory of their own.
    """
    lists = TensorLists(grads=tensors)
    # the kernel takes the dtypes of gradients, and counts in the order of memory
    if all(t.dtype in DTYPES for t in tensors) and lists.uses_triton(backend, CHECKED_STATS):
        return CHECKED_STATS.run(backend, True, lists, device)[2]
    return stacked([transfer(bit_sum(t), device) for t in lists["grads"]], device)


GRAD_STATS = Implementations(
    grad_stats_triton,
    grad_stats_torch,
    [
        ListSample(
            lambda t, half: (TensorLists(grads=[x.to(half) for x in t]), t[0].device),
            lambda _, stats: [stats[0], stats[1].sum()],
            bytes=2,
        ),
        ListSample(
            lambda t, _: (TensorLists(grads=t), t[0].device),
            lambda _, stats: [stats[0], stats[1].sum()],
            variant="of float32",
        ),
    ],
)

CHECKED_STATS = Implementations(
    checked_stats_triton,
    checked_stats_torch,
    [
        ListSample(
            lambda t, half: (TensorLists(grads=[x.to(half) for x in t]), t[0].device),
            lambda _, stats: [stats[0], stats[1].sum(), stats[2]],
            bytes=2,
        )
    ],
)


def shipped() -> Iterator[Shipped]:
    """Yield calls for each dtype, aligned and not, without and with checksums."""
    functions = {"grad_stats": grad_stats_triton, "checked_stats": checked_stats_triton}
    for op, function in functions.items():
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            for aligned in (True, False):
                lists = shipped_lists(aligned, grads=dtype)
                name = build_name(op, dtype, not aligned and "unaligned")
                yield Shipped(name, function, (lists, torch.device("cpu")))
