"""sum with FP32 accumulation. 2 B/element.

Every program adds up one tile as a binary tree and writes a partial sum. Partial sums are lines
again, until one is left for each line: two launches up to 2**26 elements. The tree is needed for
the error bound u (log2 n + 2) sum |x|.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tritonamp.kernels._by_length import is_by_length
from tritonamp.kernels._implementations import TraceableOp, line_sums
from tritonamp.kernels._launch import Launch
from tritonamp.kernels._lines import (
    WIDEST,
    cached_by_shape,
    column_offsets,
    dense,
    edge_offsets,
    in_range,
    line_lead,
    line_offsets,
    tiling,
    whole_vectors,
)
from tritonamp.kernels._sample import Sample
from tritonamp.kernels._shipped import Shipped, build_name
from tritonamp.kernels.device import tl, triton

PER_THREAD = 32  # elements that a thread holds
LONGEST = 8192  # line that is one tile
# Bytes side by side in a tile of columns, at least. An FP32 tile may have 128 columns then, so that
# one launch adds up the partial sums of a norm's backward.
SIDE = 128


@triton.jit
def _neighbours(x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Add up pairs of neighbouring columns."""
    # Neighbours belong to one thread. Older Triton adds a thread's elements one
    # after another, which is no tree.
    a, b = tl.split(tl.reshape(x, (ROWS, BLOCK // 2, 2)))
    return a + b


@triton.jit
def _halves(x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Add up columns that are half a tile apart."""
    # These columns belong to one thread if it holds no more neighbours. Triton 3.7 would move
    # neighbours between threads here, through shared memory.
    a, b = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, BLOCK // 2)), (0, 2, 1)))
    return a + b


@triton.jit(do_not_specialize=("rows", "n", "blocks", "programs", "count"))
def sum_kernel(
    x_ptr, y_ptr, rows, n, blocks, programs, count,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up BLOCK columns of ROWS lines; ``programs`` programs cover the ``count`` lines."""
    part = (tl.program_id(0) // programs).to(tl.int64)
    pid = tl.program_id(0) % programs
    lines, numbers, valid = line_offsets(pid, rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS)
    lead = line_lead(pid, n, ALIGN, VEC)
    begin = lead + part * BLOCK
    end = min(begin + BLOCK, lead + n)
    first, last = whole_vectors(begin, end, ALIGN, VEC)
    columns, exist = column_offsets(first, last, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
    x = tl.load(x_ptr + lines + columns, mask=valid & exist, other=0.0).to(tl.float32)
    # Three levels of the tree inside a thread. FP32 vectors hold 4 neighbours, so their third level
    # adds columns that are half a tile apart.
    if ROW_MAJOR and BLOCK >= 8:
        x = _neighbours(x, ROWS, BLOCK)
        x = _neighbours(x, ROWS, BLOCK // 2)
        x = _halves(x, ROWS, BLOCK // 4) if VEC == 4 else _neighbours(x, ROWS, BLOCK // 4)
    y = tl.sum(x, 1, keep_dims=True)
    # edges that fill no vector are read separately, so that the tile keeps its wide loads
    if ALIGN < VEC:
        edges, mask = edge_offsets(begin, end, first, last, VEC)
        x = tl.load(x_ptr + lines + edges, mask=mask, other=0.0).to(tl.float32)
        y += tl.sum(x, 1, keep_dims=True)
    # partial sums stay FP32 and are added by another launch in one order: no atomics on floats
    tl.store(y_ptr + part * count + numbers, y.to(y_ptr.dtype.element_ty), mask=valid)


def _reduction(
    shape: Sequence[int], dim: tuple[int, ...], keepdim: bool
) -> tuple[tuple[int, ...], tuple[int, ...] | None, int, int]:
    """Return the result's shape, an order of dimensions, and the first and last summed dimension.

    The order makes the summed dimensions neighbours; None if they are neighbours already.
    """
    rank = len(shape)
    given = [in_range(d, max(rank, 1)) for d in dim]
    # torch raises this error; without it a kernel would sum over the dimension once
    for d in given:
        if given.count(d) > 1:
            raise RuntimeError(f"dim {d} appears multiple times in the list of dims")
    dims = sorted(given) if dim and rank else list(range(rank))
    result = tuple(
        1 if d in dims else size for d, size in enumerate(shape) if keepdim or d not in dims
    )
    if not dims:
        return result, None, 0, 0
    # by length, the summed dimensions come last, where a line lies in one piece
    if dims[-1] - dims[0] < len(dims) and (dims[-1] == rank - 1 or not is_by_length()):
        return result, None, dims[0], dims[-1]
    kept = [d for d in range(rank) if d not in dims]
    return result, (*kept, *dims), len(kept), rank - 1


@cached_by_shape
def _sum(
    shape: tuple[int, ...],
    given: torch.dtype,
    dim: tuple[int, ...],
    keepdim: bool,
    dtype: torch.dtype,
) -> Callable[[Tensor], Tensor]:
    """Return a function of a tensor of the shape ``shape`` and the dtype ``given``."""
    result, order, first, last = _reduction(shape, dim, keepdim)
    # a grid of 0 programs is an invalid launch
    if 0 in shape:
        return lambda x: torch.zeros(result, dtype=dtype, device=x.device)
    if order is not None:
        shape = tuple(shape[d] for d in order)
    launches = []
    # one launch for each level of the tree, because the partial sums are lines of the next level
    while True:
        vec, side = WIDEST // given.itemsize, SIDE // given.itemsize
        t = tiling(shape, first, last, PER_THREAD, LONGEST, vec, side)
        parts = 1 if t.whole else -(-t.n // t.layout[-1])
        # a partial sum is FP32 whatever the input is, and is rounded to
        # dtype in the last launch alone
        shape, first, last, given = (parts, t.lines), 0, 0, torch.float32
        y = dense(result, dtype) if parts == 1 else dense(shape, given)
        sizes, grid = (*t.sizes, t.grid[0], t.lines), (t.grid[0] * parts, 1, 1)
        launches.append(Launch(sum_kernel, grid, sizes, t.layout, t.num_warps, results=(y,)))
        if parts == 1:
            break

    def run(x: Tensor) -> Tensor:
        x = x.contiguous() if order is None else x.permute(order).contiguous()
        for launch in launches:
            (x,) = launch(x)
        return x

    return run


def sum_prepared(
    x: Tensor, dim: Sequence[int], keepdim: bool, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """Return a function that does ``sum_triton`` on tensors of the shape and dtype of ``x``."""
    return _sum(x.shape, x.dtype, tuple(dim), keepdim, dtype)


def sum_triton(x: Tensor, dim: Sequence[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    return sum_prepared(x, dim, keepdim, dtype)(x)


def sum_torch(x: Tensor, dim: Sequence[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    if is_by_length() and x.numel():
        result, order, first, _ = _reduction(x.shape, tuple(dim), keepdim)
        lines = (x if order is None else x.permute(order)).flatten(first).contiguous()
        return line_sums(lines.float(), -1).view(result).to(dtype)
    return torch.sum(x, tuple(dim), keepdim, dtype=torch.float32).to(dtype)


def sum(
    x: Tensor, dim: Sequence[int], keepdim: bool, dtype: torch.dtype, backend: str = "auto"
) -> Tensor:
    """Sum with FP32 accumulation, rounded once to ``dtype``.

    Args:
        x: float16, bfloat16 or float32, of any shape and strides.
        dim: dimensions to sum over; an empty sequence means all.
        keepdim: whether summed dimensions stay, with size 1.
        dtype: dtype of the result.
        backend: "auto", "triton" or "eager".
    """
    return SUM(backend, x, dim, keepdim, dtype)


SUM = TraceableOp(
    sum_triton,
    sum_torch,
    [Sample(lambda x, dim: (x, (dim,), False, torch.float32), any_order=True)],
    prepared=sum_prepared,
)


def shipped() -> Iterator[Shipped]:
    """Yield calls with one tile and with several, in both memory orders."""
    shapes: dict[str, tuple[int, ...]] = {f"n={n}": (4096, n) for n in (64, 1000, 8192, 50257)}
    shapes |= {"n=2**24": (1, 1 << 24), "inner": (64, 64, 4096)}
    for case, shape in shapes.items():
        for dtype, result in ((torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)):
            x = torch.empty(shape, dtype=dtype, device="meta")
            name = build_name("sum", dtype, case)
            yield Shipped(name, sum_triton, (x, (1,), False, result))
