"""softmax of scaled and masked scores along the last dimension: half storage, FP32 arithmetic.

4 B/element and the mask, once. As in ``softmax``, a program computes a tile of several short lines,
a line in registers, or a line that it reads twice. Under a causal mask nothing above the diagonal
is read.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._implementations import TraceableOp
from tritonamp.kernels._launch import Launch
from tritonamp.kernels._lines import (
    WIDEST,
    cached_by_shape,
    column_offsets,
    dense,
    dtype_of,
    line_offsets,
)
from tritonamp.kernels._masks import (
    MaskLayout,
    addressable,
    causal_ends,
    columns_before,
    line_tiling,
    mask_layout,
    mask_offsets,
    masked_scores,
    no_columns,
    reciprocal,
)
from tritonamp.kernels._sample import Sample
from tritonamp.kernels._shipped import Shipped, build_name
from tritonamp.kernels.device import tl, triton

PER_THREAD = 32  # elements that a thread holds
LONGEST = 32768  # line that registers hold
INF = float("inf")
LOG2_E = math.log2(math.e)

_SIZES = (
    "rows", "n", "blocks", "queries", "scale", "factor", "fill",
    "size0", "size1", "size2", "stride0", "stride1", "stride2", "stride3",
)  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def masked_softmax_kernel(
    x_ptr, mask_ptr, y_ptr, rows, n, blocks, queries, scale, factor, fill,
    size0, size1, size2, stride0, stride1, stride2, stride3,
    SHIFT: tl.constexpr, FIRST: tl.constexpr, CAUSAL: tl.constexpr, KEEP: tl.constexpr,
    FILL: tl.constexpr, ZERO: tl.constexpr, ROUND: tl.constexpr, DIMS: tl.constexpr,
    STEP: tl.constexpr, MASK_VEC: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute whole lines, which are held in registers."""
    lines, numbers, valid = line_offsets(
        tl.program_id(0), rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS
    )
    numbers = numbers.to(rows.dtype)
    columns, exist = column_offsets(0, n, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
    exist = valid & exist
    ends = causal_ends(numbers, queries, n, CAUSAL)
    read, kept = columns_before(ends, columns, exist, VEC, CAUSAL)
    x = tl.load(x_ptr + lines + columns, mask=read, other=0.0).to(tl.float32)
    # after the load, because quotients take a while
    masks = mask_offsets(
        numbers, size0, size1, size2, stride0, stride1, stride2, stride3, DIMS, MASK_VEC
    )
    x, kept, counted = masked_scores(
        x, mask_ptr, masks, valid, columns, read, kept, scale, fill,
        FIRST, KEEP, FILL, ROUND, x_ptr.dtype.element_ty, DIMS, STEP,
    )  # fmt: skip
    m = tl.max(x, 1, keep_dims=True)
    # The difference is scaled, not the scores, because a product would round large scores. If no
    # column counts, it is NaN.
    e = tl.where(kept, tl.exp2((x - m) * factor + SHIFT), 0.0)
    s = tl.sum(e, 1, keep_dims=True)
    # without ``fill``, the largest term of a line that is not empty is 1
    empty = no_columns(counted) if FILL else s == 0
    y = e * reciprocal(s, empty, ZERO)
    tl.store(y_ptr + lines + columns, y.to(y_ptr.dtype.element_ty), mask=exist)


@triton.jit(do_not_specialize=_SIZES)
def masked_softmax_long_kernel(
    x_ptr, mask_ptr, y_ptr, rows, n, blocks, queries, scale, factor, fill,
    size0, size1, size2, stride0, stride1, stride2, stride3,
    SHIFT: tl.constexpr, FIRST: tl.constexpr, CAUSAL: tl.constexpr, KEEP: tl.constexpr,
    FILL: tl.constexpr, ZERO: tl.constexpr, ROUND: tl.constexpr, DIMS: tl.constexpr,
    STEP: tl.constexpr, MASK_VEC: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute lines that are too long for registers, which are read twice."""
    lines, numbers, valid = line_offsets(
        tl.program_id(0), rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS
    )
    numbers = numbers.to(rows.dtype)
    masks = mask_offsets(
        numbers, size0, size1, size2, stride0, stride1, stride2, stride3, DIMS, MASK_VEC
    )
    ends = causal_ends(numbers, queries, n, CAUSAL)
    end = tl.max(ends)  # no column after it is read
    m = tl.full([ROWS, 1], -float("inf"), tl.float32)
    s = tl.zeros([ROWS, 1], tl.float32)
    empty = tl.full([ROWS, 1], True, tl.int1)
    for at in range(0, end, BLOCK):
        columns, exist = column_offsets(at, n, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
        read, kept = columns_before(ends, columns, valid & exist, VEC, CAUSAL)
        x = tl.load(x_ptr + lines + columns, mask=read, other=0.0).to(tl.float32)
        x, kept, counted = masked_scores(
            x, mask_ptr, masks, valid, columns, read, kept, scale, fill,
            FIRST, KEEP, FILL, ROUND, x_ptr.dtype.element_ty, DIMS, STEP,
        )  # fmt: skip
        largest = tl.maximum(m, tl.max(x, 1, keep_dims=True))
        # if a line is all -inf so far, x - m would be NaN
        base = tl.where(largest == -float("inf"), 0.0, largest)
        e = tl.where(kept, tl.exp2((x - base) * factor + SHIFT), 0.0)
        s = s * tl.exp2((m - base) * factor) + tl.sum(e, 1, keep_dims=True)
        empty &= no_columns(counted)
        m = largest
    inv = reciprocal(s, empty, ZERO)
    # the last columns first, which L2 holds
    for back in range(0, end, BLOCK):
        at = (end - 1) // BLOCK * BLOCK - back
        columns, exist = column_offsets(at, n, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
        exist = valid & exist
        read, kept = columns_before(ends, columns, exist, VEC, CAUSAL)
        x = tl.load(x_ptr + lines + columns, mask=read, other=0.0).to(tl.float32)
        x, kept, counted = masked_scores(
            x, mask_ptr, masks, valid, columns, read, kept, scale, fill,
            FIRST, KEEP, FILL, ROUND, x_ptr.dtype.element_ty, DIMS, STEP,
        )  # fmt: skip
        y = tl.where(kept, tl.exp2((x - m) * factor + SHIFT), 0.0) * inv
        tl.store(y_ptr + lines + columns, y.to(y_ptr.dtype.element_ty), mask=exist)
    for at in range((end + BLOCK - 1) // BLOCK * BLOCK, n, BLOCK):  # above the diagonal
        columns, exist = column_offsets(at, n, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
        y = tl.zeros([ROWS, BLOCK], tl.float32) * inv
        tl.store(y_ptr + lines + columns, y.to(y_ptr.dtype.element_ty), mask=valid & exist)


@cached_by_shape
def _forward(
    shape: tuple[int, ...],
    given: torch.dtype,
    mask_dtype: torch.dtype | None,
    layout: MaskLayout,
    scale: float,
    causal: bool,
    dtype: torch.dtype,
    keep: bool,
    fill: float,
    zero: bool,
    rounds: bool,
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of contiguous scores of a shape, and of a mask with a layout."""
    adds = mask_dtype is not None and mask_dtype.is_floating_point
    widest = max(each.itemsize for each in (given, dtype, mask_dtype) if each is not None)
    t = line_tiling(shape, PER_THREAD, LONGEST, WIDEST // widest)
    # a grid of 0 programs is an invalid launch
    if t.lines * t.n == 0:
        return lambda x, mask: torch.empty_like(x, dtype=dtype)
    # as in softmax: keeps results of bfloat16 above those that exp2 flushes to zero
    shift = 64.0 if dtype is torch.bfloat16 else 0.0
    fills = layout.dims > 0 and not adds and fill > -INF
    # Scaling the differences of scores keeps FP32's digits of large scores, too. It is not possible
    # if the mask or ``fill`` is on the scale of the products, if products are rounded, if the scale
    # is negative, or if it is so extreme that its product with an infinity would be NaN.
    first = adds or fills or rounds or not 2.0**-64 < scale < 2.0**64
    factor = LOG2_E if first else scale * LOG2_E
    queries = shape[-2] if causal else 1
    sizes = *t.sizes, queries, scale, factor, fill, *layout.sizes, *layout.strides
    how = shift, first, causal, keep, fills, zero, rounds
    constants = *how, layout.dims, layout.step, layout.vec, *t.layout
    kernel = masked_softmax_kernel if t.whole else masked_softmax_long_kernel
    results = (dense(shape, dtype),)
    launch = Launch(kernel, t.grid, sizes, constants, t.num_warps, results=results)
    return lambda x, mask: launch(x, mask)[0]


def masked_softmax_prepared(
    x: Tensor, mask: Tensor | None, *how: Any
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return a function that does ``masked_softmax_triton`` on tensors of the same layout.

    Args:
        x: scores with that layout.
        mask: mask with that layout, or None.
        how: the other arguments of ``masked_softmax_triton``.
    """
    layout, copies = mask_layout(x.shape, mask), False
    if layout is None and mask is not None:
        layout, copies = mask_layout(x.shape, addressable(x.shape, mask)), True
    assert layout is not None
    run = _forward(x.shape, x.dtype, dtype_of(mask), layout, *how)

    def prepared(x: Tensor, mask: Tensor | None) -> Tensor:
        x = x.contiguous()
        # a kernel's pointer has to be valid, also where nothing is loaded
        given = x if mask is None else addressable(x.shape, mask) if copies else mask
        return run(x, given)

    return prepared


def masked_softmax_triton(
    x: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    dtype: torch.dtype,
    keep: bool,
    fill: float,
    zero: bool,
    rounds: bool,
) -> Tensor:
    return masked_softmax_prepared(x, mask, scale, causal, dtype, keep, fill, zero, rounds)(x, mask)


def masked_softmax_torch(
    x: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    dtype: torch.dtype,
    keep: bool,
    fill: float,
    zero: bool,
    rounds: bool,
) -> Tensor:
    def rounded(scores: Tensor) -> Tensor:
        return scores.to(x.dtype).to(scores.dtype) if rounds else scores

    scores = rounded(x.to(torch.promote_types(x.dtype, torch.float32)) * scale)
    dropped = torch.zeros((), dtype=torch.bool, device=x.device)
    if mask is not None and mask.dtype is torch.bool:
        dropped = ~mask if keep else mask
        scores = scores.masked_fill(dropped, fill)
    elif mask is not None:
        scores = scores + mask.to(scores.dtype)
        scores = rounded(scores) if mask.dtype is x.dtype else scores
        dropped = (mask == -INF) & (scores == -INF)
    if causal:
        queries, keys = x.shape[-2:]
        above = torch.ones(queries, keys, dtype=torch.bool, device=x.device)
        above = above.triu(keys - queries + 1)
        scores, dropped = scores.masked_fill(above, -INF), dropped | above
    if not zero:
        return scores.softmax(-1).to(dtype)
    # softmax of scores that are all -inf would be NaN, and so would its gradient
    empty = dropped.expand(scores.shape).all(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0).to(dtype)


def masked_softmax(
    x: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    dtype: torch.dtype,
    keep: bool,
    fill: float,
    zero: bool,
    rounds: bool,
    backend: str = "auto",
) -> Tensor:
    """Compute softmax of ``x * scale`` under masks along the last dimension, rounded once.

    The mask is added in FP32. Query i of Q sees key j of K under a causal mask if j <= i + K - Q.

    Args:
        x: float16, bfloat16 or float32, of any shape and strides.
        mask: None; bool; or float16, bfloat16 or float32, to be added. It broadcasts to ``x``.
        scale: factor of ``x``.
        causal: whether columns above the diagonal of the last two dimensions are masked out.
        dtype: dtype of the result, float16, bfloat16 or float32.
        keep: value of a boolean mask in columns that count.
        fill: score of columns that a boolean mask excludes.
        zero: whether a line without a column that counts is 0; else it is torch's result.
        rounds: whether scaled scores, and sums with a mask of the dtype of ``x``, are rounded to
            that dtype, as separate operations round them.
        backend: "auto", "triton" or "eager".
    """
    return MASKED_SOFTMAX(backend, x, mask, scale, causal, dtype, keep, fill, zero, rounds)


def _sample(variant: str, mask: Callable[[Tensor], Tensor | None]) -> Sample:
    def args(x: Tensor, dim: int) -> tuple[Any, ...]:
        lines = x.movedim(dim, -1)
        return lines, mask(lines), 0.5, False, x.dtype, True, -INF, True, False

    return Sample(args, any_order=True, rows_only=True, variant=variant)


MASKED_SOFTMAX = TraceableOp(
    masked_softmax_triton,
    masked_softmax_torch,
    [
        _sample("bool", lambda x: torch.arange(x.shape[-1], device=x.device) % 3 != 1),
        _sample("added", lambda x: torch.linspace(-1, 1, x.numel(), device=x.device).view(x.shape)),
    ],
    prepared=masked_softmax_prepared,
)


def shipped_cases() -> Iterator[tuple[str, Tensor, Tensor | None, bool]]:
    """Yield name, scores, mask and whether the mask is causal."""
    half, bf16 = torch.float16, torch.bfloat16
    cases = [("causal", half, n) for n in (128, 1024, 65536)]
    cases += [("bool", half, 1000), ("bool", half, 1024), ("bool", bf16, 128)]
    cases += [("added", bf16, n) for n in (128, 4096, 65536)]
    for kind, dtype, n in cases:
        x = torch.empty(4, 8, 128, n, dtype=dtype, device="meta")
        mask = torch.empty(4, 1, 128, n, dtype=torch.bool, device="meta")
        given = {"causal": None, "bool": mask, "added": mask.to(dtype)}[kind]
        yield build_name("masked_softmax", dtype, kind, f"n={n}"), x, given, kind == "causal"


def shipped() -> Iterator[Shipped]:
    """Yield the calls whose builds are checked."""
    for name, x, mask, causal in shipped_cases():
        args = x, mask, 0.125, causal, x.dtype, True, -INF, True, False
        exp2 = 1 if x.shape[-1] <= LONGEST else 2
        yield Shipped(name, masked_softmax_triton, args, 96, 20, exp2)
    for dtype in (torch.float16, torch.bfloat16):  # as written-out scores are computed
        x = torch.empty(4, 8, 128, 1024, dtype=dtype, device="meta")
        args = x, x[:, :1], 0.125, False, dtype, True, -INF, False, True
        name = build_name("masked_softmax", dtype, "rounded", "n=1024")
        yield Shipped(name, masked_softmax_triton, args, 96, 22, 1)  # two roundings
