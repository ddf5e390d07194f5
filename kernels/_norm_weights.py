"""Gradients of a norm's weight and bias: partial sums over lines, [wanted, parts, n] in FP32.

The kernel for whole lines keeps the sums in registers. Sums over long lines take the launch in this
file.
"""

import torch

from tritonamp.kernels._launch import Launch
from tritonamp.kernels._lines import Tiling, dense
from tritonamp.kernels._norms import load_gradients, load_stats
from tritonamp.kernels.device import tl, triton

# Rows of partial sums, a fixed number, so that every GPU gives the same bits.
PARTS = 32
ROWS, COLUMNS = 8, 256  # lines and columns of a tile
WARPS = 8


@triton.jit
def store_part(
    sums_ptr, row, n, sums, columns, exist, VEC: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Write one row of partial sums, [wanted * parts, n]."""
    n = n // VEC * VEC  # tells the compiler that VEC divides n, so that stores are vectors
    # lines of the tile are added here, once, instead of in every step
    if ROWS > 1:
        sums = tl.sum(sums, 0, keep_dims=True)
    tl.store(sums_ptr + row.to(tl.int64) * n + columns, sums, mask=exist)


@triton.jit(do_not_specialize=("rows", "n", "steps"))
def norm_weights_kernel(
    g_ptr, x_ptr, stats_ptr, sums_ptr, rows, n, steps,
    CENTER: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up ``steps`` tiles of long lines, of BLOCK columns."""
    n = n // VEC * VEC  # tells the compiler that VEC divides n, so that loads are vectors
    part = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    # a program owns its columns and a fixed range of lines: no atomics, and one order of additions
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(0, steps):
        tile = part * steps + step
        numbers = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        valid = numbers < rows
        mean, rstd = load_stats(stats_ptr, numbers, rows, valid, CENTER)
        # evict_first, because dx is done, and nothing reads these tiles again
        grad, _, h = load_gradients(
            g_ptr, x_ptr, x_ptr, numbers * n + columns, columns, valid & (columns < n), mean, rstd,
            CENTER, False, "evict_first",
        )  # fmt: skip
        dw += grad * h
        db += grad
    if DW:
        store_part(sums_ptr, part, n, dw, columns, columns < n, VEC, ROWS)
    if DB:
        row = part + tl.num_programs(1) if DW else part
        store_part(sums_ptr, row, n, db, columns, columns < n, VEC, ROWS)


def sums_of_long(t: Tiling, center: bool, wants: tuple[bool, bool]) -> Launch:
    """Return the launch that sums grad * h and grad, as far as ``wants`` has them.

    There are at most PARTS parts.
    """
    tiles = -(-t.lines // ROWS)
    # steps first, and then only as many parts as these steps need: none is empty
    steps = -(-tiles // PARTS)
    parts = -(-tiles // steps)
    return Launch(
        norm_weights_kernel,
        (-(-t.n // COLUMNS), parts, 1),
        (t.lines, t.n, steps),
        (center, *wants, t.layout[2], ROWS, COLUMNS),
        WARPS,
        results=(dense((sum(wants), parts, t.n), torch.float32),),
    )
