"""group_norm in either memory format: half storage, FP32 arithmetic. 4 B/element.

y = (x - mean) * rstd * weight + bias, with rstd = 1 / sqrt(mean((x - mean)**2) + eps), means over
the channels of a group and all places of an image. A short line fills a program's registers; a long
one is read twice, the second time out of L2.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._group_norms import (
    line_start,
    load_of_channels,
    memory_format,
    tile_offsets,
    walk,
)
from tritonamp.kernels._implementations import TraceableOp
from tritonamp.kernels._launch import launch
from tritonamp.kernels._norms import reciprocal_std
from tritonamp.kernels._sample import Sample
from tritonamp.kernels._shipped import Shipped
from tritonamp.kernels.device import tl, triton

PER_THREAD = 16  # elements that a thread holds
LONGEST = 16384  # line that registers hold


@triton.jit
def _tile_moments(x, mask, count):
    """Return mean and sum of squares around it of the ``count`` elements of a tile."""
    mean = tl.sum(tl.sum(x, 1), 0) / count
    d = tl.where(mask, x - mean, 0.0)
    return mean, tl.sum(tl.sum(d * d, 1), 0)


@triton.jit(do_not_specialize=("groups", "depth", "spatial", "eps"))
def group_norm_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, groups, depth, spatial, eps,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, LAST: tl.constexpr, WHOLE: tl.constexpr,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One line."""
    group, image, start, stride = line_start(groups, depth, spatial, LAST, VEC)
    n = depth * spatial
    CHANNELS: tl.constexpr = BLOCK if LAST else ROWS
    PLACES: tl.constexpr = ROWS if LAST else BLOCK
    x_ptr += start
    y_ptr += start
    if WHOLE:
        offs, channels, mask = tile_offsets(0, 0, depth, spatial, stride, LAST, VEC, ROWS, BLOCK)
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        mean, squares = _tile_moments(x, mask, n)
        rstd = reciprocal_std(squares, n, eps)
        w = load_of_channels(w_ptr, group, depth, channels, WEIGHT, 1.0)
        b = load_of_channels(b_ptr, group, depth, channels, BIAS, 0.0)
        y = (x - mean) * rstd * w + b
        tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        mean = 0.0
        squares = 0.0
        count = 0
        for channel in range(0, depth, CHANNELS):
            for place in range(0, spatial, PLACES):
                offs, channels, mask = tile_offsets(
                    channel, place, depth, spatial, stride, LAST, VEC, ROWS, BLOCK
                )
                x = tl.load(x_ptr + offs, mask=mask, other=0.0, eviction_policy="evict_last")
                some = min(CHANNELS, depth - channel) * min(PLACES, spatial - place)
                tile_mean, tile_squares = _tile_moments(x.to(tl.float32), mask, some)
                # Chan, Golub and LeVeque, see ``add_moments``
                shift, share = tile_mean - mean, some * (1.0 / (count + some))
                mean += shift * share
                squares += tile_squares + shift * shift * (count * share)
                count += some
        rstd = reciprocal_std(squares, n, eps)
        for channel in range(0, depth, CHANNELS):
            for place in range(0, spatial, PLACES):
                offs, channels, mask = tile_offsets(
                    channel, place, depth, spatial, stride, LAST, VEC, ROWS, BLOCK
                )
                x = tl.load(x_ptr + offs, mask=mask, other=0.0, eviction_policy="evict_first")
                w = load_of_channels(w_ptr, group, depth, channels, WEIGHT, 1.0)
                b = load_of_channels(b_ptr, group, depth, channels, BIAS, 0.0)
                y = ((x.to(tl.float32) - mean) * rstd * w + b).to(y_ptr.dtype.element_ty)
                tl.store(y_ptr + offs, y, mask=mask, eviction_policy="evict_first")
    tl.store(mean_ptr + tl.program_id(0), mean)
    tl.store(rstd_ptr + tl.program_id(0), rstd)


def group_norm_triton(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor]:
    form = memory_format(x)
    x = x.contiguous(memory_format=form)
    y = torch.empty_like(x)
    stats = x.new_empty(2, x.shape[0] * groups, dtype=torch.float32)
    if x.numel() == 0:
        return y, stats
    t = walk(
        tuple(x.shape), groups, form is not torch.contiguous_format, x.itemsize, PER_THREAD, LONGEST
    )
    # a pointer has to point somewhere, also where nothing is loaded
    w, b = (x if given is None else given.contiguous() for given in (weight, bias))
    launch(
        group_norm_kernel,
        (t.lines, 1, 1),
        (x, w, b, y, stats[0], stats[1]),
        (*t.sizes, float(eps)),
        (weight is not None, bias is not None, *t.layout),
        t.num_warps,
    )
    return y, stats


def group_norm_torch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor]:
    lines = x.reshape(x.shape[0] * groups, -1).float()
    mean = lines.mean(1, keepdim=True)
    rstd = torch.rsqrt((lines - mean).square().mean(1, keepdim=True) + eps)
    y = ((lines - mean) * rstd).view(x.shape)
    of_channels = (1, -1) + (1,) * (x.dim() - 2)
    if weight is not None:
        y = y * weight.float().view(of_channels)
    if bias is not None:
        y = y + bias.float().view(of_channels)
    y = y.to(x.dtype).contiguous(memory_format=memory_format(x))
    return y, torch.stack([mean.view(-1), rstd.view(-1)])


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
        x: float16, bfloat16 or float32, [N, C, ...].
        weight: [C], half or float32, or None.
        bias: as ``weight``.
        groups: into which the channels are divided.
        eps: added to the variance.
        backend: "auto", "triton" or "eager".

    Returns:
        the result in the memory format of x, and FP32 [2, N * groups], mean and rstd.
    """
    return GROUP_NORM(backend, x, weight, bias, groups, eps)


def group_args(x: Tensor, dim: int, affine: bool) -> tuple[Any, ...]:
    """Return the arguments of a sample's call: two images, lines are places of channels."""
    lines = x.movedim(dim, -1)
    lines = lines.reshape(1, -1, lines.shape[-1])
    channels = lines.shape[1]
    w = torch.linspace(0.5, 2, channels, device=x.device) if affine else None
    b = torch.linspace(-1, 1, channels, device=x.device).to(x.dtype) if affine else None
    groups = next(g for g in (3, 2, 1) if channels % g == 0)
    return lines, w, b, groups, 1e-5


GROUP_NORM = TraceableOp(
    group_norm_triton,
    group_norm_torch,
    [
        Sample(
            lambda x, dim, affine=affine: group_args(x, dim, affine),
            any_order=True,
            rows_only=True,
            variant="affine" if affine else "",
        )
        for affine in (False, True)
    ],
)


def shipped_cases() -> Iterator[tuple[str, tuple[int, ...], torch.dtype, bool]]:
    """Yield name, shape, dtype, and whether channels are neighbours."""
    half, bf16 = torch.float16, torch.bfloat16
    for shape, dtype in [((8, 512, 4, 4), half), ((8, 320, 64, 64), bf16), ((8, 512, 32, 32), half)]:
        for last in (False, True):
            name = f"group_norm {dtype} {list(shape[1:])}{' channels last' if last else ''}"
            yield name.replace("torch.", ""), shape, dtype, last


def shipped() -> Iterator[Shipped]:
    """Yield the calls whose builds are checked, with FP32 weights, in 32 groups."""
    for name, shape, dtype, last in shipped_cases():
        form = torch.channels_last if last else torch.contiguous_format
        x = torch.empty(shape, dtype=dtype, device="meta", memory_format=form)
        w = torch.empty(shape[1], device="meta")
        yield Shipped(name, group_norm_triton, (x, w, w, 32, 1e-5), 64, 16, 0)
