"""softmax and log_softmax along one dimension: half storage, FP32 arithmetic. 4 B/element.

Several short lines make up a tile. A longer line fills a program's registers. A long line is read
twice, the second time from L2 and from its end. A few long lines are shared by several programs, in
two launches.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._implementations import TraceableOp
from tritonamp.kernels._launch import Launch, Room
from tritonamp.kernels._lines import (
    MAX_VECTOR,
    WIDEST,
    Tiling,
    cached_by_shape,
    column_offsets,
    dense,
    edge_offsets,
    line_lead,
    line_offsets,
    power_of_two,
    segment_bounds,
    tiling,
    whole_vectors,
)
from tritonamp.kernels._sample import Sample
from tritonamp.kernels._shipped import Shipped, build_name
from tritonamp.kernels.device import tl, triton

PER_THREAD = 32  # elements that a thread holds
# Of a thread in the forward, for all architectures. With 74 for a line of 1000, Triton
# 3.6 needs more instructions, too.
MAX_REGISTERS = 64
LONGEST = 32768  # line that registers hold


@triton.jit
def exp_shifted(d, SHIFT: tl.constexpr):
    """Return exp(d) * 2**SHIFT.

    The difference d = x - m is formed first, because exp2(x * log2(e) - m * log2(e)) is off by 5e-3
    near 6e4.
    """
    # softmax takes 10.75 instructions an element with exp2 and one reciprocal a line, and 16.75
    # with exp and a division
    return tl.exp2(d * 1.4426950408889634 + SHIFT)


@triton.jit
def _add_tile(x_ptr, mask, m, s, SHIFT: tl.constexpr):
    """Return maximum m and sum s of exp(x - m), extended by a tile of columns."""
    # evict_last, because the second pass reads the line again
    x = tl.load(x_ptr, mask=mask, other=-float("inf"), eviction_policy="evict_last").to(tl.float32)
    largest = tl.maximum(m, tl.max(x, 1, keep_dims=True))
    # if a line is all -inf so far, x - m would be NaN
    base = tl.where(largest == -float("inf"), 0.0, largest)
    s = s * exp_shifted(m - base, 0.0) + tl.sum(exp_shifted(x - base, SHIFT), 1, keep_dims=True)
    return largest, s


@triton.jit
def _max_and_sum(
    x_ptr, lines, valid, begin, end, rows,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Return the maximum m of columns ``begin`` to ``end``, and the sum of exp(x - m).

    If m is -inf, the sum is that of exp(x).
    """
    m = tl.full([ROWS, 1], -float("inf"), tl.float32)
    s = tl.zeros([ROWS, 1], tl.float32)
    first, last = whole_vectors(begin, end, ALIGN, VEC)
    for at in range(first, last, BLOCK):
        columns, exist = column_offsets(at, last, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
        m, s = _add_tile(x_ptr + lines + columns, valid & exist, m, s, SHIFT)
    # Columns that fill no vector are read separately. A mask that ends inside a vector would make
    # the compiler split all loads of the loop.
    if ALIGN < VEC:
        edges, mask = edge_offsets(begin, end, first, last, VEC)
        m, s = _add_tile(x_ptr + lines + edges, mask, m, s, SHIFT)
    return m, s


@triton.jit
def _write_tile(
    x_ptr, y_ptr, offs, mask, m, scale, LOG: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    # read for the last time, so that L2 keeps other lines
    x = tl.load(x_ptr + offs, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    y = x - m - scale if LOG else exp_shifted(x - m, SHIFT) * scale
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def _write(
    x_ptr, y_ptr, lines, valid, m, s, begin, end, rows,
    LOG: tl.constexpr, SHIFT: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write columns ``begin`` to ``end`` of the result, the last ones first, which L2 holds."""
    scale = tl.log2(s) * 0.6931471805599453 if LOG else 1 / s
    first, last = whole_vectors(begin, end, ALIGN, VEC)
    if ALIGN < VEC:
        edges, mask = edge_offsets(begin, end, first, last, VEC)
        _write_tile(x_ptr, y_ptr, lines + edges, mask, m, scale, LOG, SHIFT)
    for back in range(0, last - first, BLOCK):
        at = first + (last - first - 1) // BLOCK * BLOCK - back
        columns, exist = column_offsets(at, last, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
        _write_tile(x_ptr, y_ptr, lines + columns, valid & exist, m, scale, LOG, SHIFT)


@triton.jit(do_not_specialize=("rows", "n", "blocks"))
def softmax_kernel(
    x_ptr, y_ptr, rows, n, blocks,
    LOG: tl.constexpr, SHIFT: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute whole lines, which are held in registers."""
    lines, _, valid = line_offsets(tl.program_id(0), rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS)
    columns, exist = column_offsets(0, n, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
    offs, mask = lines + columns, valid & exist
    # missing columns are -inf, which is never the maximum, and whose exp is 0
    d = tl.load(x_ptr + offs, mask=mask, other=-float("inf")).to(tl.float32)
    d -= tl.max(d, 1, keep_dims=True)
    e = exp_shifted(d, SHIFT)
    # one reciprocal a line, because exp(d) / s takes half as many instructions again
    s = tl.sum(e, 1, keep_dims=True)
    y = d - tl.log2(s) * 0.6931471805599453 if LOG else e * (1 / s)
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("rows", "n", "blocks"))
def softmax_long_kernel(
    x_ptr, y_ptr, rows, n, blocks,
    LOG: tl.constexpr, SHIFT: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute lines that are too long for registers, which are read twice."""
    lines, _, valid = line_offsets(tl.program_id(0), rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS)
    begin = line_lead(tl.program_id(0), n, ALIGN, VEC)
    m, s = _max_and_sum(
        x_ptr, lines, valid, begin, begin + n, rows, ROW_MAJOR, ALIGN, VEC, ROWS, BLOCK, SHIFT
    )
    _write(
        x_ptr, y_ptr, lines, valid, m, s, begin, begin + n, rows,
        LOG, SHIFT, ROW_MAJOR, ALIGN, VEC, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=("rows", "n", "blocks", "steps", "count"))
def softmax_part_kernel(
    x_ptr, m_ptr, s_ptr, rows, n, blocks, steps, count,
    SHIFT: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write maximum and sum of each segment, [splits, count]: the first launch for shared lines."""
    lines, numbers, valid = line_offsets(
        tl.program_id(0), rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS
    )
    split = tl.program_id(1)
    begin, end = segment_bounds(n, steps, ALIGN, VEC, BLOCK)
    m, s = _max_and_sum(
        x_ptr, lines, valid, begin, end, rows, ROW_MAJOR, ALIGN, VEC, ROWS, BLOCK, SHIFT
    )
    # no atomics: the second launch combines the segments in one order, so that bits do not vary
    tl.store(m_ptr + split * count + numbers, m, mask=valid)
    tl.store(s_ptr + split * count + numbers, s, mask=valid)


@triton.jit(do_not_specialize=("rows", "n", "blocks", "steps", "count", "splits"))
def softmax_rest_kernel(
    x_ptr, m_ptr, s_ptr, y_ptr, rows, n, blocks, steps, count, splits,
    LOG: tl.constexpr, SHIFT: tl.constexpr, SPLITS: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Combine the segments of each line and write one: the second launch for shared lines."""
    lines, numbers, valid = line_offsets(
        tl.program_id(0), rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS
    )
    j = tl.arange(0, SPLITS)[None, :]
    mask = valid & (j < splits)
    # lanes beyond the segments are neutral: -inf as a maximum, and 0 as a sum
    part_m = tl.load(m_ptr + j * count + numbers, mask=mask, other=-float("inf"))
    part_s = tl.load(s_ptr + j * count + numbers, mask=mask, other=0.0)
    m = tl.max(part_m, 1, keep_dims=True)
    base = tl.where(m == -float("inf"), 0.0, m)
    # Behind the mask, because the sum would absorb a bare product as a multiply-add. Each
    # lane would then round its own product differently, and lanes that differ by an ulp would
    # write to one word of shared memory.
    s = tl.sum(tl.where(mask, part_s * exp_shifted(part_m - base, 0.0), 0.0), 1, keep_dims=True)
    begin, end = segment_bounds(n, steps, ALIGN, VEC, BLOCK)
    _write(
        x_ptr, y_ptr, lines, valid, m, s, begin, end, rows,
        LOG, SHIFT, ROW_MAJOR, ALIGN, VEC, BLOCK,
    )  # fmt: skip


@cached_by_shape
def _forward(
    shape: tuple[int, ...], given: torch.dtype, dim: int, dtype: torch.dtype, log: bool
) -> Callable[[Tensor], Tensor]:
    """Return a function of a tensor of the shape ``shape`` and the dtype ``given``."""
    vec = WIDEST // max(given.itemsize, dtype.itemsize)
    t = tiling(shape, dim, dim, PER_THREAD, LONGEST, vec)
    # The hardware's exp2 flushes results below 2**-126 to zero, and bfloat16 has such results. The
    # shift keeps them above; the division by the sum, which is shifted alike, takes it out.
    shift = 64.0 if dtype is torch.bfloat16 and not log else 0.0
    # a grid of 0 programs is an invalid launch
    if t.lines * t.n == 0:
        return lambda x: torch.empty_like(x.contiguous(), dtype=dtype)
    result = dense(shape, dtype)
    if t.splits > 1:
        return _shared(t, result, log, shift)
    kernel = softmax_kernel if t.whole else softmax_long_kernel
    maxnreg = MAX_REGISTERS if t.whole and t.n % MAX_VECTOR == 0 and not log else None
    constants = log, shift, *t.layout
    launch = Launch(kernel, t.grid, t.sizes, constants, t.num_warps, maxnreg, results=(result,))
    return lambda x: launch(x.contiguous())[0]


def _shared(t: Tiling, result: Room, log: bool, shift: float) -> Callable[[Tensor], Tensor]:
    """Return the function of ``_forward`` for lines that several programs share."""
    sizes: tuple[int, ...] = *t.sizes, t.steps, t.lines
    splits = power_of_two(t.splits)
    # without zeros: every segment is written before it is read
    of_parts = (dense((t.splits, t.lines), torch.float32),) * 2
    constants: tuple[Any, ...] = shift, *t.layout
    part = Launch(softmax_part_kernel, t.grid, sizes, constants, t.num_warps, results=of_parts)
    constants, sizes = (log, shift, splits, *t.layout), (*sizes, t.splits)
    rest = Launch(softmax_rest_kernel, t.grid, sizes, constants, t.num_warps, results=(result,))

    def run(x: Tensor) -> Tensor:
        x = x.contiguous()
        return rest(x, *part(x))[0]

    return run


def softmax_prepared(
    x: Tensor, dim: int, dtype: torch.dtype, log: bool
) -> Callable[[Tensor], Tensor]:
    """Return a function that does ``softmax_triton`` on tensors of x's shape and dtype."""
    return _forward(x.shape, x.dtype, dim, dtype, log)


def softmax_triton(x: Tensor, dim: int, dtype: torch.dtype, log: bool) -> Tensor:
    return softmax_prepared(x, dim, dtype, log)(x)


def softmax_torch(x: Tensor, dim: int, dtype: torch.dtype, log: bool) -> Tensor:
    function = torch.log_softmax if log else torch.softmax
    return function(x.float(), dim).to(dtype)


def softmax(x: Tensor, dim: int, dtype: torch.dtype, log: bool, backend: str = "auto") -> Tensor:
    """Compute softmax or log_softmax along ``dim`` in FP32, rounded once.

    With e = exp(x - max), softmax is e / sum(e), and log_softmax is x - max - log(sum(e)).

    Args:
        x: float16, bfloat16 or float32, of any shape and strides.
        dim: dimension of the lines.
        dtype: dtype of the result, float16, bfloat16 or float32.
        log: True for log_softmax.
        backend: "auto", "triton" or "eager".
    """
    return SOFTMAX(backend, x, dim, dtype, log)


SOFTMAX = TraceableOp(
    softmax_triton,
    softmax_torch,
    [
        Sample(lambda x, dim: (x, dim, x.dtype, False), reads=2, writes=2, parts=2),
        Sample(
            lambda x, dim: (x, dim, torch.float32, True), reads=2, writes=4, parts=2, variant="log"
        ),
    ],
    prepared=softmax_prepared,
)


def shipped_cases() -> Iterator[tuple[str, tuple[int, ...], torch.dtype, torch.dtype]]:
    """Yield name, shape, dtype of the input and dtype of the result; FP32 means log_softmax.

    The cases cover the ranges of n, both memory orders, and the dtypes that the op policy and its
    options lead to.
    """
    half, bf16, wide = torch.float16, torch.bfloat16, torch.float32
    lengths = 32, 256, 512, 1024, 1000, 1001, 4096, 16384, 32768, 65536, 50257
    shapes: dict[str, tuple[int, ...]] = {f"n={n}": (4096, n) for n in lengths}
    shapes |= {"split": (8, 1 << 20), "inner": (64, 64, 4096), "long inner": (64, 4096, 4096)}
    shapes["split inner"] = 1, 2200, 8
    for case, shape in shapes.items():
        for dtype, result in ((half, half), (bf16, bf16), (half, wide)):
            name = build_name("log_softmax" if result is wide else "softmax", dtype, case)
            yield name, shape, dtype, result


def shipped() -> Iterator[Shipped]:
    """Yield the calls whose builds are checked."""
    for name, shape, dtype, result in shipped_cases():
        log = result is torch.float32
        args = torch.empty(shape, dtype=dtype, device="meta"), 1, result, log
        if log:  # stores twice as much; short lines take two vectors each
            yield Shipped(name, softmax_triton, args, 80 if shape[-1] > 512 else 96, 15, 1)
        else:
            yield Shipped(name, softmax_triton, args, 64, 12, 1 if shape[1] <= LONGEST else 2)
