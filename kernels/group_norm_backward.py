"""Gradients of group_norm from its input, in FP32. 6 B/element.

With h = (x - mean) * rstd and g = grad * weight, and means over the line that a group of an image is

    dx = rstd * (g - mean(g) - h * mean(g * h)),  dweight = sum(grad * h),  dbias = sum(grad)

where the last two sum over images and places. A program adds up grad * h and grad over the places of
its line's channels, which gives both means, and leaves them for a launch that adds up images. A long
line is read twice, the second time out of L2.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels import group_norm as _group_norm
from tritonamp.kernels import reduce
from tritonamp.kernels._group_norms import (
    line_start,
    load_of_channels,
    memory_format,
    tile_offsets,
    walk,
)
from tritonamp.kernels._implementations import TraceableOp
from tritonamp.kernels._launch import launch
from tritonamp.kernels._sample import Sample
from tritonamp.kernels._shipped import Shipped
from tritonamp.kernels.device import tl, triton

PER_THREAD = 8  # elements that a thread holds of four tiles
LONGEST = 8192  # line that registers hold


@triton.jit
def _load(g_ptr, x_ptr, offs, mask, mean, rstd, EVICT: tl.constexpr):
    """Return grad and the normalised x."""
    grad = tl.load(g_ptr + offs, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
    x = tl.load(x_ptr + offs, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
    return grad, tl.where(mask, (x - mean) * rstd, 0.0)


@triton.jit
def _finish_channels(
    dw, db, w_ptr, dw_ptr, db_ptr, group, image, groups, depth, channels,
    WEIGHT: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Write the sums over places that are wanted; return those over channels, with their weights."""
    dw = tl.sum(dw, AXIS, keep_dims=True)
    db = tl.sum(db, AXIS, keep_dims=True)
    at = (image * groups + group) * depth + channels
    if DW:
        tl.store(dw_ptr + at, dw, mask=channels < depth)
    if DB:
        tl.store(db_ptr + at, db, mask=channels < depth)
    w = load_of_channels(w_ptr, group, depth, channels, WEIGHT, 1.0)
    return tl.sum(tl.sum(dw * w, 1), 0), tl.sum(tl.sum(db * w, 1), 0)


@triton.jit(do_not_specialize=("groups", "depth", "spatial"))
def group_norm_backward_kernel(
    g_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, groups, depth, spatial,
    WEIGHT: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr,
    LAST: tl.constexpr, WHOLE: tl.constexpr,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One line."""
    group, image, start, stride = line_start(groups, depth, spatial, LAST, VEC)
    mean, rstd = tl.load(mean_ptr + tl.program_id(0)), tl.load(rstd_ptr + tl.program_id(0))
    n = depth * spatial
    CHANNELS: tl.constexpr = BLOCK if LAST else ROWS
    PLACES: tl.constexpr = ROWS if LAST else BLOCK
    AXIS: tl.constexpr = 0 if LAST else 1
    g_ptr += start
    x_ptr += start
    dx_ptr += start
    if WHOLE:
        offs, channels, mask = tile_offsets(0, 0, depth, spatial, stride, LAST, VEC, ROWS, BLOCK)
        grad, h = _load(g_ptr, x_ptr, offs, mask, mean, rstd, "")
        along, level = _finish_channels(
            tl.where(mask, grad * h, 0.0), grad, w_ptr, dw_ptr, db_ptr, group, image, groups, depth, channels,
            WEIGHT, DW, DB, AXIS,
        )  # fmt: skip
        w = load_of_channels(w_ptr, group, depth, channels, WEIGHT, 1.0)
        dx = rstd * (grad * w - level / n - h * (along / n))
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    else:
        along = 0.0
        level = 0.0
        for channel in range(0, depth, CHANNELS):
            dw = tl.zeros([ROWS, BLOCK], tl.float32)
            db = tl.zeros([ROWS, BLOCK], tl.float32)
            for place in range(0, spatial, PLACES):
                offs, channels, mask = tile_offsets(
                    channel, place, depth, spatial, stride, LAST, VEC, ROWS, BLOCK
                )
                grad, h = _load(g_ptr, x_ptr, offs, mask, mean, rstd, "evict_last")
                dw += tl.where(mask, grad * h, 0.0)
                db += grad
            offs, channels, mask = tile_offsets(
                channel, 0, depth, spatial, stride, LAST, VEC, ROWS, BLOCK
            )
            more_along, more_level = _finish_channels(
                dw, db, w_ptr, dw_ptr, db_ptr, group, image, groups, depth, channels,
                WEIGHT, DW, DB, AXIS,
            )  # fmt: skip
            along += more_along
            level += more_level
        along /= n
        level /= n
        for channel in range(0, depth, CHANNELS):
            for place in range(0, spatial, PLACES):
                offs, channels, mask = tile_offsets(
                    channel, place, depth, spatial, stride, LAST, VEC, ROWS, BLOCK
                )
                grad, h = _load(g_ptr, x_ptr, offs, mask, mean, rstd, "evict_first")
                w = load_of_channels(w_ptr, group, depth, channels, WEIGHT, 1.0)
                dx = (rstd * (grad * w - level - h * along)).to(dx_ptr.dtype.element_ty)
                tl.store(dx_ptr + offs, dx, mask=mask, eviction_policy="evict_first")


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
    dx, (images, channels) = torch.empty_like(x), x.shape[:2]
    # one row at least: a pointer has to point somewhere
    parts = x.new_empty(max(dweight + dbias, 1), images, channels, dtype=torch.float32)
    if x.numel() == 0:
        return dx, parts[: dweight + dbias].new_zeros(dweight + dbias, channels)
    widest, last = max(grad.itemsize, x.itemsize), form is not torch.contiguous_format
    t = walk(tuple(x.shape), groups, last, widest, PER_THREAD, LONGEST)
    launch(
        group_norm_backward_kernel,
        (t.lines, 1, 1),
        (grad, x, x if weight is None else weight.contiguous(), *stats, dx, parts[0], parts[-1]),
        t.sizes,
        (weight is not None, dweight, dbias, *t.layout),
        t.num_warps,
    )
    if not dweight and not dbias:
        return dx, parts.new_empty(0, channels)
    return dx, reduce.sum_triton(parts, (1,), False, torch.float32)


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
    dx = rstd * (g - g.mean(1, keepdim=True) - h * (g * h).mean(1, keepdim=True))
    dx = dx.view(x.shape).to(x.dtype).contiguous(memory_format=memory_format(x))
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
    """Compute the gradients of ``group_norm`` in FP32; that of x is rounded once.

    Args:
        grad: of the result, of its shape.
        x: as it was given to ``group_norm``.
        weight: as it was given to ``group_norm``.
        stats: as ``group_norm`` returned them.
        groups: into which the channels are divided.
        dweight: whether the gradient of the weight is wanted.
        dbias: whether that of the bias is.
        backend: "auto", "triton" or "eager".

    Returns:
        the gradient of x, of its dtype and memory format, and FP32 [wanted, C], those of weight and
        bias.
    """
    return GROUP_NORM_BACKWARD(backend, grad, x, weight, stats, groups, dweight, dbias)


def _args(grad: Tensor, dim: int, affine: bool) -> tuple[Any, ...]:
    """Return gradients of places; x is small: eager torch adds up grad * weight * x."""
    lines, weight, _, groups, eps = _group_norm.group_args(grad, dim, affine)
    x = lines.flip(-1) / 64
    stats = _group_norm.group_norm_torch(x, None, None, groups, eps)[1]
    return lines, x, weight, stats, groups, affine, affine


GROUP_NORM_BACKWARD = TraceableOp(
    group_norm_backward_triton,
    group_norm_backward_torch,
    [
        Sample(
            lambda grad, dim, affine=affine: _args(grad, dim, affine),
            any_order=True,
            rows_only=True,
            variant="affine" if affine else "",
        )
        for affine in (False, True)
    ],
)


def shipped() -> Iterator[Shipped]:
    """Yield the calls whose builds are checked, for cases of the forward."""
    for name, shape, dtype, last in _group_norm.shipped_cases():
        form = torch.channels_last if last else torch.contiguous_format
        x = torch.empty(shape, dtype=dtype, device="meta", memory_format=form)
        w = torch.empty(shape[1], device="meta")
        stats = torch.empty(2, 32 * shape[0], device="meta")
        args = x, x, w, stats, 32, True, True
        yield Shipped(f"{name} backward", group_norm_backward_triton, args, 128, 40, 0)
