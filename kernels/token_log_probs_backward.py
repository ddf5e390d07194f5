"""Gradient of token_log_probs from the logits and the numbers of each row, in FP32. 4 B/element.

With p = exp((x - m) / T - log(s)) it is

    (g * ((class == target) - p) - h * p * (log(p) + entropy)) / T

for the incoming gradients g of the log-probability and h of the entropy. They, and with them a loss
scale, are applied before the result is rounded. Elements know nothing of one another: every tile
has a program of its own.
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
from tritonamp.kernels.device import tl, triton
from tritonamp.kernels.token_log_probs import sample_rows, sample_stats, shipped_cases

PER_THREAD = 16  # elements that a thread holds
LONGEST = 4096  # row that is one tile


@triton.jit
def _write_tile(
    x_ptr, dx_ptr, offs, mask, hit, g, h, m, log_s, entropy, inverse, ENTROPY: tl.constexpr
):  # fmt: skip
    """Write a tile; g and h are divided by the temperature already."""
    x = tl.load(x_ptr + offs, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    log_p = (x - m) * inverse - log_s
    p = tl.exp2(log_p * 1.4426950408889634)
    dx = tl.where(hit, g, 0.0) - g * p
    if ENTROPY:
        dx -= tl.where(p == 0.0, 0.0, h * p * (log_p + entropy))  # of -inf it would be NaN
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("rows", "n", "blocks", "tiles", "count", "inverse"))
def token_log_probs_backward_kernel(
    x_ptr, target_ptr, grad_ptr, stats_ptr, dx_ptr, rows, n, blocks, tiles, count, inverse,
    ENTROPY: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile; ``tiles`` programs follow one another along the same rows."""
    pid, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    lines, numbers, valid = line_offsets(pid, rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS)
    target = tl.load(target_ptr + numbers, mask=valid, other=0)
    g = tl.load(grad_ptr + numbers, mask=valid, other=0.0) * inverse
    m = tl.load(stats_ptr + numbers, mask=valid, other=0.0)
    log_s = tl.load(stats_ptr + count + numbers, mask=valid, other=0.0)
    h, entropy = g, log_s
    if ENTROPY:
        h = tl.load(grad_ptr + count + numbers, mask=valid, other=0.0) * inverse
        entropy = tl.load(stats_ptr + 2 * count + numbers, mask=valid, other=0.0)
    begin = line_lead(pid, n, ALIGN, VEC)
    first, last = whole_vectors(begin, begin + n, ALIGN, VEC)
    at = first + tile * BLOCK
    columns, exist = column_offsets(at, last, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
    # a target in another tile is no column of this one
    hit = tl.arange(0, BLOCK)[None, :] == (target + begin - at).to(tl.int32)
    _write_tile(
        x_ptr, dx_ptr, lines + columns, valid & exist, hit, g, h, m, log_s, entropy, inverse,
        ENTROPY,
    )  # fmt: skip
    if ALIGN < VEC:  # noqa: SIM102  # constant, the other not
        if tile == 0:
            edges, there = edge_offsets(begin, begin + n, first, last, VEC)
            _write_tile(
                x_ptr, dx_ptr, lines + edges, valid & there, edges == target + begin,
                g, h, m, log_s, entropy, inverse, ENTROPY,
            )  # fmt: skip


@cached_by_shape
def _launch(
    shape: tuple[int, ...], given: torch.dtype, temperature: float, entropy: bool
) -> Launch:
    """Return the launch for logits of a shape and of the dtype ``given``."""
    t = tiling(shape, -1, -1, PER_THREAD, LONGEST, WIDEST // given.itemsize)
    tiles = -(-t.n // t.layout[-1])
    return Launch(
        token_log_probs_backward_kernel,
        (t.grid[0] * tiles, 1, 1),
        (*t.sizes, tiles, t.lines, 1 / temperature),
        (entropy, *t.layout),
        t.num_warps,
    )


def token_log_probs_backward_triton(
    x: Tensor, target: Tensor, grad: Tensor, stats: Tensor, temperature: float
) -> Tensor:
    x, target, grad = x.contiguous(), target.contiguous(), grad.contiguous()
    dx = torch.empty_like(x)
    if x.numel():
        launch = _launch(x.shape, x.dtype, float(temperature), len(grad) == 2)
        launch(x, target, grad, stats, dx)
    return dx


def token_log_probs_backward_torch(
    x: Tensor, target: Tensor, grad: Tensor, stats: Tensor, temperature: float
) -> Tensor:
    m, log_s, *entropy = (number.unsqueeze(-1) for number in stats)
    g, *h = (number.unsqueeze(-1) / temperature for number in grad)
    log_p = (x - m) / temperature - log_s
    p = log_p.exp()
    dx = -g * p
    if x.numel():
        dx.scatter_add_(-1, target.unsqueeze(-1), g)
    if entropy:
        dx -= (h[0] * p * (log_p + entropy[0])).masked_fill(p == 0, 0.0)
    return dx.to(x.dtype)


def token_log_probs_backward(
    x: Tensor,
    target: Tensor,
    grad: Tensor,
    stats: Tensor,
    temperature: float,
    backend: str = "auto",
) -> Tensor:
    """Compute the gradient of token_log_probs in FP32, rounded once to the logits' dtype.

    Args:
        x: the logits, and the other arguments of ``token_log_probs``.
        target: int64 classes.
        grad: with a dimension of 1 or 2 in front, of the log-probabilities and of the entropies, if
            they were wanted; the dtype of both.
        stats: what ``token_log_probs`` returned.
        temperature: by which logits are divided.
        backend: "auto", "triton" or "eager".
    """
    return TOKEN_LOG_PROBS_BACKWARD(backend, x, target, grad, stats, temperature)


def _sample(entropy: bool) -> Sample:
    def args(x: Tensor, dim: int) -> tuple[object, ...]:
        rows, target = sample_rows(x, dim)
        stats = sample_stats(rows, target, entropy)
        grad = torch.linspace(-2, 2, (1 + entropy) * target.numel(), device=x.device)
        return rows, target, grad.view(1 + entropy, *target.shape), stats, 1.25

    if entropy:
        return Sample(args, variant="entropy", any_order=True, rows_only=True)
    return Sample(args, reads=2, writes=2, of_line=(8 + 4 + 8, 0), any_order=True, rows_only=True)


TOKEN_LOG_PROBS_BACKWARD = TraceableOp(
    token_log_probs_backward_triton,
    token_log_probs_backward_torch,
    [_sample(entropy) for entropy in (False, True)],
)


def shipped() -> Iterator[Shipped]:
    """Yield the calls whose builds are checked, for the forward's cases."""
    for name, x, target, entropy in shipped_cases():
        grad = torch.empty((1 + entropy, *target.shape), device="meta")
        stats = torch.empty((2 + entropy, *target.shape), device="meta")
        args = x, target, grad, stats, 1.25
        name, most = f"{name} backward", 23 if entropy else 17
        yield Shipped(name, token_log_probs_backward_triton, args, 64, most, 1)
