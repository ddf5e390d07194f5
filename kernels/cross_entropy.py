"""cross_entropy over one dimension of half logits: FP32 arithmetic, 2 B/element.

With T the temperature, m a line's largest logit, e = exp((x - m) / T) and s = sum(e), the loss and
the entropy of the line are

    (1 - smoothing) * ((m - x[target]) / T + log(s)) + smoothing * ((m - mean(x)) / T + log(s)),
    log(s) + sum(e * (m - x)) / (s * T).

Without smoothing the loss is minus the log-probability of the target. A line is read once, in
several tiles if it is long.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tritonamp.kernels._implementations import TraceableOp, line_sums
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

PER_THREAD = 32  # elements that a thread holds
LONGEST = 8192  # elements of the longest line that is one tile
LOG2_E = 1.4426950408889634
NO_CLASS = -(1 << 62)  # ``ignore_index`` of losses that refuse every target that is no class
# Whole rows fit 64 registers. Smoothing and entropies take more, and 113 where nothing limits them.
MAX_REGISTERS = 64, 80


@triton.jit
def _add_tile(
    x_ptr, mask, m, s, gaps, spread, seen, scale, SMOOTH: tl.constexpr, ENTROPY: tl.constexpr
):  # fmt: skip
    """Return the sums of each line with one tile more.

    m is the maximum, s the sum of e = exp2((x - m) * scale), gaps the sum of m - x, spread the sum
    of e * (m - x). ``seen`` columns came before. As long as m is -inf, 0 stands in for it.
    """
    # nothing reads these logits again before the backward
    x = tl.load(x_ptr, mask=mask, other=-float("inf"), eviction_policy="evict_first").to(tl.float32)
    largest = tl.maximum(m, tl.max(x, 1, keep_dims=True))
    # -inf - -inf would be NaN
    base = tl.where(largest == -float("inf"), 0.0, largest)
    before = tl.where(m == -float("inf"), 0.0, m)
    # The scale multiplies differences because x * scale - m * scale would be off by 5e-3 near 6e4.
    e, shrink = tl.exp2((x - base) * scale), tl.exp2((m - base) * scale)
    if SMOOTH:
        # Each column seen is further from the new maximum, by as much as the maximum grew.
        tile = tl.sum(tl.where(mask, base - x, 0.0), 1, keep_dims=True)
        gaps += tile + seen.to(tl.float32) * (base - before)
    if ENTROPY:
        # Each term e * (m - x) shrinks with its e, and its distance grows with the maximum. Of a
        # logit of -inf the product 0 * inf would be NaN.
        tile = tl.where(e == 0.0, 0.0, e * (base - x))
        spread = shrink * (spread + s * (base - before)) + tl.sum(tile, 1, keep_dims=True)
    return largest, s * shrink + tl.sum(e, 1, keep_dims=True), gaps, spread


@triton.jit(do_not_specialize=("rows", "n", "blocks", "count", "smoothing", "scale", "inverse"))
def cross_entropy_kernel(
    x_ptr, target_ptr, minus_ptr, losses_ptr, stats_ptr, rows, n, blocks, count,
    smoothing, scale, inverse,
    IGNORE: tl.constexpr, SMOOTH: tl.constexpr, ENTROPY: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Walk along the lines of a program, with the sums so far rescaled to each new maximum.

    ``inverse`` is 1 / T, ``scale`` log2(e) / T. IGNORE is None where every target counts.
    """
    lines, numbers, valid = line_offsets(
        tl.program_id(0), rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS
    )
    counts = valid
    if IGNORE is not None:
        counts = valid & (tl.load(target_ptr + numbers, mask=valid, other=IGNORE) != IGNORE)
    minus = tl.load(minus_ptr + numbers, mask=counts, other=0.0)
    # An ignored row costs no bytes. Columns share sectors of memory, so that a gap saves nothing.
    read = counts if ROW_MAJOR else valid
    begin = line_lead(tl.program_id(0), n, ALIGN, VEC)
    first, last = whole_vectors(begin, begin + n, ALIGN, VEC)
    m = tl.full([ROWS, 1], -float("inf"), tl.float32)
    s = tl.zeros([ROWS, 1], tl.float32)
    gaps, spread = s, s
    for at in range(first, last, BLOCK):
        columns, exist = column_offsets(at, last, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
        m, s, gaps, spread = _add_tile(
            x_ptr + lines + columns, read & exist, m, s, gaps, spread, at - first, scale,
            SMOOTH, ENTROPY,
        )  # fmt: skip
    if ALIGN < VEC:
        edges, there = edge_offsets(begin, begin + n, first, last, VEC)
        m, s, gaps, spread = _add_tile(
            x_ptr + lines + edges, read & there, m, s, gaps, spread, last - first, scale,
            SMOOTH, ENTROPY,
        )  # fmt: skip
    # A maximum passes over NaN, a sum does not.
    m = tl.where(s == s, m, s)
    log_s = tl.log2(s) * 0.6931471805599453
    loss = (m + minus) * inverse + log_s
    if SMOOTH:
        loss = (1.0 - smoothing) * loss + smoothing * (log_s + gaps / n * inverse)
    tl.store(losses_ptr + numbers, tl.where(counts, loss, 0.0), mask=valid)
    # m and log(s) are kept one by one because their FP32 sum is off by 2**-8 near 65504.
    tl.store(stats_ptr + numbers, tl.where(counts, m, 0.0), mask=valid)
    tl.store(stats_ptr + count + numbers, tl.where(counts, log_s, 0.0), mask=valid)
    if ENTROPY:
        entropy = log_s + spread / s * inverse
        tl.store(stats_ptr + 2 * count + numbers, tl.where(counts, entropy, 0.0), mask=valid)


class Options(NamedTuple):
    """The arguments of ``cross_entropy`` that its kernels take as constants or numbers."""

    ignore_index: int
    smoothing: float
    temperature: float
    entropy: bool

    def constants(self) -> tuple[int | None, bool, bool]:
        """Return IGNORE, SMOOTH and ENTROPY."""
        # A kernel does not compare targets if none can be ignored.
        ignored = None if self.ignore_index == NO_CLASS else self.ignore_index
        return ignored, self.smoothing > 0, self.entropy


@cached_by_shape
def _launch(shape: tuple[int, ...], given: torch.dtype, dim: int, options: Options) -> Launch:
    """Return the launch for logits of a shape and of the dtype ``given``."""
    t = tiling(shape, dim, dim, PER_THREAD, LONGEST, WIDEST // given.itemsize)
    _, smoothing, temperature, entropy = options
    is_plain = t.whole and t.layout[0] and smoothing == 0 and not entropy
    return Launch(
        cross_entropy_kernel,
        (t.grid[0], 1, 1),
        # float because an integer would compile another kernel
        (*t.sizes, t.lines, float(smoothing), LOG2_E / temperature, 1 / temperature),
        (*options.constants(), *t.layout),
        t.num_warps,
        MAX_REGISTERS[not is_plain],
    )


def cross_entropy_triton(
    x: Tensor,
    target: Tensor,
    dim: int,
    ignore_index: int,
    smoothing: float,
    temperature: float,
    entropy: bool,
) -> tuple[Tensor, Tensor]:
    x, target = x.contiguous(), target.contiguous()
    losses = x.new_empty(target.shape, dtype=torch.float32)
    stats = x.new_empty((2 + entropy, *target.shape), dtype=torch.float32)
    if not x.numel():
        return losses.zero_(), stats.zero_()
    minus = minus_logits_of_targets(x, target, dim, ignore_index).float()
    options = Options(ignore_index, smoothing, temperature, entropy)
    _launch(x.shape, x.dtype, dim, options)(x, target, minus, losses, stats)
    return losses, stats


def minus_logits_of_targets(x: Tensor, target: Tensor, dim: int, ignore_index: int) -> Tensor:
    """Return -x[target], and 0 for targets that are ignored."""
    # torch's own kernel refuses a target that is no class, by an error on a CPU and by a failed
    # assertion on CUDA. An assertion in a Triton kernel would exist in debug mode only.
    at = dim % x.dim()
    outer, inner = math.prod(x.shape[:at]), math.prod(x.shape[at + 1 :])
    lines, targets = x.reshape(outer, x.shape[at], 1, inner), target.reshape(outer, 1, inner)
    # This is the operation below ``nll_loss`` because autocast would widen the logits of that one.
    picked, _ = torch.ops.aten.nll_loss2d_forward(lines, targets, None, 0, ignore_index)
    return picked.view(target.shape)


def cross_entropy_torch(
    x: Tensor,
    target: Tensor,
    dim: int,
    ignore_index: int,
    smoothing: float,
    temperature: float,
    entropy: bool,
) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if not x.shape[dim]:
        return wide.new_zeros(target.shape), wide.new_zeros((2 + entropy, *target.shape))
    m = wide.amax(dim, keepdim=True)
    d = (wide - m) / temperature
    e = d.exp()
    s = line_sums(e, dim)
    log_s = s.log()
    loss = log_s + minus_logits_of_targets(d, target, dim, ignore_index)
    if smoothing > 0:
        loss = (1.0 - smoothing) * loss + smoothing * (log_s - line_sums(d, dim) / x.shape[dim])
    # m and log(s) are kept one by one because their FP32 sum is off by 2**-8 near 65504.
    numbers = [m.squeeze(dim), log_s]
    if entropy:
        # Of a logit of -inf the product 0 * inf would be NaN.
        numbers.append(log_s - line_sums((e * d).masked_fill(e == 0, 0.0), dim) / s)
    ignored = target == ignore_index
    return loss.masked_fill(ignored, 0.0), torch.stack(numbers).masked_fill(ignored, 0.0)


def cross_entropy(
    x: Tensor,
    target: Tensor,
    dim: int,
    ignore_index: int,
    smoothing: float,
    temperature: float,
    entropy: bool,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute the cross entropy of each line of logits along ``dim`` in FP32, and its entropy.

    Args:
        x: logits of any shape and strides, float16, bfloat16 or float32 (eager twin: also float64).
        target: int64 classes in the shape of ``x`` without ``dim``, contiguous or not.
        dim: dimension of the classes.
        ignore_index: target of lines with loss 0. Such rows are not read. ``NO_CLASS``: none.
        smoothing: share of the target's probability that is spread over all classes, 0 to 1.
        temperature: divisor of the logits, above 0.
        entropy: whether to compute the entropies of the lines.
        backend: "auto", "triton" or "eager".

    Returns:
        losses in the target's shape, float32 (from float64: float64), and statistics with a
        dimension of 2 or 3 in front: each line's maximum m, log(sum(exp((x - m) / T))), entropy.

    Raises:
        IndexError: a target is no class; on CUDA it is a failed assertion on the device.
    """
    return CROSS_ENTROPY(backend, x, target, dim, ignore_index, smoothing, temperature, entropy)


VARIANTS = {  # options of the samples
    "": Options(-100, 0.0, 1.0, False),
    "smoothed": Options(-100, 0.1, 1.0, False),
    "tokens": Options(NO_CLASS, 0.0, 1.25, False),
    "entropy": Options(NO_CLASS, 0.0, 1.25, True),
}


def sample_targets(x: Tensor, dim: int, ignored: bool) -> Tensor:
    """Return classes for the lines of ``x``; every third one is -100 if some are ``ignored``."""
    lines, n = x.sum(dim, dtype=torch.float32), x.shape[dim]
    number = torch.arange(lines.numel(), device=x.device).view(lines.shape)
    if not n:
        return torch.full_like(number, -100)
    target = (7 * number + n - 1) % n
    return target.where(number % 3 > 0, -100) if ignored else target


def _sample(variant: str) -> Sample:
    def args(x: Tensor, dim: int) -> tuple[object, ...]:
        return x, sample_targets(x, dim, variant == "smoothed"), dim, *VARIANTS[variant]

    read = {"": 8 + 4, "tokens": 4}.get(variant)
    if read is None:
        return Sample(args, any_order=True, variant=variant)
    return Sample(args, 2, 0, of_line=(read, 4 + 8), any_order=True, variant=variant)


CROSS_ENTROPY = TraceableOp(cross_entropy_triton, cross_entropy_torch, list(map(_sample, VARIANTS)))


def shipped_cases() -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """Yield name, variant, logits and targets of the calls whose builds are checked."""
    lengths = {"": (32, 1000, 8192, 50257), "smoothed": (8192, 50257), "tokens": (1000,)}
    lengths["entropy"] = lengths["smoothed"]
    wide = {"": 8192, "tokens": 32000, "entropy": 151936}
    cases = [((4096, n), torch.float16, variant) for variant in lengths for n in lengths[variant]]
    cases += [((4096, n), torch.bfloat16, variant) for variant, n in wide.items()]
    for shape, dtype, variant in [*cases, ((4, 64, 4096), torch.float16, "")]:
        x = torch.empty(shape, dtype=dtype, device="meta")
        target = torch.empty((shape[0], *shape[2:]), dtype=torch.int64, device="meta")
        case = "inner" if len(shape) > 2 else f"n={shape[1]}"
        yield build_name("cross_entropy", dtype, case, variant or False), variant, x, target


def shipped() -> Iterator[Shipped]:
    """Yield the calls whose builds are checked."""
    for name, variant, x, target in shipped_cases():
        is_plain = x.dim() == 2 and variant in ("", "tokens")
        registers = MAX_REGISTERS[not (is_plain and x.shape[1] <= LONGEST)]
        most = 20 if variant == "entropy" else 14 if is_plain else 17
        args = x, target, 1, *VARIANTS[variant]
        yield Shipped(name, cross_entropy_triton, args, registers, most, 1)
