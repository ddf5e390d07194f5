"""Gradients of group_norm from its input, in FP32. 6 B/element.

With h = (x - mean) * rstd and g = grad * weight, and means over a line, which is a group of an
image,

    dx = rstd * (g - mean(g) - h * mean(g * h)),  dweight = sum(grad * h),  dbias = sum(grad)

where the last two sums are over images and places. A program processes the same groups of
neighbouring images, and keeps FP32 sums. The number of programs depends on the shape alone, so that
every GPU gives the same bits; another launch adds up their sums. A long line is read twice, the
second time from L2, and leaves sums over its places.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels import group_norm as _group_norm
from tritonamp.kernels import reduce
from tritonamp.kernels._group_norms import (
    known_to_divide,
    memory_format,
    of_channels,
    sum_of_lines,
    tile_lines,
    tile_offsets,
    tile_start,
    walk,
)
from tritonamp.kernels._implementations import TraceableOp, line_sums
from tritonamp.kernels._launch import Launch
from tritonamp.kernels._lines import cached_by_shape, contiguous_or, dense
from tritonamp.kernels._norms import input_gradient, load_gradients, load_stats
from tritonamp.kernels._sample import Sample
from tritonamp.kernels._shipped import Shipped
from tritonamp.kernels.device import tl, triton

PER_THREAD = 8  # elements that a thread holds of four tiles
LONGEST = 8192  # line that registers hold
MAX_REGISTERS = 96  # in a loop with many addresses, where ptxas without a limit spills a few
PARTS = 512  # approximate number of programs that keep sums


@triton.jit
def _store_channels(
    sums_ptr, row, sums, lines, channels, groups, depth, given, LAST: tl.constexpr
):  # fmt: skip
    """Write a tile's sums over places into one row of partial sums, [wanted * parts, C]."""
    at = row.to(tl.int64) * groups * depth + (lines * depth + channels)
    # places are added last, because adding across threads in every tile would cost exchanges
    tl.store(sums_ptr + at, tl.sum(sums, 0 if LAST else 2, keep_dims=True), mask=given)


@triton.jit(
    do_not_specialize=(
        "blocks",
        "groups",
        "depth",
        "spatial",
        "n",
        "all_lines",
        "parts",
        "images",
        "steps",
    )
)
def group_norm_backward_kernel(
    g_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, sums_ptr,
    blocks, groups, depth, spatial, n, all_lines, parts, images, steps,
    WEIGHT: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr, LAST: tl.constexpr,
    ALIGN: tl.constexpr, VEC: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the same groups of ``steps`` images, as whole lines in registers, and their sums."""
    CHANNELS: tl.constexpr = BLOCK // PLACES
    part, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    depth, spatial = known_to_divide(depth, spatial, LAST, VEC)
    lines, valid = tile_lines(block, groups, LAST, ALIGN, ROWS, BLOCK)
    offs, channels, given, mask = tile_offsets(
        0, 0, valid, groups, depth, spatial, LAST, ALIGN, PLACES, ROWS, BLOCK
    )
    # loaded once for all images
    w = of_channels(w_ptr, lines, channels, depth, given, WEIGHT, 1.0)
    dw = tl.zeros([PLACES, ROWS, CHANNELS] if LAST else [ROWS, CHANNELS, PLACES], tl.float32)
    db = tl.zeros([PLACES, ROWS, CHANNELS] if LAST else [ROWS, CHANNELS, PLACES], tl.float32)
    # several images a program, so that the partial sums do not grow with the number of images
    for step in range(0, min(steps, images - part * steps)):
        image = part * steps + step
        start = tile_start(image, block, 0, 0, groups, depth, spatial, LAST, ROWS)
        numbers = image.to(tl.int64) * groups + lines
        mean, rstd = load_stats(stats_ptr, numbers, all_lines, valid, True)
        grad, _, h = load_gradients(
            g_ptr + start, x_ptr + start, w_ptr, offs, offs, mask, mean, rstd, True, False, ""
        )
        g = grad * w
        # products behind the mask, for the reason that softmax_rest_kernel gives
        along = sum_of_lines(tl.where(mask, g * h, 0.0), LAST) / n
        level = sum_of_lines(tl.where(mask, g, 0.0), LAST) / n
        dx = input_gradient(g, h, rstd, along, level, x_ptr, offs, mask, True, False, "")
        tl.store(dx_ptr + start + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        # constant flags: sums that are not wanted take no registers
        if DW:
            dw += grad * h
        if DB:
            db += grad
    if DW:
        _store_channels(sums_ptr, part, dw, lines, channels, groups, depth, given, LAST)
    if DB:
        row = part + parts if DW else part
        _store_channels(sums_ptr, row, db, lines, channels, groups, depth, given, LAST)


@triton.jit(do_not_specialize=("blocks", "groups", "depth", "spatial", "n", "all_lines", "parts"))
def group_norm_backward_long_kernel(
    g_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, sums_ptr,
    blocks, groups, depth, spatial, n, all_lines, parts,
    WEIGHT: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr, LAST: tl.constexpr,
    ALIGN: tl.constexpr, VEC: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute lines that are too long for registers, which are read twice, and sums over places."""
    CHANNELS: tl.constexpr = BLOCK // PLACES
    image, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    depth, spatial = known_to_divide(depth, spatial, LAST, VEC)
    lines, valid = tile_lines(block, groups, LAST, ALIGN, ROWS, BLOCK)
    numbers = image.to(tl.int64) * groups + lines
    mean, rstd = load_stats(stats_ptr, numbers, all_lines, valid, True)
    along = tl.zeros([1, ROWS, 1] if LAST else [ROWS, 1, 1], tl.float32)
    level = tl.zeros([1, ROWS, 1] if LAST else [ROWS, 1, 1], tl.float32)
    for channel in range(0, depth, CHANNELS):
        dw = tl.zeros([PLACES, ROWS, CHANNELS] if LAST else [ROWS, CHANNELS, PLACES], tl.float32)
        db = tl.zeros([PLACES, ROWS, CHANNELS] if LAST else [ROWS, CHANNELS, PLACES], tl.float32)
        for place in range(0, spatial, PLACES):
            start = tile_start(image, block, channel, place, groups, depth, spatial, LAST, ROWS)
            offs, _, _, mask = tile_offsets(
                channel, place, valid, groups, depth, spatial, LAST, ALIGN, PLACES, ROWS, BLOCK
            )
            grad, _, h = load_gradients(
                g_ptr + start, x_ptr + start, w_ptr, offs, offs, mask, mean, rstd,
                True, False, "evict_last",
            )  # fmt: skip
            # Without the weight, which is the same at all places of a channel. So the sums for the
            # weights serve for the means of the line as well.
            dw += grad * h
            db += grad
        _, channels, given, _ = tile_offsets(
            channel, 0, valid, groups, depth, spatial, LAST, ALIGN, PLACES, ROWS, BLOCK
        )
        w = of_channels(w_ptr, lines, channels, depth, given, WEIGHT, 1.0)
        # behind the mask, for the reason that softmax_rest_kernel gives
        along += sum_of_lines(tl.where(given, dw * w, 0.0), LAST)
        level += sum_of_lines(tl.where(given, db * w, 0.0), LAST)
        if DW:
            _store_channels(sums_ptr, image, dw, lines, channels, groups, depth, given, LAST)
        if DB:
            row = image + parts if DW else image
            _store_channels(sums_ptr, row, db, lines, channels, groups, depth, given, LAST)
    along, level = along / n, level / n
    # the second pass, over the places of a channel from its end, which L2 still holds
    for channel in range(0, depth, CHANNELS):
        for back in range(0, spatial, PLACES):
            place = (spatial - 1) // PLACES * PLACES - back
            start = tile_start(image, block, channel, place, groups, depth, spatial, LAST, ROWS)
            offs, channels, given, mask = tile_offsets(
                channel, place, valid, groups, depth, spatial, LAST, ALIGN, PLACES, ROWS, BLOCK
            )
            grad, _, h = load_gradients(
                g_ptr + start, x_ptr + start, w_ptr, offs, offs, mask, mean, rstd,
                True, False, "evict_first",
            )  # fmt: skip
            g = grad * of_channels(w_ptr, lines, channels, depth, given, WEIGHT, 1.0)
            dx = input_gradient(g, h, rstd, along, level, x_ptr, offs, mask, True, False, "").to(
                dx_ptr.dtype.element_ty
            )
            tl.store(dx_ptr + start + offs, dx, mask=mask, eviction_policy="evict_first")


@cached_by_shape
def _launch(
    shape: tuple[int, ...],
    groups: int,
    last: bool,
    dtypes: tuple[torch.dtype, ...],
    flags: tuple[bool, bool, bool],
) -> Launch:
    """Return the launch for a shape, which returns the partial sums.

    ``last`` tells whether channels are neighbours in memory. ``dtypes`` are those of the gradient,
    x and the weight. ``flags`` are has_weight, dweight and dbias.
    """
    widest = max(dtype.itemsize for dtype in dtypes[:2])
    t = walk(shape, groups, last, widest, PER_THREAD, LONGEST)
    steps = -(-t.images // max(PARTS // t.blocks, 1)) if t.whole else 1
    parts = -(-t.images // steps)
    sizes = t.blocks, *t.sizes, t.images * groups, parts
    # one image a program for long lines, because a single image is work enough
    return Launch(
        group_norm_backward_kernel if t.whole else group_norm_backward_long_kernel,
        (parts * t.blocks, 1, 1),
        (*sizes, t.images, steps) if t.whole else sizes,
        (*flags, *t.layout),
        t.num_warps,
        MAX_REGISTERS if t.scattered and not t.whole else None,
        results=(dense((sum(flags[1:]), parts, shape[1]), torch.float32),),
    )


def group_norm_backward_triton(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    groups: int,
    dweight: bool,
    dbias: bool,
) -> tuple[Tensor, Tensor]:
    form = memory_format(x)
    grad, x = (t.contiguous(memory_format=form) for t in (grad, x))
    dx = torch.empty_like(x)
    # a grid of 0 programs is an invalid launch
    if x.numel() == 0:
        return dx, x.new_zeros(dweight + dbias, x.shape[1], dtype=torch.float32)
    # a kernel's pointer has to be valid, also where nothing is loaded
    w = contiguous_or(x, weight)
    dtypes, last = (grad.dtype, x.dtype, w.dtype), form is not torch.contiguous_format
    flags = weight is not None, dweight, dbias
    (sums,) = _launch(x.shape, groups, last, dtypes, flags)(grad, x, w, stats, dx)
    # the partial sums are added by one more launch in one order, because atomics on floats vary
    return dx, reduce.sum_triton(sums, (1,), False, torch.float32)


def group_norm_backward_torch(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    groups: int,
    dweight: bool,
    dbias: bool,
) -> tuple[Tensor, Tensor]:
    of_channels = (1, -1) + (1,) * (x.dim() - 2)
    mean, rstd = stats.unsqueeze(-1)
    lines = x.shape[0] * groups, -1
    if x.numel() == 0:
        return torch.empty_like(x), x.new_zeros(dweight + dbias, x.shape[1], dtype=torch.float32)
    grad = grad.float()
    h = (x.reshape(lines).float() - mean) * rstd
    g = (grad if weight is None else grad * weight.float().view(of_channels)).reshape(lines)
    level, along = (line_sums(each, 1, keepdim=True) / h.shape[1] for each in (g, g * h))
    dx = rstd * (g - level - h * along)
    dx = dx.view(x.shape).to(x.dtype, memory_format=memory_format(x))
    others = [dim for dim in range(x.dim()) if dim != 1]
    sums = [(grad * h.view(x.shape)).sum(others)] * dweight + [grad.sum(others)] * dbias
    return dx, torch.stack(sums) if sums else stats.new_empty(0, x.shape[1])


def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    groups: int,
    dweight: bool,
    dbias: bool,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of ``group_norm`` in FP32; the gradient of x is rounded once.

    Args:
        grad: gradient of the result, of the shape of ``x``.
        x: input of ``group_norm``.
        weight: weight of ``group_norm``, or None.
        stats: statistics that ``group_norm`` returned.
        groups: number of groups of channels.
        dweight: whether the gradient of the weight is wanted.
        dbias: whether the gradient of the bias is wanted.
        backend: "auto", "triton" or "eager".

    Returns:
        The gradient of x, in its dtype and memory format, and the wanted gradients of weight and
        bias, FP32 of shape [wanted, C].
    """
    return GROUP_NORM_BACKWARD(backend, grad, x, weight, stats, groups, dweight, dbias)


def _sample(affine: bool) -> Sample:
    """Return the sample's call on gradients of places."""

    def args(grad: Tensor, dim: int) -> tuple[Any, ...]:
        lines, weight, _, groups, eps = _group_norm.group_args(grad, dim, affine)
        # x is small, because eager torch adds up grad * weight * x, whose parts cancel
        x = lines.flip(-1) / 64
        stats = _group_norm.statistics(x, groups, eps)
        return lines, x, weight, stats, groups, affine, affine

    sample = Sample(args, any_order=True, rows_only=True)
    if affine:
        return sample._replace(variant="affine")
    return sample._replace(reads=4, writes=2, of_line=(8, 0))


GROUP_NORM_BACKWARD = TraceableOp(
    group_norm_backward_triton,
    group_norm_backward_torch,
    [_sample(affine) for affine in (False, True)],
)


def shipped() -> Iterator[Shipped]:
    """Yield the calls whose builds are checked, for cases of the forward."""
    for name, x, w in _group_norm.shipped_cases():
        if x.shape[2] == 32 and x.is_contiguous():
            continue
        stats = torch.empty(2, 32 * len(x), device="meta")
        args = x, x, w, stats, 32, True, True
        yield Shipped(f"{name} backward", group_norm_backward_triton, args, 96, 40, 0)
