"""Log-probability of one class of each row of half logits, and the row's entropy: FP32 arithmetic.

2 B/element. With T the temperature, m the largest logit of a row, e = exp((x - m) / T) and
s = sum(e) they are

    (x[target] - m) / T - log(s)   and   log(s) + sum(e * (m - x)) / (s * T).

The temperature divides differences, which are exact or nearly: logits near 65504 lose nothing. A
row is read once, in several tiles where it is long. m, log(s) and the entropy are kept for the
gradient.
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
from tritonamp.kernels._shipped import Shipped, build_name
from tritonamp.kernels.cross_entropy import minus_logits_of_targets, sample_targets
from tritonamp.kernels.device import tl, triton

PER_THREAD = 32  # elements that a thread holds
LONGEST = 8192  # row that is one tile
NO_CLASS = -(1 << 62)  # which torch's kernel would ignore as a target
LOG2_E = 1.4426950408889634


@triton.jit
def _add_tile(x_ptr, mask, m, s, far, scale, ENTROPY: tl.constexpr):
    """Return the maximum m, the sum s of e = exp2((x - m) * scale), and that of e * (m - x)."""
    x = tl.load(x_ptr, mask=mask, other=-float("inf"), eviction_policy="evict_first").to(tl.float32)
    largest = tl.maximum(m, tl.max(x, 1, keep_dims=True))
    # of a row that is all -inf so far x - m would be NaN
    base = tl.where(largest == -float("inf"), 0.0, largest)
    e, shrink = tl.exp2((x - base) * scale), tl.exp2((m - base) * scale)
    if ENTROPY:
        # each e * (m - x) so far shrinks with e, and its distance grows with the maximum
        before = tl.where(m == -float("inf"), 0.0, m)
        tile = tl.where(e == 0.0, 0.0, e * (base - x))  # of -inf the product would be NaN
        far = shrink * (far + s * (base - before)) + tl.sum(tile, 1, keep_dims=True)
    return largest, s * shrink + tl.sum(e, 1, keep_dims=True), far


@triton.jit(do_not_specialize=("rows", "n", "blocks", "count", "scale", "inverse"))
def token_log_probs_kernel(
    x_ptr, minus_ptr, log_probs_ptr, stats_ptr, rows, n, blocks, count, scale, inverse,
    ENTROPY: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Go along the rows of a program, with the sums so far rescaled to each new maximum.

    ``inverse`` is 1 / T, and ``scale`` log2(e) / T.
    """
    lines, numbers, valid = line_offsets(
        tl.program_id(0), rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS
    )
    minus = tl.load(minus_ptr + numbers, mask=valid, other=0.0)
    begin = line_lead(tl.program_id(0), n, ALIGN, VEC)
    first, last = whole_vectors(begin, begin + n, ALIGN, VEC)
    m = tl.full([ROWS, 1], -float("inf"), tl.float32)
    s = tl.zeros([ROWS, 1], tl.float32)
    far = tl.zeros([ROWS, 1], tl.float32)
    for at in range(first, last, BLOCK):
        columns, exist = column_offsets(at, last, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
        m, s, far = _add_tile(x_ptr + lines + columns, valid & exist, m, s, far, scale, ENTROPY)
    if ALIGN < VEC:
        edges, there = edge_offsets(begin, begin + n, first, last, VEC)
        m, s, far = _add_tile(x_ptr + lines + edges, valid & there, m, s, far, scale, ENTROPY)
    m = tl.where(s == s, m, s)  # maxima pass over NaN, sums do not
    log_s = tl.log2(s) * 0.6931471805599453
    tl.store(log_probs_ptr + numbers, -((m + minus) * inverse + log_s), mask=valid)
    tl.store(stats_ptr + numbers, m, mask=valid)
    tl.store(stats_ptr + count + numbers, log_s, mask=valid)
    if ENTROPY:
        tl.store(stats_ptr + 2 * count + numbers, log_s + far / s * inverse, mask=valid)


@cached_by_shape
def _launch(
    shape: tuple[int, ...], given: torch.dtype, temperature: float, entropy: bool
) -> Launch:
    """Return the launch for logits of a shape and of the dtype ``given``."""
    t = tiling(shape, -1, -1, PER_THREAD, LONGEST, WIDEST // given.itemsize)
    return Launch(
        token_log_probs_kernel,
        (t.grid[0], 1, 1),
        (*t.sizes, t.lines, LOG2_E / temperature, 1 / temperature),
        (entropy, *t.layout),
        t.num_warps,
        80,
    )


def token_log_probs_triton(
    x: Tensor, target: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor]:
    x, target = x.contiguous(), target.contiguous()
    log_probs = x.new_empty(target.shape, dtype=torch.float32)
    stats = x.new_empty((2 + entropy, *target.shape), dtype=torch.float32)
    if not x.numel():
        return log_probs.zero_(), stats.zero_()
    minus = minus_logits_of_targets(x, target, -1, NO_CLASS).float()
    _launch(x.shape, x.dtype, float(temperature), entropy)(x, minus, log_probs, stats)
    return log_probs, stats


def token_log_probs_torch(
    x: Tensor, target: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if not x.numel():
        return wide.new_zeros(target.shape), wide.new_zeros((2 + entropy, *target.shape))
    m = wide.amax(-1, keepdim=True)
    d = (wide - m) / temperature
    e = d.exp()
    s = e.sum(-1)
    numbers = [m.squeeze(-1), s.log()]
    if entropy:
        numbers.append(s.log() - (e * d).masked_fill(e == 0, 0.0).sum(-1) / s)
    return -minus_logits_of_targets(d, target, -1, NO_CLASS) - s.log(), torch.stack(numbers)


def token_log_probs(
    x: Tensor, target: Tensor, temperature: float, entropy: bool, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of a class of each row of logits, and the row's entropy, in FP32.

    Args:
        x: logits, [..., v], float16, bfloat16 or float32 (the eager twin: also float64), any
            strides.
        target: int64 classes, [...].
        temperature: by which logits are divided, more than 0.
        entropy: whether it is wanted.
        backend: "auto", "triton" or "eager".

    Returns:
        log-probabilities of the target's shape, float32 (of float64: float64), and, with a
        dimension in front, the maximum m of each row, log(sum(exp((x - m) / temperature))), and the
        entropy if it is wanted.

    Raises:
        IndexError: a target is no class; on CUDA it is a failed assertion on the device.
    """
    return TOKEN_LOG_PROBS(backend, x, target, temperature, entropy)


def sample_rows(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return ``x`` with its lines along ``dim`` as rows, and a class for each."""
    rows = x.movedim(dim, -1)
    return rows, sample_targets(rows, -1, ignored=False)


def sample_stats(x: Tensor, target: Tensor, entropy: bool) -> Tensor:
    """Return numbers of the rows of ``x``, to take a gradient of; the temperature is 1.25."""
    return token_log_probs_torch(x, target, 1.25, entropy)[1]


def _sample(entropy: bool) -> Sample:
    def args(x: Tensor, dim: int) -> tuple[object, ...]:
        return *sample_rows(x, dim), 1.25, entropy

    if entropy:
        return Sample(args, any_order=True, rows_only=True, variant="entropy")
    return Sample(args, reads=2, writes=0, of_line=(4, 4 + 8), any_order=True, rows_only=True)


TOKEN_LOG_PROBS = TraceableOp(
    token_log_probs_triton, token_log_probs_torch, [_sample(entropy) for entropy in (False, True)]
)


def shipped_cases() -> Iterator[tuple[str, Tensor, Tensor, bool]]:
    """Yield name, logits, targets and whether the entropy is wanted of the builds to check."""
    for dtype, n, entropy in (
        (torch.float16, 1000, False),
        (torch.float16, 8192, True),
        (torch.float16, 50257, True),
        (torch.bfloat16, 32000, False),
        (torch.bfloat16, 151936, True),
    ):
        x = torch.empty((4096, n), dtype=dtype, device="meta")
        target = torch.empty(4096, dtype=torch.int64, device="meta")
        name = build_name("token_log_probs", dtype, f"n={n}", entropy and "entropy")
        yield name, x, target, entropy


def shipped() -> Iterator[Shipped]:
    """Yield the calls whose builds are checked."""
    for name, x, target, entropy in shipped_cases():
        args = x, target, 1.25, entropy
        yield Shipped(name, token_log_probs_triton, args, 80, 20 if entropy else 14, 1)
