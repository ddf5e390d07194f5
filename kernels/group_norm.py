"""group_norm in either memory format: half storage, FP32 arithmetic. 4 B/element.

y = (x - mean) * rstd * weight + bias, with rstd = 1 / sqrt(mean((x - mean)**2) + eps), where means
are over the channels of a group and all places of an image. A short line fills a program's
registers. A long line is read twice, the second time from L2.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

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
from tritonamp.kernels._launch import Launch, allocate
from tritonamp.kernels._lines import cached_by_shape, dense, dtype_of
from tritonamp.kernels._norms import merge_moments, reciprocal_std, store_stats
from tritonamp.kernels._sample import Sample
from tritonamp.kernels._shipped import BF16, HALF, Shipped, build_name
from tritonamp.kernels.device import tl, triton

PER_THREAD = 16  # elements that a thread holds
LONGEST = 16384  # line that registers hold


@triton.jit
def tile_moments(x, mask, count, LAST: tl.constexpr):
    """Return mean of ``count`` elements of each line, and the sum of squares around the mean."""
    # two passes over registers, because a mean of squares minus a squared mean loses the variance
    # if the mean is large
    mean = sum_of_lines(x, LAST) / count
    d = x - mean
    # only squares need the mask: masked x are 0, but their distances from the mean are not
    return mean, sum_of_lines(tl.where(mask, d * d, 0.0), LAST)


@triton.jit(do_not_specialize=("blocks", "groups", "depth", "spatial", "n", "all_lines", "eps"))
def group_norm_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, blocks, groups, depth, spatial, n, all_lines, eps,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, LAST: tl.constexpr, ALIGN: tl.constexpr,
    VEC: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute whole lines, which are held in registers."""
    image, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    depth, spatial = known_to_divide(depth, spatial, LAST, VEC)
    lines, valid = tile_lines(block, groups, LAST, ALIGN, ROWS, BLOCK)
    # 64-bit start and 32-bit offsets, because 64-bit arithmetic for each element costs instructions
    start = tile_start(image, block, 0, 0, groups, depth, spatial, LAST, ROWS)
    offs, channels, given, mask = tile_offsets(
        0, 0, valid, groups, depth, spatial, LAST, ALIGN, PLACES, ROWS, BLOCK
    )
    x = tl.load(x_ptr + start + offs, mask=mask, other=0.0).to(tl.float32)
    w = of_channels(w_ptr, lines, channels, depth, given, WEIGHT, 1.0)
    b = of_channels(b_ptr, lines, channels, depth, given, BIAS, 0.0)
    mean, squares = tile_moments(x, mask, n, LAST)
    rstd = reciprocal_std(squares, n, eps)
    # rstd * w first: it is one number for each channel, not for each element
    y = (x - mean) * (rstd * w) + b
    tl.store(y_ptr + start + offs, y.to(y_ptr.dtype.element_ty), mask=mask)
    numbers = image.to(tl.int64) * groups + lines
    store_stats(stats_ptr, numbers, all_lines, valid, mean, rstd, True)


@triton.jit(do_not_specialize=("blocks", "groups", "depth", "spatial", "n", "all_lines", "eps"))
def group_norm_long_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, blocks, groups, depth, spatial, n, all_lines, eps,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, LAST: tl.constexpr, ALIGN: tl.constexpr,
    VEC: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute lines that are too long for registers, which are read twice."""
    CHANNELS: tl.constexpr = BLOCK // PLACES
    image, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    depth, spatial = known_to_divide(depth, spatial, LAST, VEC)
    lines, valid = tile_lines(block, groups, LAST, ALIGN, ROWS, BLOCK)
    mean = tl.zeros([1, ROWS, 1] if LAST else [ROWS, 1, 1], tl.float32)
    squares = tl.zeros([1, ROWS, 1] if LAST else [ROWS, 1, 1], tl.float32)
    # n * 0, because a variable keeps its type in a loop, and n has 32 or 64 bits
    count = n * 0
    for channel in range(0, depth, CHANNELS):
        for place in range(0, spatial, PLACES):
            start = tile_start(image, block, channel, place, groups, depth, spatial, LAST, ROWS)
            offs, _, _, mask = tile_offsets(
                channel, place, valid, groups, depth, spatial, LAST, ALIGN, PLACES, ROWS, BLOCK
            )
            # evict_last, because the second loop reads the tile again
            x = tl.load(x_ptr + start + offs, mask=mask, other=0.0, eviction_policy="evict_last")
            some = min(CHANNELS, depth - channel) * min(PLACES, spatial - place)
            tile_mean, tile_squares = tile_moments(x.to(tl.float32), mask, some, LAST)
            # moments are merged around their own means, because raw sums of squares cancel if the
            # mean is large
            mean, squares = merge_moments(tile_mean, tile_squares, some, mean, squares, count)
            count += some
    rstd = reciprocal_std(squares, n, eps)
    # from L2, each channel from its end, which was read last
    for channel in range(0, depth, CHANNELS):
        for back in range(0, spatial, PLACES):
            # the last place is a multiple of PLACES, so that tiles
            # are the same as in the first loop
            place = (spatial - 1) // PLACES * PLACES - back
            start = tile_start(image, block, channel, place, groups, depth, spatial, LAST, ROWS)
            offs, channels, given, mask = tile_offsets(
                channel, place, valid, groups, depth, spatial, LAST, ALIGN, PLACES, ROWS, BLOCK
            )
            x = tl.load(x_ptr + start + offs, mask=mask, other=0.0, eviction_policy="evict_first")
            w = of_channels(w_ptr, lines, channels, depth, given, WEIGHT, 1.0)
            b = of_channels(b_ptr, lines, channels, depth, given, BIAS, 0.0)
            y = ((x.to(tl.float32) - mean) * (rstd * w) + b).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + start + offs, y, mask=mask, eviction_policy="evict_first")
    numbers = image.to(tl.int64) * groups + lines
    store_stats(stats_ptr, numbers, all_lines, valid, mean, rstd, True)


@cached_by_shape
def _forward(
    shape: tuple[int, ...], groups: int, last: bool, dtypes: tuple[Any, ...], eps: float
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function of x of one shape.

    ``last`` tells whether channels are neighbours in memory. ``dtypes`` are those of x, weight and
    bias; None for a weight that is missing.
    """
    given, weight, bias = dtypes
    statistics = dense((2, shape[0] * groups), torch.float32)
    # a grid of 0 programs is an invalid launch
    if 0 in shape:
        return lambda x, *weights: (torch.empty_like(x), *allocate(x, (statistics,)))
    t = walk(shape, groups, last, given.itemsize, PER_THREAD, LONGEST)
    launch = Launch(
        group_norm_kernel if t.whole else group_norm_long_kernel,
        (t.images * t.blocks, 1, 1),
        (t.blocks, *t.sizes, t.images * groups, float(eps)),
        (weight is not None, bias is not None, *t.layout),
        t.num_warps,
        results=(statistics,),
    )

    def run(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        x = x.contiguous(memory_format=memory_format(x))
        y = torch.empty_like(x)  # also in the memory format
        w = x if weight is None else weight.contiguous()
        b = x if bias is None else bias.contiguous()
        (stats,) = launch(x, w, b, y)
        return y, stats

    return run


def group_norm_prepared(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function that does ``group_norm_triton`` on tensors with this layout."""
    last = memory_format(x) is not torch.contiguous_format
    dtypes = x.dtype, dtype_of(weight), dtype_of(bias)
    return _forward(x.shape, groups, last, dtypes, eps)


def group_norm_triton(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor]:
    return group_norm_prepared(x, weight, bias, groups, eps)(x, weight, bias)


def group_norm_torch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor]:
    # torch's own kernel multiplies x instead of its distance from the mean,
    # and rounds the mean's multiple
    stats = statistics(x, groups, eps)
    mean, rstd = stats.view(2, x.shape[0], groups, 1)
    y = x
    if x.numel():
        y = ((x.reshape(x.shape[0], groups, -1).float() - mean) * rstd).view(x.shape)
    of_channels = (1, -1) + (1,) * (x.dim() - 2)
    if weight is not None:
        y = y * weight.float().view(of_channels)
    if bias is not None:
        y = y + bias.float().view(of_channels)
    # .contiguous() is no alternative: where it has nothing to do,
    # torch 2.11 compiles gradients of 0
    return y.to(x.dtype, memory_format=memory_format(x)), stats


def statistics(x: Tensor, groups: int, eps: float) -> Tensor:
    """Return FP32 [2, N * groups]: mean and 1 / sqrt(variance + eps) of each group of an image."""
    lines = x.reshape(x.shape[0] * groups, x.shape[1:].numel() // groups).float()
    n = lines.shape[1]
    mean = line_sums(lines, 1, keepdim=True) / n
    rstd = torch.rsqrt(line_sums((lines - mean).square(), 1) / n + eps)
    return torch.stack([mean[:, 0], rstd])


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Normalise the channels of each group of each image together, in FP32, rounded once.

    Args:
        x: float16, bfloat16 or float32 of shape [N, C, ...].
        weight: half or float32 of shape [C], or None.
        bias: half or float32 of shape [C], or None.
        groups: number of groups of channels.
        eps: number that is added to the variance.
        backend: "auto", "triton" or "eager".

    Returns:
        The result in the memory format of x, and mean and rstd, FP32 of shape [2, N * groups].
    """
    return GROUP_NORM(backend, x, weight, bias, groups, eps)


def group_args(x: Tensor, dim: int, affine: bool) -> tuple[Any, ...]:
    """Return the arguments of a sample's call on one or two images; lines are channels' places.

    Without weights, each channel is a group.
    """
    lines = x.movedim(dim, -1)
    rows, n = lines.shape[:-1].numel(), lines.shape[-1]
    lines = lines.reshape(2 - rows % 2, -1, n) if n else lines.new_empty(1, 1, 0)
    channels = lines.shape[1]
    w = torch.linspace(0.5, 2, channels, device=x.device) if affine else None
    b = torch.linspace(-1, 1, channels, device=x.device).to(x.dtype) if affine else None
    depth = next(size for size in (4, 3, 2, 1) if channels % size == 0) if affine else 1
    return lines, w, b, max(channels // depth, 1), 1e-5


def _sample(affine: bool) -> Sample:
    sample = Sample(lambda x, dim: group_args(x, dim, affine), any_order=True, rows_only=True)
    if affine:
        return sample._replace(variant="affine")
    return sample._replace(reads=2, writes=2, of_line=(0, 8))


GROUP_NORM = TraceableOp(
    group_norm_triton,
    group_norm_torch,
    [_sample(affine) for affine in (False, True)],
    prepared=group_norm_prepared,
)


def shipped_cases() -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, x in either memory format, and an FP32 weight."""
    for *sizes, dtype in ((512, 4, 4, HALF), (320, 64, 64, BF16), (512, 32, 32, HALF)):
        for form in (torch.contiguous_format, torch.channels_last):
            last = form is torch.channels_last
            x = torch.empty(8, *sizes, dtype=dtype, device="meta", memory_format=form)
            name = build_name("group_norm", dtype, sizes, last and "channels last")
            yield name, x, torch.empty(sizes[0], device="meta")


def shipped() -> Iterator[Shipped]:
    """Yield the calls whose builds are checked, with 32 groups."""
    for name, x, w in shipped_cases():
        yield Shipped(name, group_norm_triton, (x, w, w, 32, 1e-5), 64, 18, 0)
