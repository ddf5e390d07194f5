"""Gradient of cross_entropy from the logits and two numbers of each line, in FP32. 4 B/element.

    grad * (exp(x - m - log(s)) - (1 - smoothing) * (class == target) - smoothing / classes)

The incoming gradient, and with it a loss scale, is applied before the result is rounded: so much is
lost as the scale does not save, and no more. Elements know nothing of one another: every tile has a
program of its own.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tritonamp.kernels._implementations import TraceableOp
from tritonamp.kernels._launch import Launch
from tritonamp.kernels._lines import (
    WIDEST,
    cached_by_shape,
    column_offsets,
    edge_offsets,
    line_lead,
    line_offsets,
    tiling,
    whole_vectors,
)
from tritonamp.kernels._sample import Sample
from tritonamp.kernels._shipped import Shipped
from tritonamp.kernels.cross_entropy import sample_numbers, sample_targets, shipped_cases
from tritonamp.kernels.device import tl, triton

PER_THREAD = 16  # elements that a thread holds
LONGEST = 4096  # line that is one tile


@triton.jit
def _write_tile(
    x_ptr, dx_ptr, offs, counts, mask, hit, g, m, log2_s, off, more, ROW_MAJOR: tl.constexpr
):  # fmt: skip
    """Write a tile. Of lines that do not count g is 0; rows are not read then, what is there is."""
    read = counts & mask if ROW_MAJOR else mask  # neighbours in memory are read together
    x = tl.load(x_ptr + offs, mask=read, other=0.0, eviction_policy="evict_first").to(tl.float32)
    p = tl.exp2((x - m) * 1.4426950408889634 - log2_s)
    dx = g * (p - (off + tl.where(hit, more, 0.0)))
    if not ROW_MAJOR:
        dx = tl.where(counts, dx, 0.0)
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("rows", "n", "blocks", "tiles", "count", "off", "more"))
def cross_entropy_backward_kernel(
    x_ptr, target_ptr, grad_ptr, stats_ptr, dx_ptr, rows, n, blocks, tiles, count, off, more,
    IGNORE: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile; ``tiles`` programs follow one another along the same lines.

    ``off`` is the probability that a class should have, the target that and ``more``.
    """
    pid, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    lines, numbers, valid = line_offsets(pid, rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS)
    target = tl.load(target_ptr + numbers, mask=valid, other=IGNORE)
    counts = valid & (target != IGNORE)
    g = tl.load(grad_ptr + numbers, mask=counts, other=0.0)
    m = tl.load(stats_ptr + numbers, mask=counts, other=0.0)
    log2_s = tl.load(stats_ptr + count + numbers, mask=counts, other=0.0) * 1.4426950408889634
    begin = line_lead(pid, n, ALIGN, VEC)
    first, last = whole_vectors(begin, begin + n, ALIGN, VEC)
    at = first + tile * BLOCK
    columns, exist = column_offsets(at, last, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
    # a target in another tile is no column of this one
    hit = tl.arange(0, BLOCK)[None, :] == (target + begin - at).to(tl.int32)
    _write_tile(
        x_ptr, dx_ptr, lines + columns, counts, valid & exist, hit,
        g, m, log2_s, off, more, ROW_MAJOR,
    )  # fmt: skip
    if ALIGN < VEC:  # noqa: SIM102  # constant, the other not
        if tile == 0:
            edges, there = edge_offsets(begin, begin + n, first, last, VEC)
            hits = edges == target + begin
            _write_tile(
                x_ptr, dx_ptr, lines + edges, counts, valid & there, hits,
                g, m, log2_s, off, more, ROW_MAJOR,
            )  # fmt: skip


@cached_by_shape
def _launch(
    shape: tuple[int, ...], given: torch.dtype, dim: int, ignore_index: int, smoothing: float
) -> Launch:
    """Return the launch for logits of a shape and of the dtype ``given``."""
    t = tiling(shape, dim, dim, PER_THREAD, LONGEST, WIDEST // given.itemsize)
    tiles = -(-t.n // t.layout[-1])
    return Launch(
        cross_entropy_backward_kernel,
        (t.grid[0] * tiles, 1, 1),
        (*t.sizes, tiles, t.lines, smoothing / t.n, 1.0 - smoothing),
        (ignore_index, *t.layout),
        t.num_warps,
    )


def cross_entropy_backward_triton(
    x: Tensor,
    target: Tensor,
    grad: Tensor,
    stats: Tensor,
    dim: int,
    ignore_index: int,
    smoothing: float,
) -> Tensor:
    x, target, grad = x.contiguous(), target.contiguous(), grad.contiguous()
    dx = torch.empty_like(x)
    if x.numel():
        launch = _launch(x.shape, x.dtype, dim, ignore_index, float(smoothing))
        launch(x, target, grad, stats, dx)
    return dx


def cross_entropy_backward_torch(
    x: Tensor,
    target: Tensor,
    grad: Tensor,
    stats: Tensor,
    dim: int,
    ignore_index: int,
    smoothing: float,
) -> Tensor:
    ignored = (target == ignore_index).unsqueeze(dim)
    m, log_s = (number.unsqueeze(dim) for number in stats)
    p = (x - m - log_s).exp()
    index = target.unsqueeze(dim).masked_fill(ignored, 0)
    off = smoothing / max(x.shape[dim], 1)
    wanted = torch.full_like(p, off)
    if x.numel():
        wanted.scatter_(dim, index, 1.0 - smoothing + off)
    return (grad.unsqueeze(dim) * (p - wanted)).masked_fill(ignored, 0.0).to(x.dtype)


def cross_entropy_backward(
    x: Tensor,
    target: Tensor,
    grad: Tensor,
    stats: Tensor,
    dim: int,
    ignore_index: int,
    smoothing: float,
    backend: str = "auto",
) -> Tensor:
    """Compute the gradient of cross_entropy in FP32, rounded once to the logits' dtype.

    Args:
        x: the logits, and the other arguments of ``cross_entropy``.
        target: int64 classes.
        grad: of the losses, their shape and dtype.
        stats: what ``cross_entropy`` returned.
        dim: of the classes.
        ignore_index: lines with this target have gradient 0.
        smoothing: share of probability that is spread over all classes.
        backend: "auto", "triton" or "eager".
    """
    return CROSS_ENTROPY_BACKWARD(backend, x, target, grad, stats, dim, ignore_index, smoothing)


def _sample(smoothing: float) -> Sample:
    ignored = smoothing > 0

    def args(x: Tensor, dim: int) -> tuple[object, ...]:
        target = sample_targets(x, dim, ignored)
        losses, stats = sample_numbers(x, target, dim)
        grad = torch.linspace(-2, 2, losses.numel(), device=x.device).view(losses.shape)
        return x, target, grad, stats, dim, -100, smoothing

    if ignored:
        return Sample(args, variant="smoothed", any_order=True)
    return Sample(args, reads=2, writes=2, of_line=(8 + 4 + 8, 0), any_order=True)


CROSS_ENTROPY_BACKWARD = TraceableOp(
    cross_entropy_backward_triton,
    cross_entropy_backward_torch,
    [_sample(smoothing) for smoothing in (0.0, 0.1)],
)


def shipped() -> Iterator[Shipped]:
    """Yield the calls whose builds are checked, for the forward's cases."""
    for name, x, target, smoothing in shipped_cases():
        if smoothing:
            continue  # the same kernel
        grad = torch.empty(target.shape, device="meta")
        stats = torch.empty((2, *target.shape), device="meta")
        args = x, target, grad, stats, 1, -100, smoothing
        yield Shipped(f"{name} backward", cross_entropy_backward_triton, args, 64, 16, 1)
