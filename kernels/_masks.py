"""Masks of attention scores in kernels: addresses of masks, and the ends of causal lines."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tritonamp.kernels._by_length import is_by_length
from tritonamp.kernels._lines import MAX_VECTOR, Tiling, tiling
from tritonamp.kernels.device import tl, triton

SHORT_LINE = 512  # line of which a program computes several
MOST_DIMS = 4  # dimensions of lines, after neighbours are merged; (batch, window, head, query)


class MaskLayout(NamedTuple):
    """Addresses of a mask that broadcasts over lines, computed from shapes and strides.

    Lines are numbered along up to ``MOST_DIMS`` dimensions. A stride is 0 where lines share a mask.

    Attributes:
        sizes: sizes of the dimensions, the innermost first, except the outermost.
        strides: strides of the mask along the dimensions, the innermost first.
        dims: number of dimensions; 0 if there is no mask.
        step: distance of neighbours in a line: 1, or 0 if a line has one value.
        vec: power of two that divides the distances between lines.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dims: int
    step: int
    vec: int


NO_MASK = MaskLayout((1,) * (MOST_DIMS - 1), (0,) * MOST_DIMS, 0, 0, 1)


def mask_layout(shape: Sequence[int], mask: Tensor | None) -> MaskLayout | None:
    """Return the layout of a mask, or None if kernels need a copy by ``addressable`` instead.

    Args:
        shape: shape of the scores.
        mask: tensor that broadcasts to ``shape``; None: there is no mask.
    """
    if mask is None:
        return NO_MASK
    missing = len(shape) - mask.dim()
    given = *(1,) * missing, *mask.shape
    strides = [
        0 if size != whole else stride
        for size, whole, stride in zip(given, shape, (*(0,) * missing, *mask.stride()), strict=True)
    ]
    step = strides[-1] if shape and shape[-1] > 1 else 0
    merged: list[tuple[int, int]] = [(1, 0)]
    for size, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        inner, distance = merged[-1]
        if inner == 1:
            merged[-1] = size, stride
        elif size > 1 and stride == inner * distance:
            merged[-1] = inner * size, distance
        elif size > 1:
            merged.append((size, stride))
    dims = len(merged)
    if step not in (0, 1) or dims > MOST_DIMS:
        return None
    merged += [(1, 0)] * (MOST_DIMS - dims)
    # by length, whatever the mask's shape
    vec = 1 if is_by_length() else math.gcd(MAX_VECTOR, *(stride for _, stride in merged))
    sizes = tuple(size for size, _ in merged[:-1])
    return MaskLayout(sizes, tuple(stride for _, stride in merged), dims, step, vec)


def addressable(shape: Sequence[int], mask: Tensor) -> Tensor:
    """Return a contiguous copy of a mask, expanded to ``shape``."""
    return mask.expand(tuple(shape)).contiguous()


def line_tiling(shape: tuple[int, ...], per_thread: int, longest: int, vec: int) -> Tiling:
    """Return a tiling for lines along the last dimension, in which no line has two programs.

    Args:
        shape: shape of the scores.
        per_thread: elements that a thread holds; half as many in short and in long lines.
        longest: longest line that a program holds in its registers.
        vec: elements that a thread accesses at once, 16 bytes of the widest dtype.
    """
    n = shape[-1] if shape else 1
    # Masks of columns take registers, and so do the addresses of several lines or of a loop. On
    # AMD GPUs they are scalar ones, of which there are few.
    if not SHORT_LINE < n <= longest:
        per_thread //= 2
    t = tiling(shape, -1, -1, per_thread, longest, vec)
    row_major, align, vec, lines, block = t.layout
    # a vector that does not divide the line is left to softmax, whose loops load edges one by one
    layout = row_major, align, min(vec, align), lines, block
    return t._replace(splits=1, grid=(t.grid[0], 1, 1), layout=layout)


@triton.jit
def mask_offsets(
    numbers, size0, size1, size2, stride0, stride1, stride2, stride3,
    DIMS: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Return the offsets of the masks of lines, [ROWS, 1]; int64."""
    # quotients in 32 bits unless there are more lines, because those of 64 bits take four times as
    # many instructions; products in 64 bits
    if DIMS == 1:
        offs = numbers.to(tl.int64) * stride0
    else:
        rest = numbers // size0
        offs = (numbers - rest * size0).to(tl.int64) * stride0
        if DIMS > 2:
            further = rest // size1
            offs += (rest - further * size1).to(tl.int64) * stride1
            rest = further
            if DIMS > 3:
                further = rest // size2
                offs += (rest - further * size2).to(tl.int64) * stride2
                offs += further.to(tl.int64) * stride3
            else:
                offs += rest.to(tl.int64) * stride2
        else:
            offs += rest.to(tl.int64) * stride1
    return offs // VEC * VEC  # tells the compiler that loads may be vectors


@triton.jit
def causal_ends(numbers, queries, n, CAUSAL: tl.constexpr):
    """Return the end of each line's columns up to the diagonal, [ROWS, 1]; ``n`` if not CAUSAL.

    The diagonal ends in the lower right corner of [queries, n]. A line without columns ends at 0.
    """
    if CAUSAL:
        return tl.maximum(numbers % queries + 1 + n - queries, 0)
    else:
        return tl.full([1, 1], 0, tl.int32) + n


@triton.jit
def columns_before(ends, columns, exist, VEC: tl.constexpr, CAUSAL: tl.constexpr):
    """Return masks [ROWS, BLOCK] of the columns to read and of the columns before ``ends``."""
    if CAUSAL:
        # A mask that ends inside a vector would split its load, so whole vectors are read.
        return exist & (columns < (ends + VEC - 1) // VEC * VEC), exist & (columns < ends)
    else:
        return exist, exist


@triton.jit
def masked_scores(
    x, mask_ptr, masks, valid, columns, read, kept, scale, fill,
    FIRST: tl.constexpr, KEEP: tl.constexpr, FILL: tl.constexpr, ROUND: tl.constexpr,
    HALF: tl.constexpr, DIMS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return the scores of a tile x in FP32, and masks of its columns.

    The first mask has columns with a score other than -inf, the second has those that count. They
    differ if columns that a mask excludes have the score ``fill``. Scores are scaled if FIRST, and
    rounded to their dtype HALF after each step if ROUND.
    """
    if FIRST:
        x *= scale
        x = x.to(HALF).to(tl.float32) if ROUND else x
    counted = kept
    if DIMS > 0:
        if STEP == 0:
            given = tl.load(mask_ptr + masks, mask=valid, other=0)
        else:
            given = tl.load(mask_ptr + masks + columns, mask=read, other=0)
        if mask_ptr.dtype.element_ty.is_floating():
            given = given.to(tl.float32)
            x += given
            x = x.to(HALF).to(tl.float32) if ROUND and mask_ptr.dtype.element_ty == HALF else x
            # a NaN or infinite x keeps its column: the sum is then NaN, as in torch
            counted &= (given != -float("inf")) | (x != -float("inf"))
        else:
            counted &= (given != 0) == KEEP
    if FILL:
        x = tl.where(counted, x, fill)
    else:
        kept = counted
    return tl.where(kept, x, -float("inf")), kept, counted


@triton.jit
def reciprocal(s, empty, ZERO: tl.constexpr):
    """Return 1 / s; 0 for lines that are ``empty`` if ZERO."""
    return tl.where(empty, 0.0, 1 / s) if ZERO else 1 / s


@triton.jit
def no_columns(mask):
    """Return whether a mask has no column of a line, [ROWS, 1]."""
    return tl.max(mask.to(tl.int32), 1, keep_dims=True) == 0
