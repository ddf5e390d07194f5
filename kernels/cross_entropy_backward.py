"""Gradient of cross_entropy from the logits and the numbers of each line, in FP32. 4 B/element.

With p = exp((x - m) / T - log(s)) and the incoming gradients g of the loss and h of the entropy it
is

    (g * (p - (1 - smoothing) * (class == target) - smoothing / classes)
     - h * p * (log(p) + entropy)) / T.

The incoming gradients, and with them a loss scale, are applied in FP32 and the result is rounded
once. Each tile has a program of its own because an element needs no other element.
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
from tritonamp.kernels.cross_entropy import (
    CROSS_ENTROPY,
    LOG2_E,
    VARIANTS,
    Options,
    sample_targets,
    shipped_cases,
)
from tritonamp.kernels.device import tl, triton

PER_THREAD = 16  # elements that a thread holds
LONGEST = 4096  # elements of the longest line that is one tile


@triton.jit
def _write_tile(
    x_ptr, dx_ptr, offs, counts, mask, hit, g, h, m, log2_s, entropy, scale, off, more,
    ROW_MAJOR: tl.constexpr, SMOOTH: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Write a tile; numbers of the lines are divided by the temperature and in base 2."""
    # An ignored row is not read, and its gradient is 0 because g and h are. Columns share sectors
    # of memory, so that a gap saves nothing.
    read = counts & mask if ROW_MAJOR else mask
    x = tl.load(x_ptr + offs, mask=read, other=0.0, eviction_policy="evict_first").to(tl.float32)
    log2_p = (x - m) * scale - log2_s
    p = tl.exp2(log2_p)
    # Without smoothing these are literals, which take no registers.
    wanted = tl.where(hit, 1.0, 0.0)
    if SMOOTH:
        wanted = off + tl.where(hit, more, 0.0)
    # p - 1 is exact from 1/2 on, where g - g * p would cancel.
    dx = g * (p - wanted)
    if ENTROPY:
        # Of a logit of -inf the product 0 * inf would be NaN.
        dx -= tl.where(p == 0.0, 0.0, h * p * (log2_p + entropy))
    if not ROW_MAJOR:
        # Logits of an ignored line may be inf or NaN.
        dx = tl.where(counts, dx, 0.0)
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=("rows", "n", "blocks", "tiles", "count", "off", "more", "scale", "inverse")
)
def cross_entropy_backward_kernel(
    x_ptr, target_ptr, grad_ptr, stats_ptr, dx_ptr, rows, n, blocks, tiles, count,
    off, more, scale, inverse,
    IGNORE: tl.constexpr, SMOOTH: tl.constexpr, ENTROPY: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one tile; ``tiles`` programs follow one another along the same lines.

    A class should have the probability ``off``, the target ``more`` in addition. ``inverse`` is
    1 / T, ``scale`` log2(e) / T. IGNORE is None where every target counts.
    """
    pid, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    lines, numbers, valid = line_offsets(pid, rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS)
    target = tl.load(target_ptr + numbers, mask=valid, other=0)
    counts = valid if IGNORE is None else valid & (target != IGNORE)
    g = tl.load(grad_ptr + numbers, mask=counts, other=0.0) * inverse
    m = tl.load(stats_ptr + numbers, mask=counts, other=0.0)
    log2_s = tl.load(stats_ptr + count + numbers, mask=counts, other=0.0) * 1.4426950408889634
    h, entropy = g, log2_s
    if ENTROPY:
        # In base 2 an element takes one product less. The factor of h turns the base back.
        h = tl.load(grad_ptr + count + numbers, mask=counts, other=0.0)
        h = h * inverse * 0.6931471805599453
        entropy = tl.load(stats_ptr + 2 * count + numbers, mask=counts, other=0.0)
        entropy = entropy * 1.4426950408889634
    # Tiles begin with a line's first whole vector because other tiles would be loaded element by
    # element.
    begin = line_lead(pid, n, ALIGN, VEC)
    first, last = whole_vectors(begin, begin + n, ALIGN, VEC)
    at = first + tile * BLOCK
    columns, exist = column_offsets(at, last, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
    # A target in another tile is no column of this one.
    hit = tl.arange(0, BLOCK)[None, :] == (target + begin - at).to(tl.int32)
    _write_tile(
        x_ptr, dx_ptr, lines + columns, counts, valid & exist, hit,
        g, h, m, log2_s, entropy, scale, off, more, ROW_MAJOR, SMOOTH, ENTROPY,
    )  # fmt: skip
    if ALIGN < VEC:  # noqa: SIM102  # constant, the other not
        # The first program of a line has its edges, of which there are at most two vectors.
        if tile == 0:
            edges, there = edge_offsets(begin, begin + n, first, last, VEC)
            hits = edges == target + begin
            _write_tile(
                x_ptr, dx_ptr, lines + edges, counts, valid & there, hits,
                g, h, m, log2_s, entropy, scale, off, more, ROW_MAJOR, SMOOTH, ENTROPY,
            )  # fmt: skip


@cached_by_shape
def _launch(shape: tuple[int, ...], given: torch.dtype, dim: int, options: Options) -> Launch:
    """Return the launch for logits of a shape and of the dtype ``given``."""
    t = tiling(shape, dim, dim, PER_THREAD, LONGEST, WIDEST // given.itemsize)
    tiles = -(-t.n // t.layout[-1])
    _, smoothing, temperature, _ = options
    wanted = smoothing / t.n, 1.0 - smoothing
    return Launch(
        cross_entropy_backward_kernel,
        (t.grid[0] * tiles, 1, 1),
        (*t.sizes, tiles, t.lines, *wanted, LOG2_E / temperature, 1 / temperature),
        (*options.constants(), *t.layout),
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
    temperature: float,
) -> Tensor:
    x, target, grad = x.contiguous(), target.contiguous(), grad.contiguous()
    dx = torch.empty_like(x)
    if x.numel():
        options = Options(ignore_index, smoothing, temperature, len(grad) == 2)
        _launch(x.shape, x.dtype, dim, options)(x, target, grad, stats, dx)
    return dx


def cross_entropy_backward_torch(
    x: Tensor,
    target: Tensor,
    grad: Tensor,
    stats: Tensor,
    dim: int,
    ignore_index: int,
    smoothing: float,
    temperature: float,
) -> Tensor:
    ignored = (target == ignore_index).unsqueeze(dim)
    m, log_s, *entropy = (number.unsqueeze(dim) for number in stats)
    g, *h = (number.unsqueeze(dim) / temperature for number in grad)
    log_p = (x - m) / temperature - log_s
    p = log_p.exp()
    index = target.unsqueeze(dim).masked_fill(ignored, 0)
    off = smoothing / max(x.shape[dim], 1)
    wanted = torch.full_like(p, off)
    if x.numel():
        wanted.scatter_(dim, index, 1.0 - smoothing + off)
    # p - 1 is exact from 1/2 on, where g - g * p would cancel.
    dx = g * (p - wanted)
    if h:
        # Of a logit of -inf the product 0 * inf would be NaN.
        dx -= (h[0] * p * (log_p + entropy[0])).masked_fill(p == 0, 0.0)
    return dx.masked_fill(ignored, 0.0).to(x.dtype)


def cross_entropy_backward(
    x: Tensor,
    target: Tensor,
    grad: Tensor,
    stats: Tensor,
    dim: int,
    ignore_index: int,
    smoothing: float,
    temperature: float,
    backend: str = "auto",
) -> Tensor:
    """Compute the gradient of cross_entropy in FP32, rounded once to the logits' dtype.

    Args:
        x: the logits.
        target: the int64 classes.
        grad: incoming gradients in the losses' dtype, with a dimension of 1 or 2 in front: of the
            losses, then of the entropies.
        stats: the statistics from ``cross_entropy``.
        dim: dimension of the classes.
        ignore_index: target of lines with gradient 0. Such rows are not read.
        smoothing: share of the target's probability that is spread over all classes, 0 to 1.
        temperature: divisor of the logits, above 0.
        backend: "auto", "triton" or "eager".
    """
    return CROSS_ENTROPY_BACKWARD(
        backend, x, target, grad, stats, dim, ignore_index, smoothing, temperature
    )


def _sample(variant: str) -> Sample:
    def args(x: Tensor, dim: int) -> tuple[object, ...]:
        target = sample_targets(x, dim, variant == "smoothed")
        *options, entropy = VARIANTS[variant]
        _, stats = CROSS_ENTROPY.torch_function(x, target, dim, *VARIANTS[variant])
        grad = torch.linspace(-2, 2, (1 + entropy) * target.numel(), device=x.device)
        return x, target, grad.view(1 + entropy, *target.shape), stats, dim, *options

    if variant in ("smoothed", "entropy"):
        return Sample(args, any_order=True, variant=variant)
    return Sample(args, 2, 2, of_line=(8 + 4 + 8, 0), any_order=True, variant=variant)


CROSS_ENTROPY_BACKWARD = TraceableOp(
    cross_entropy_backward_triton, cross_entropy_backward_torch, list(map(_sample, VARIANTS))
)


def shipped() -> Iterator[Shipped]:
    """Yield the calls whose builds are checked, for the forward's cases."""
    for name, variant, x, target in shipped_cases():
        *options, entropy = VARIANTS[variant]
        grad = torch.empty((1 + entropy, *target.shape), device="meta")
        stats = torch.empty((2 + entropy, *target.shape), device="meta")
        most = 23 if entropy else 16
        args = x, target, grad, stats, 1, *options
        yield Shipped(f"{name} backward", cross_entropy_backward_triton, args, 64, most, 1)
