"""Gradients of softmax and log_softmax from their outputs, in FP32. 6 B/element.

As in the forward, a program computes a tile of several short lines, a line in registers, or a line
that it reads twice; or several programs share a line.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._implementations import TraceableOp, line_sums
from tritonamp.kernels._launch import Launch, Room
from tritonamp.kernels._lines import (
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
from tritonamp.kernels._shipped import Shipped
from tritonamp.kernels.device import tl, triton
from tritonamp.kernels.softmax import exp_shifted, shipped_cases

PER_THREAD = 32  # elements that a thread holds
# line that registers hold, half as long as in the forward, because there are two inputs
LONGEST = 16384


@triton.jit
def _term(g, y, LOG: tl.constexpr):
    """Return the terms whose sum over a line the gradient needs."""
    return g if LOG else g * y


@triton.jit
def _gradient(g, y, total, LOG: tl.constexpr):
    # exp(y) is the softmax: the forward of log_softmax keeps its FP32 result alone
    return g - exp_shifted(y, 0.0) * total if LOG else y * (g - total)


@triton.jit
def _load(g_ptr, y_ptr, offs, mask, EVICT: tl.constexpr):
    g = tl.load(g_ptr + offs, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
    y = tl.load(y_ptr + offs, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
    return g, y


@triton.jit
def _total(
    g_ptr, y_ptr, lines, valid, begin, end, rows,
    LOG: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the sum of the terms of columns ``begin`` to ``end``, for each line."""
    total = tl.zeros([ROWS, 1], tl.float32)
    first, last = whole_vectors(begin, end, ALIGN, VEC)
    for at in range(first, last, BLOCK):
        columns, exist = column_offsets(at, last, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
        mask = valid & exist
        # evict_last, because the second pass reads both inputs again
        g, y = _load(g_ptr, y_ptr, lines + columns, mask, "evict_last")
        # products behind the mask, for the reason that softmax_rest_kernel gives
        total += tl.sum(tl.where(mask, _term(g, y, LOG), 0.0), 1, keep_dims=True)
    # edges that fill no vector are read separately, so that the loop above keeps its wide loads
    if ALIGN < VEC:
        edges, there = edge_offsets(begin, end, first, last, VEC)
        g, y = _load(g_ptr, y_ptr, lines + edges, there, "evict_last")
        total += tl.sum(tl.where(there, _term(g, y, LOG), 0.0), 1, keep_dims=True)
    return total


@triton.jit
def _write_tile(g_ptr, y_ptr, dx_ptr, offs, mask, total, LOG: tl.constexpr):
    # read for the last time, so that L2 keeps other lines
    g, y = _load(g_ptr, y_ptr, offs, mask, "evict_first")
    dx = _gradient(g, y, total, LOG).to(dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + offs, dx, mask=mask, eviction_policy="evict_first")


@triton.jit
def _write_gradient(
    g_ptr, y_ptr, dx_ptr, lines, valid, total, begin, end, rows,
    LOG: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write columns ``begin`` to ``end`` of the gradient, the last ones first, which L2 holds."""
    first, last = whole_vectors(begin, end, ALIGN, VEC)
    if ALIGN < VEC:
        edges, mask = edge_offsets(begin, end, first, last, VEC)
        _write_tile(g_ptr, y_ptr, dx_ptr, lines + edges, mask, total, LOG)
    for back in range(0, last - first, BLOCK):
        at = first + (last - first - 1) // BLOCK * BLOCK - back
        columns, exist = column_offsets(at, last, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
        _write_tile(g_ptr, y_ptr, dx_ptr, lines + columns, valid & exist, total, LOG)


@triton.jit(do_not_specialize=("rows", "n", "blocks"))
def softmax_backward_kernel(
    g_ptr, y_ptr, dx_ptr, rows, n, blocks,
    LOG: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute whole lines, which are held in registers."""
    lines, _, valid = line_offsets(tl.program_id(0), rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS)
    columns, exist = column_offsets(0, n, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
    offs, mask = lines + columns, valid & exist
    g, y = _load(g_ptr, y_ptr, offs, mask, "")
    # zeros where nothing exists: both forms of a term are then 0, and the sum needs no second mask
    terms = _term(g, y, LOG)
    # FP32 products behind the mask, for the reason that softmax_rest_kernel gives. There, half ones
    # of 1001 columns would take 31 instructions an element instead of 18.
    if g_ptr.dtype.element_ty == tl.float32 and not LOG:
        terms = tl.where(mask, terms, 0.0)
    dx = _gradient(g, y, tl.sum(terms, 1, keep_dims=True), LOG)
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("rows", "n", "blocks"))
def softmax_backward_long_kernel(
    g_ptr, y_ptr, dx_ptr, rows, n, blocks,
    LOG: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute lines that are too long for registers, which are read twice."""
    lines, _, valid = line_offsets(tl.program_id(0), rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS)
    begin = line_lead(tl.program_id(0), n, ALIGN, VEC)
    total = _total(
        g_ptr, y_ptr, lines, valid, begin, begin + n, rows, LOG, ROW_MAJOR, ALIGN, VEC, ROWS, BLOCK
    )
    _write_gradient(
        g_ptr, y_ptr, dx_ptr, lines, valid, total, begin, begin + n, rows,
        LOG, ROW_MAJOR, ALIGN, VEC, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=("rows", "n", "blocks", "steps", "count"))
def softmax_backward_part_kernel(
    g_ptr, y_ptr, total_ptr, rows, n, blocks, steps, count,
    LOG: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sum of each segment, [splits, count]: the first launch for shared lines."""
    lines, numbers, valid = line_offsets(
        tl.program_id(0), rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS
    )
    split = tl.program_id(1)
    begin, end = segment_bounds(n, steps, ALIGN, VEC, BLOCK)
    total = _total(
        g_ptr, y_ptr, lines, valid, begin, end, rows, LOG, ROW_MAJOR, ALIGN, VEC, ROWS, BLOCK
    )
    tl.store(total_ptr + split * count + numbers, total, mask=valid)


@triton.jit(do_not_specialize=("rows", "n", "blocks", "steps", "count", "splits"))
def softmax_backward_rest_kernel(
    g_ptr, y_ptr, total_ptr, dx_ptr, rows, n, blocks, steps, count, splits,
    LOG: tl.constexpr, SPLITS: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Combine the segments of each line and write one: the second launch for shared lines."""
    lines, numbers, valid = line_offsets(
        tl.program_id(0), rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS
    )
    j = tl.arange(0, SPLITS)[None, :]
    # in one order in every program of a line, so that all of them use the same total
    parts = tl.load(total_ptr + j * count + numbers, mask=valid & (j < splits), other=0.0)
    total = tl.sum(parts, 1, keep_dims=True)
    begin, end = segment_bounds(n, steps, ALIGN, VEC, BLOCK)
    _write_gradient(
        g_ptr, y_ptr, dx_ptr, lines, valid, total, begin, end, rows,
        LOG, ROW_MAJOR, ALIGN, VEC, BLOCK,
    )  # fmt: skip


def _backward_tiling(shape: Sequence[int], dim: int, vec: int) -> Tiling:
    """Return the tiling for two inputs."""
    rank, per_thread = max(len(shape), 1), PER_THREAD
    n = shape[dim % rank] if shape else 1
    # Loops over two inputs take registers, and so do the addresses of columns. With all elements of
    # the forward, a thread would spill.
    if n > LONGEST or dim % rank != rank - 1:
        per_thread //= 2
    return tiling(shape, dim, dim, per_thread, LONGEST, vec)


@cached_by_shape
def _backward(
    shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], dim: int, log: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of contiguous gradients and outputs of one shape.

    ``dtypes`` are those of the incoming gradient, the output and the result.
    """
    _, _, dtype = dtypes
    t = _backward_tiling(shape, dim, WIDEST // max(each.itemsize for each in dtypes))
    # a grid of 0 programs is an invalid launch
    if t.lines * t.n == 0:
        return lambda grad, y: torch.empty_like(y, dtype=dtype)
    result = dense(shape, dtype)
    if t.splits > 1:
        return _shared(t, result, log)
    kernel = softmax_backward_kernel if t.whole else softmax_backward_long_kernel
    constants = log, *t.layout
    launch = Launch(kernel, t.grid, t.sizes, constants, t.num_warps, results=(result,))
    return lambda grad, y: launch(grad, y)[0]


def _shared(t: Tiling, result: Room, log: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function of ``_backward`` for lines that several programs share."""
    sizes: tuple[int, ...] = *t.sizes, t.steps, t.lines
    splits = power_of_two(t.splits)
    # no zeros needed: every segment is written before the second launch reads it
    totals = dense((t.splits, t.lines), torch.float32)
    constants: tuple[Any, ...] = log, *t.layout
    part = Launch(
        softmax_backward_part_kernel, t.grid, sizes, constants, t.num_warps, results=(totals,)
    )
    constants, sizes = (log, splits, *t.layout), (*sizes, t.splits)
    rest = Launch(
        softmax_backward_rest_kernel, t.grid, sizes, constants, t.num_warps, results=(result,)
    )
    return lambda grad, y: rest(grad, y, *part(grad, y))[0]


def softmax_backward_triton(
    grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype, log: bool
) -> Tensor:
    run = _backward(y.shape, (grad.dtype, y.dtype, dtype), dim, log)
    return run(grad.contiguous(), y.contiguous())


def softmax_backward_torch(
    grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype, log: bool
) -> Tensor:
    g, y = grad.float(), y.float()
    if log:
        return (g - y.exp() * line_sums(g, dim, keepdim=True)).to(dtype)
    return (y * (g - line_sums(g * y, dim, keepdim=True))).to(dtype)


def softmax_backward(
    grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype, log: bool, backend: str = "auto"
) -> Tensor:
    """Compute the gradient of ``softmax`` from its output, in FP32, rounded once to ``dtype``.

    The gradient of softmax is y * (grad - sum(grad * y)), that of log_softmax grad - exp(y) *
    sum(grad).

    Args:
        grad: gradient of the output, float16, bfloat16 or float32, of the shape of ``y``.
        y: the output, float16, bfloat16 or float32, of any shape and strides.
        dim: dimension of the lines.
        dtype: dtype of the result.
        log: True for log_softmax.
        backend: "auto", "triton" or "eager".
    """
    return SOFTMAX_BACKWARD(backend, grad, y, dim, dtype, log)


def _sample(reads: int, variant: str, args: Callable[[Tensor, int], tuple[Any, ...]]) -> Sample:
    return Sample(args, reads, writes=2, parts=1, any_order=True, variant=variant)


SOFTMAX_BACKWARD = TraceableOp(
    softmax_backward_triton,
    softmax_backward_torch,
    [
        _sample(4, "", lambda g, dim: (g, g.abs(), dim, g.dtype, False)),
        _sample(4, "log", lambda g, dim: (g, -g.abs(), dim, g.dtype, True)),
        _sample(
            8, "log of float32", lambda g, dim: (g.float(), -g.abs().float(), dim, g.dtype, True)
        ),
    ],
)


def shipped() -> Iterator[Shipped]:
    """Yield the calls whose builds are checked, for the forward's cases."""
    for name, shape, dtype, result in shipped_cases():
        y = torch.empty(shape, dtype=result, device="meta")
        log = result is torch.float32
        # a tile of several short FP32 lines is loaded at once, before anything is computed
        registers = 120 if log and shape[-1] <= 512 else 96
        args = y, y, 1, dtype, log
        yield Shipped(f"{name} backward", softmax_backward_triton, args, registers, 10, int(log))
