"""Gradients of layer_norm and rms_norm from their input, in FP32. 6 B/element.

With h = (x - mean) * rstd and g = grad * weight

    dx = rstd * (g - mean(g) - h * mean(g * h)),  dweight = sum(grad * h),  dbias = sum(grad)

where the last two sums are over lines, and rms_norm has no mean(g). A fixed number of programs,
whatever the GPU, process neighbouring lines and keep FP32 sums; another launch adds these up. Lines
that are too long for registers are read twice for dx, and once more for the sums. A gradient that
reaches x without passing the norm, as through a residual connection, is added to dx before dx is
rounded.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels import norm as _norm
from tritonamp.kernels import reduce
from tritonamp.kernels._implementations import TraceableOp, line_sums
from tritonamp.kernels._launch import Launch, Room, allocate
from tritonamp.kernels._lines import (
    WIDEST,
    Tiling,
    cached_by_shape,
    column_offsets,
    contiguous_or,
    dense,
    line_offsets,
    tiling,
)
from tritonamp.kernels._norm_weights import store_part, sums_of_long
from tritonamp.kernels._norms import gradient_sums, input_gradient, load_gradients, load_stats
from tritonamp.kernels._sample import Sample
from tritonamp.kernels._shipped import Shipped
from tritonamp.kernels.device import tl, triton

# Elements that a thread holds of each of six tiles. The forward has fewer tiles, and twice as many.
PER_THREAD = 8
LONGEST = 8192  # line that registers hold
# Each program leaves a row of partial sums, which adds bytes to those of the input. Bytes in flight
# are those of all warps, so programs of many warps need not be many.
PARTS, WARPS = 128, 2048


@triton.jit(do_not_specialize=("rows", "n", "tiles", "steps"))
def norm_backward_kernel(
    g_ptr, x_ptr, w_ptr, stats_ptr, a_ptr, dx_ptr, sums_ptr, rows, n, tiles, steps,
    ADD: tl.constexpr, CENTER: tl.constexpr, WEIGHT: tl.constexpr,
    DW: tl.constexpr, DB: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ``steps`` tiles of whole lines in registers, and their sums over lines."""
    part = tl.program_id(0)
    columns, exist = column_offsets(0, n, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    # a fixed range of neighbouring tiles, so that sums have one order,
    # and the same bits on every GPU
    count = min(steps, tiles - part * steps)
    # every program has a tile, so the compiler may leave out the code for a loop that never runs
    tl.assume(count > 0)
    for step in range(0, count):
        tile = part * steps + step
        lines, numbers, valid = line_offsets(tile, rows, n, tiles, ROW_MAJOR, ALIGN, VEC, ROWS)
        offs, mask = lines + columns, valid & exist
        mean, rstd = load_stats(stats_ptr, numbers, rows, valid, CENTER)
        grad, g, h = load_gradients(
            g_ptr, x_ptr, w_ptr, offs, columns, mask, mean, rstd, CENTER, WEIGHT, ""
        )
        along, level = gradient_sums(g, h, mask, CENTER)
        dx = input_gradient(
            g, h, rstd, along / n, level / n, a_ptr, offs, mask, CENTER, ADD, ""
        ).to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + offs, dx, mask=mask)
        # from grad and h in registers, so that the weights' gradients read nothing again
        if DW:
            dw += grad * h
        if DB:
            db += grad
    if DW:
        store_part(sums_ptr, part, n, dw, columns, exist, VEC, ROWS)
    if DB:
        row = part + tl.num_programs(0) if DW else part
        store_part(sums_ptr, row, n, db, columns, exist, VEC, ROWS)


@triton.jit(do_not_specialize=("rows", "n", "blocks"))
def norm_backward_long_kernel(
    g_ptr, x_ptr, w_ptr, stats_ptr, a_ptr, dx_ptr, rows, n, blocks,
    ADD: tl.constexpr, CENTER: tl.constexpr, WEIGHT: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dx of lines that are too long for registers."""
    lines, numbers, valid = line_offsets(
        tl.program_id(0), rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS
    )
    mean, rstd = load_stats(stats_ptr, numbers, rows, valid, CENTER)
    along = tl.zeros([ROWS, 1], tl.float32)
    level = tl.zeros([ROWS, 1], tl.float32)
    for at in range(0, n, BLOCK):
        columns, exist = column_offsets(at, n, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
        offs, mask = lines + columns, valid & exist
        # evict_last, because the second loop reads both inputs again
        _, g, h = load_gradients(
            g_ptr, x_ptr, w_ptr, offs, columns, mask, mean, rstd, CENTER, WEIGHT, "evict_last"
        )
        more_along, more_level = gradient_sums(g, h, mask, CENTER)
        along += more_along
        level += more_level
    # from the end of the line, which L2 still holds
    for back in range(0, n, BLOCK):
        at = (n - 1) // BLOCK * BLOCK - back
        columns, exist = column_offsets(at, n, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
        offs, mask = lines + columns, valid & exist
        _, g, h = load_gradients(
            g_ptr, x_ptr, w_ptr, offs, columns, mask, mean, rstd, CENTER, WEIGHT, "evict_first"
        )
        dx = input_gradient(
            g, h, rstd, along / n, level / n, a_ptr, offs, mask, CENTER, ADD, "evict_first"
        ).to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + offs, dx, mask=mask, eviction_policy="evict_first")


Work = Callable[..., tuple[Tensor, Tensor]]
"""Function that returns dx and partial sums over lines, which have shape [wanted, parts, n]."""


def _whole(t: Tiling, dx: Room, flags: tuple[bool, ...], wants: tuple[bool, bool]) -> Work:
    """Return the work on lines in registers, one launch."""
    tiles = t.grid[0]
    # steps first, and then only as many programs as these steps need: none is idle
    steps = -(-tiles // max(PARTS, WARPS // t.num_warps))
    programs = -(-tiles // steps)
    sizes, constants = (t.lines, t.n, tiles, steps), (*flags, *wants, *t.layout)
    results = dx, dense((sum(wants), programs, t.n), torch.float32)
    grid = programs, 1, 1
    launch: Any = Launch(norm_backward_kernel, grid, sizes, constants, t.num_warps, results=results)
    return launch


def _long(t: Tiling, dx: Room, flags: tuple[bool, ...], wants: tuple[bool, bool]) -> Work:
    """Return the work on long lines."""
    constants, grid = (*flags, *t.layout), (t.grid[0], 1, 1)
    launch = Launch(norm_backward_long_kernel, grid, t.sizes, constants, t.num_warps, results=(dx,))
    # sums over long lines in registers would take as many as the line, so
    # they get a launch of their own
    add_up = sums_of_long(t, flags[1], wants)

    def run(grad: Tensor, x: Tensor, w: Tensor, stats: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        (dx,) = launch(grad, x, w, stats, a)
        (sums,) = add_up(grad, x, stats) if any(wants) else allocate(x, add_up.results)
        return dx, sums

    return run


@cached_by_shape
def _backward(
    shape: tuple[int, ...], n: int, itemsize: int, dtypes: tuple[torch.dtype, ...], *flags: bool
) -> Work:
    """Return the work on contiguous tensors of ``itemsize`` bytes an element.

    ``dtypes`` are those of all tensors, because a launch is for one set of dtypes. ``flags`` are
    has_added_grad, has_mean, has_weight, then needs_input_grad of weight and bias.
    """
    vec = math.gcd(n, WIDEST // itemsize)
    # only if a thread holds one vector: else Triton would spread a line over
    # the warps of others, and the bits of dx would depend on the number of lines
    over_lines = vec == PER_THREAD
    t = tiling((math.prod(shape) // n, n), 1, 1, PER_THREAD, LONGEST, vec, over_lines=over_lines)
    dx = dense(shape, dtypes[1])
    return (_whole if t.whole else _long)(t, dx, flags[:3], (flags[3], flags[4]))


def norm_backward_triton(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    n: int,
    dweight: bool,
    dbias: bool,
    added: Tensor | None,
) -> tuple[Tensor, Tensor]:
    grad, x = grad.contiguous(), x.contiguous()
    # a grid of 0 programs is an invalid launch
    if x.numel() == 0:
        return torch.empty_like(x), x.new_zeros(dweight + dbias, n, dtype=torch.float32)
    # a kernel's pointer has to be valid, also where nothing is loaded
    w, a = contiguous_or(x, weight), contiguous_or(x, added)
    dtypes = grad.dtype, x.dtype, w.dtype, a.dtype
    widest = max(grad.itemsize, x.itemsize, a.itemsize)
    flags = added is not None, len(stats) == 2, weight is not None, dweight, dbias
    run = _backward(x.shape, n, widest, dtypes, *flags)
    dx, sums = run(grad, x, w, stats, a)
    # the partial sums are added by one more launch in one order, because atomics on floats vary
    return dx, reduce.sum_triton(sums, (1,), False, torch.float32)


def norm_backward_torch(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    n: int,
    dweight: bool,
    dbias: bool,
    added: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if x.numel() == 0:
        return torch.empty_like(x), x.new_zeros(dweight + dbias, n, dtype=torch.float32)
    g, lines = grad.reshape(-1, n).float(), x.reshape(-1, n).float()
    w = lines.new_ones(n) if weight is None else weight.reshape(-1).float()
    rstd = stats[-1].unsqueeze(1)
    if len(stats) == 2:
        # torch has this function for layer_norm alone, so rms_norm is written out below
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(
            g,
            lines,
            (n,),
            stats[0].unsqueeze(1),
            rstd,
            w,
            w,  # stands for the bias, of which only the shape is read
            [True, dweight, dbias],
        )
    else:
        h = lines * rstd
        dx = rstd * (g * w - h * line_sums(g * w * h, 1, keepdim=True) / n)
        dw, db = (g * h).sum(0), g.sum(0)
    dx = dx.view(x.shape) if added is None else dx.view(x.shape) + added
    sums = [s for s, wanted in ((dw, dweight), (db, dbias)) if wanted]
    return dx.to(x.dtype), torch.stack(sums) if sums else x.new_empty(0, n, dtype=torch.float32)


def norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    n: int,
    dweight: bool,
    dbias: bool,
    added: Tensor | None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of ``norm`` in FP32; the gradient of x is rounded once.

    Args:
        grad: gradient of the result, of the shape of ``x``.
        x: input of ``norm``.
        weight: weight of ``norm``, or None.
        stats: statistics that ``norm`` returned.
        n: elements of a line.
        dweight: whether the gradient of the weight is wanted.
        dbias: whether the gradient of the bias is wanted.
        added: another gradient of x, which is added to the gradient through the norm, or None.
        backend: "auto", "triton" or "eager".

    Returns:
        The gradient of x, in its dtype, and the wanted gradients of weight and bias, FP32 of shape
        [wanted, n].
    """
    return NORM_BACKWARD(backend, grad, x, weight, stats, n, dweight, dbias, added)


def _sample(center: bool, affine: bool) -> Sample:
    """Return the sample's call on gradients of lines; rms_norm has an added gradient, too."""

    def args(grad: Tensor, dim: int) -> tuple[Any, ...]:
        lines, weight, _, n, eps, *_ = _norm.line_args(grad, dim, center, affine)
        # x is small, because eager torch adds up grad * weight * x and
        # then cancels the part of x's mean
        x = lines.flip(-1) / 64
        stats = _norm.norm_torch(x.contiguous(), None, None, n, eps, center, x.dtype)[1]
        added = None if center else lines.roll(1, -1)
        return lines, x, weight, stats, n, affine, affine and center, added

    name = "layer_norm" if center else "add_rms_norm"
    sample = Sample(args, any_order=True, rows_only=True, variant=name)
    if affine:
        return sample._replace(variant=f"{name} affine")
    return sample._replace(reads=4 if center else 6, writes=2, of_line=(4 + 4 * center, 0))


NORM_BACKWARD = TraceableOp(
    norm_backward_triton,
    norm_backward_torch,
    [_sample(center, affine) for center in (True, False) for affine in (False, True)],
    left_to_inductor=True,
)


def shipped() -> Iterator[Shipped]:
    """Yield the calls whose builds are checked, for cases of the forward."""
    for name, x, w, center in _norm.shipped_cases():
        n = len(w)
        if n in (256, 16384):
            continue
        stats = torch.empty(1 + center, len(x), device="meta")
        added = x if n in (8192, 65536) else None
        args = x, x, w, stats, n, True, center, added
        yield Shipped(f"{name} backward", norm_backward_triton, args, 128, 40, 0)
