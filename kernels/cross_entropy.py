"""cross_entropy over one dimension of half logits: FP32 arithmetic, 2 B/element.

With m the largest logit of a line and s = sum(exp(x - m)) the loss is

    (1 - smoothing) * (m - x[target] + log(s)) + smoothing * (m - mean(x) + log(s)).

m and log(s) are kept for the gradient one by one: added up in FP32, the log-sum-exp of logits near
65504 would be off by 2**-8. A line is read once, in several tiles where it is long. Lines whose
target is ignored are not read, where they are rows.
"""

import math
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
from tritonamp.kernels._shipped import Shipped, build_name
from tritonamp.kernels.device import tl, triton
from tritonamp.kernels.softmax import exp_shifted

PER_THREAD = 32  # elements that a thread holds
LONGEST = 8192  # line that is one tile
MAX_REGISTERS = 64, 80  # of a thread: 64 for whole rows without smoothing, which would take 113


@triton.jit
def _add_tile(x_ptr, mask, m, s, far, seen, SMOOTH: tl.constexpr):
    """Return the maximum m, the sum s of exp(x - m) and that of m - x, with a tile more.

    ``seen`` columns came before. Where m is -inf the sums are of exp(x) and -x.
    """
    x = tl.load(x_ptr, mask=mask, other=-float("inf"), eviction_policy="evict_first").to(tl.float32)
    largest = tl.maximum(m, tl.max(x, 1, keep_dims=True))
    # of a line that is all -inf so far x - m would be NaN
    base = tl.where(largest == -float("inf"), 0.0, largest)
    s = s * exp_shifted(m - base, 0.0) + tl.sum(exp_shifted(x - base, 0.0), 1, keep_dims=True)
    if SMOOTH:
        # what was summed up from the old maximum moves to the new one, for each column seen
        before = tl.where(m == -float("inf"), 0.0, m)
        tile = tl.sum(tl.where(mask, base - x, 0.0), 1, keep_dims=True)
        far += tile + seen.to(tl.float32) * (base - before)
    return largest, s, far


@triton.jit(do_not_specialize=("rows", "n", "blocks", "count", "smoothing"))
def cross_entropy_kernel(
    x_ptr, target_ptr, minus_ptr, losses_ptr, stats_ptr, rows, n, blocks, count, smoothing,
    IGNORE: tl.constexpr, SMOOTH: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Go along the lines of a program, with the sums so far rescaled to each new maximum."""
    lines, numbers, valid = line_offsets(
        tl.program_id(0), rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS
    )
    counts = valid & (tl.load(target_ptr + numbers, mask=valid, other=IGNORE) != IGNORE)
    minus = tl.load(minus_ptr + numbers, mask=counts, other=0.0)
    read = counts if ROW_MAJOR else valid  # neighbours in memory are read together
    begin = line_lead(tl.program_id(0), n, ALIGN, VEC)
    first, last = whole_vectors(begin, begin + n, ALIGN, VEC)
    m = tl.full([ROWS, 1], -float("inf"), tl.float32)
    s = tl.zeros([ROWS, 1], tl.float32)
    far = tl.zeros([ROWS, 1], tl.float32)
    for at in range(first, last, BLOCK):
        columns, exist = column_offsets(at, last, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
        m, s, far = _add_tile(x_ptr + lines + columns, read & exist, m, s, far, at - first, SMOOTH)
    if ALIGN < VEC:
        edges, there = edge_offsets(begin, begin + n, first, last, VEC)
        m, s, far = _add_tile(x_ptr + lines + edges, read & there, m, s, far, last - first, SMOOTH)
    m = tl.where(s == s, m, s)  # maxima pass over NaN, sums do not
    log_s = tl.log2(s) * 0.6931471805599453
    loss = log_s + (m + minus)
    if SMOOTH:
        loss = (1.0 - smoothing) * loss + smoothing * (log_s + far / n)
    tl.store(losses_ptr + numbers, tl.where(counts, loss, 0.0), mask=valid)
    tl.store(stats_ptr + numbers, tl.where(counts, m, 0.0), mask=valid)
    tl.store(stats_ptr + count + numbers, tl.where(counts, log_s, 0.0), mask=valid)


@cached_by_shape
def _launch(
    shape: tuple[int, ...], given: torch.dtype, dim: int, ignore_index: int, smoothing: float
) -> Launch:
    """Return the launch for logits of a shape and of the dtype ``given``."""
    t = tiling(shape, dim, dim, PER_THREAD, LONGEST, WIDEST // given.itemsize)
    return Launch(
        cross_entropy_kernel,
        (t.grid[0], 1, 1),
        (*t.sizes, t.lines, smoothing),
        (ignore_index, smoothing > 0, *t.layout),
        t.num_warps,
        MAX_REGISTERS[not (t.whole and t.layout[0] and smoothing == 0)],
    )


def cross_entropy_triton(
    x: Tensor, target: Tensor, dim: int, ignore_index: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    x, target = x.contiguous(), target.contiguous()
    losses = x.new_empty(target.shape, dtype=torch.float32)
    stats = x.new_empty((2, *target.shape), dtype=torch.float32)
    if not x.numel():
        return losses.zero_(), stats.zero_()
    minus = minus_logits_of_targets(x, target, dim, ignore_index).float()
    launch = _launch(x.shape, x.dtype, dim, ignore_index, float(smoothing))
    launch(x, target, minus, losses, stats)
    return losses, stats


def minus_logits_of_targets(x: Tensor, target: Tensor, dim: int, ignore_index: int) -> Tensor:
    """Return -x[target], 0 for targets that are ignored.

    torch's own kernel notices a target that is no class: by an error on a CPU, on CUDA by an
    assertion on the device. One in a Triton kernel would be there in debug mode only. The operation
    is that below ``nll_loss``, which autocast would widen.
    """
    at = dim % x.dim()
    outer, inner = math.prod(x.shape[:at]), math.prod(x.shape[at + 1 :])
    lines, targets = x.reshape(outer, x.shape[at], 1, inner), target.reshape(outer, 1, inner)
    picked, _ = torch.ops.aten.nll_loss2d_forward(lines, targets, None, 0, ignore_index)
    return picked.view(target.shape)


def cross_entropy_torch(
    x: Tensor, target: Tensor, dim: int, ignore_index: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if not x.shape[dim]:
        return wide.new_zeros(target.shape), wide.new_zeros((2, *target.shape))
    m = wide.amax(dim, keepdim=True)
    d = wide - m
    log_s = d.exp().sum(dim).log()
    loss = log_s + minus_logits_of_targets(d, target, dim, ignore_index)
    if smoothing > 0:
        loss = (1.0 - smoothing) * loss + smoothing * (log_s - d.mean(dim))
    ignored = target == ignore_index
    stats = torch.stack([m.squeeze(dim), log_s])
    return loss.masked_fill(ignored, 0.0), stats.masked_fill(ignored, 0.0)


def cross_entropy(
    x: Tensor, target: Tensor, dim: int, ignore_index: int, smoothing: float, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Compute the cross entropy of each line of logits along ``dim`` in FP32.

    Args:
        x: logits, float16, bfloat16 or float32 (the eager twin: also float64), any shape, strides.
        target: int64 classes, contiguous or not, the shape of ``x`` without ``dim``.
        dim: of the classes.
        ignore_index: lines with this target have loss 0, and are not looked at.
        smoothing: share of the target's probability that is spread over all classes, 0 to 1.
        backend: "auto", "triton" or "eager".

    Returns:
        losses of the target's shape, float32 (of float64: float64), and, with a dimension of 2 in
        front, the maximum m of each line and log(sum(exp(x - m))), for the gradient.

    Raises:
        IndexError: a target is no class; on CUDA it is a failed assertion on the device.
    """
    return CROSS_ENTROPY(backend, x, target, dim, ignore_index, smoothing)


def sample_targets(x: Tensor, dim: int, ignored: bool) -> Tensor:
    """Return classes for the lines of ``x``; every third one is -100 where some are ``ignored``."""
    lines = x.sum(dim, dtype=torch.float32)
    n = x.shape[dim]
    number = torch.arange(lines.numel(), device=x.device).view(lines.shape)
    if not n:
        return torch.full_like(number, -100)
    target = (7 * number + n - 1) % n
    return target.where(number % 3 > 0, -100) if ignored else target


def sample_numbers(x: Tensor, target: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return losses and numbers of the lines of ``x``, to take a gradient of."""
    return cross_entropy_torch(x, target, dim, -100, 0.0)


def _sample(smoothing: float) -> Sample:
    ignored = smoothing > 0

    def args(x: Tensor, dim: int) -> tuple[object, ...]:
        return x, sample_targets(x, dim, ignored), dim, -100, smoothing

    if ignored:
        return Sample(args, any_order=True, variant="smoothed")
    return Sample(args, reads=2, writes=0, of_line=(8 + 4, 4 + 8), any_order=True)


CROSS_ENTROPY = TraceableOp(
    cross_entropy_triton, cross_entropy_torch, [_sample(smoothing) for smoothing in (0.0, 0.1)]
)


def shipped_cases() -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """Yield name, logits, targets and smoothing of the calls whose builds are checked."""
    half, bf16 = torch.float16, torch.bfloat16
    cases: list[tuple[tuple[int, ...], torch.dtype, float]] = [
        *(((4096, n), half, 0.0) for n in (32, 1000, 8192, 50257)),
        *(((4096, n), half, 0.1) for n in (8192, 50257)),
        ((4096, 8192), bf16, 0.0),
        ((4, 64, 4096), half, 0.0),
    ]
    for shape, dtype, smoothing in cases:
        x = torch.empty(shape, dtype=dtype, device="meta")
        target = torch.empty((shape[0], *shape[2:]), dtype=torch.int64, device="meta")
        case = "inner" if len(shape) > 2 else f"n={shape[1]}"
        name = build_name("cross_entropy", dtype, case, smoothing > 0 and "smoothed")
        yield name, x, target, smoothing


def shipped() -> Iterator[Shipped]:
    """Yield the calls whose builds are checked."""
    for name, x, target, smoothing in shipped_cases():
        plain = not smoothing and x.dim() == 2
        registers = 64 if plain and x.shape[1] <= LONGEST else 80
        args = x, target, 1, -100, smoothing
        yield Shipped(name, cross_entropy_triton, args, registers, 14 if plain else 17, 1)
