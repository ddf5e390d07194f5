"""Masks of attention scores in kernels: where a line's mask lies, and where a causal line ends."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tritonamp.kernels._lines import MAX_VECTOR
from tritonamp.kernels.device import tl, triton

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
    """Return the layout of a mask for scores of a shape, or None if kernels cannot address it.

    A copy with ``addressable`` is then needed.
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
    vec = math.gcd(MAX_VECTOR, *(stride for _, stride in merged))
    sizes = tuple(size for size, _ in merged[:-1])
    return MaskLayout(sizes, tuple(stride for _, stride in merged), dims, step, vec)


def addressable(shape: Sequence[int], mask: Tensor) -> Tensor:
    """Return a contiguous copy of a mask, which is not broadcast."""
    return mask.expand(tuple(shape)).contiguous()


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
