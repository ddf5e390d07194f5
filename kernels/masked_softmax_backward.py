"""Gradient of masked softmax from its output, in FP32. 6 B/element.

The output is 0 where a mask excludes a column, so that the gradient needs no mask. Under a causal
mask nothing above the diagonal is read.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._implementations import TraceableOp, line_sums
from tritonamp.kernels._launch import Launch
from tritonamp.kernels._lines import WIDEST, cached_by_shape, column_offsets, dense, line_offsets
from tritonamp.kernels._masks import causal_ends, columns_before, line_tiling
from tritonamp.kernels._sample import Sample
from tritonamp.kernels._shipped import Shipped
from tritonamp.kernels.device import tl, triton
from tritonamp.kernels.masked_softmax import shipped_cases

PER_THREAD = 32  # elements that a thread holds
# line that registers hold, half as long as in the forward, because there are two inputs
LONGEST = 16384


@triton.jit
def _load(g_ptr, y_ptr, offs, read, kept):
    g = tl.load(g_ptr + offs, mask=read, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + offs, mask=read, other=0.0).to(tl.float32)
    # y is 0 in the columns that fill the last vector, but their g may be infinite
    return tl.where(kept, g, 0.0), y


@triton.jit(do_not_specialize=("rows", "n", "blocks", "queries", "scale"))
def masked_softmax_backward_kernel(
    g_ptr, y_ptr, dx_ptr, rows, n, blocks, queries, scale,
    CAUSAL: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute whole lines, which are held in registers."""
    lines, numbers, valid = line_offsets(
        tl.program_id(0), rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS
    )
    columns, exist = column_offsets(0, n, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
    exist = valid & exist
    ends = causal_ends(numbers.to(rows.dtype), queries, n, CAUSAL)
    read, kept = columns_before(ends, columns, exist, VEC, CAUSAL)
    g, y = _load(g_ptr, y_ptr, lines + columns, read, kept)
    terms = g * y
    # FP32 products behind the mask, for the reason that softmax_rest_kernel gives; half ones would
    # take too many registers
    if g_ptr.dtype.element_ty == tl.float32:
        terms = tl.where(kept, terms, 0.0)
    dx = y * (g - tl.sum(terms, 1, keep_dims=True)) * scale
    tl.store(dx_ptr + lines + columns, dx.to(dx_ptr.dtype.element_ty), mask=exist)


@triton.jit(do_not_specialize=("rows", "n", "blocks", "queries", "scale"))
def masked_softmax_backward_long_kernel(
    g_ptr, y_ptr, dx_ptr, rows, n, blocks, queries, scale,
    CAUSAL: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute lines that are too long for registers, which are read twice."""
    lines, numbers, valid = line_offsets(
        tl.program_id(0), rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS
    )
    ends = causal_ends(numbers.to(rows.dtype), queries, n, CAUSAL)
    end = tl.max(ends)  # no column after it is read
    total = tl.zeros([ROWS, 1], tl.float32)
    for at in range(0, end, BLOCK):
        columns, exist = column_offsets(at, n, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
        read, kept = columns_before(ends, columns, valid & exist, VEC, CAUSAL)
        g, y = _load(g_ptr, y_ptr, lines + columns, read, kept)
        # products behind the mask, for the reason that softmax_rest_kernel gives
        total += tl.sum(tl.where(kept, g * y, 0.0), 1, keep_dims=True)
    # the last columns first, which L2 holds
    for back in range(0, end, BLOCK):
        at = (end - 1) // BLOCK * BLOCK - back
        columns, exist = column_offsets(at, n, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
        exist = valid & exist
        read, kept = columns_before(ends, columns, exist, VEC, CAUSAL)
        g, y = _load(g_ptr, y_ptr, lines + columns, read, kept)
        dx = y * (g - total) * scale
        tl.store(dx_ptr + lines + columns, dx.to(dx_ptr.dtype.element_ty), mask=exist)
    for at in range((end + BLOCK - 1) // BLOCK * BLOCK, n, BLOCK):  # above the diagonal
        columns, exist = column_offsets(at, n, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
        dx = tl.zeros([ROWS, BLOCK], tl.float32) * (total * scale)
        tl.store(dx_ptr + lines + columns, dx.to(dx_ptr.dtype.element_ty), mask=valid & exist)


@cached_by_shape
def _backward(
    shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], scale: float, causal: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of contiguous gradients and outputs of one shape.

    ``dtypes`` are those of the incoming gradient, the output and the result.
    """
    dtype = dtypes[-1]
    t = line_tiling(shape, PER_THREAD, LONGEST, WIDEST // max(each.itemsize for each in dtypes))
    # a grid of 0 programs is an invalid launch
    if t.lines * t.n == 0:
        return lambda grad, y: torch.empty_like(y, dtype=dtype)
    sizes = *t.sizes, shape[-2] if causal else 1, scale
    kernel = masked_softmax_backward_kernel if t.whole else masked_softmax_backward_long_kernel
    results = (dense(shape, dtype),)
    launch = Launch(kernel, t.grid, sizes, (causal, *t.layout), t.num_warps, results=results)
    return lambda grad, y: launch(grad, y)[0]


def masked_softmax_backward_triton(
    grad: Tensor, y: Tensor, scale: float, causal: bool, dtype: torch.dtype
) -> Tensor:
    run = _backward(y.shape, (grad.dtype, y.dtype, dtype), scale, causal)
    return run(grad.contiguous(), y.contiguous())


def masked_softmax_backward_torch(
    grad: Tensor, y: Tensor, scale: float, causal: bool, dtype: torch.dtype
) -> Tensor:
    g, y = grad.float(), y.float()
    if causal:  # an infinite gradient above the diagonal has no effect, because it is not read
        g = g.tril(y.shape[-1] - y.shape[-2])
    return (y * (g - line_sums(g * y, -1, keepdim=True)) * scale).to(dtype)


def masked_softmax_backward(
    grad: Tensor, y: Tensor, scale: float, causal: bool, dtype: torch.dtype, backend: str = "auto"
) -> Tensor:
    """Compute the gradient of ``masked_softmax`` from its output, in FP32, rounded once.

    The gradient is scale * y * (grad - sum(grad * y)).

    Args:
        grad: gradient of the output, float16, bfloat16 or float32, of the shape of ``y``.
        y: the output, float16, bfloat16 or float32, of any shape and strides.
        scale: factor of the forward's input.
        causal: whether ``y`` is 0 above the diagonal of the last two dimensions, where ``grad``
            then has no effect.
        dtype: dtype of the result.
        backend: "auto", "triton" or "eager".
    """
    return MASKED_SOFTMAX_BACKWARD(backend, grad, y, scale, causal, dtype)


def _sample(causal: bool) -> Sample:
    def args(g: Tensor, dim: int) -> tuple[Any, ...]:
        lines = g.movedim(dim, -1)
        if not causal or lines.dim() == 1:
            return lines, lines.abs(), 0.5, False, g.dtype
        return lines, lines.abs().tril(lines.shape[-1] - lines.shape[-2]), 0.5, True, g.dtype

    if causal:
        return Sample(args, any_order=True, rows_only=True, variant="causal")
    return Sample(args, reads=4, writes=2, any_order=True, rows_only=True)


MASKED_SOFTMAX_BACKWARD = TraceableOp(
    masked_softmax_backward_triton,
    masked_softmax_backward_torch,
    [_sample(causal) for causal in (False, True)],
)


def shipped() -> Iterator[Shipped]:
    """Yield the calls whose builds are checked, for the forward's cases."""
    for name, x, mask, causal in shipped_cases():
        if mask is None or mask.dtype is torch.bool:  # the others are the same kernels
            args = x, x, 0.125, causal, x.dtype
            yield Shipped(f"{name} backward", masked_softmax_backward_triton, args, 96, 16, 0)
