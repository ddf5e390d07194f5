"""Gradients of a norm's weight and bias: partial sums over lines, [wanted, parts, n] in FP32.

The kernel for whole lines keeps them itself, in registers. Those of long lines are added up here,
in a launch of their own.
"""

import torch
from torch import Tensor

from tritonamp.kernels._launch import launch
from tritonamp.kernels._lines import Tiling
from tritonamp.kernels._norms import load_gradients, load_stats
from tritonamp.kernels.device import tl, triton

PARTS = 32
ROWS, COLUMNS = 8, 256  # of a tile
WARPS = 8


@triton.jit
def store_part(
    part_ptr, part, n, sums, columns, exist, VEC: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Write one row of partial sums, [parts, n]."""
    n = n // VEC * VEC  # tells the compiler what divides it
    if ROWS > 1:
        sums = tl.sum(sums, 0, keep_dims=True)
    tl.store(part_ptr + part.to(tl.int64) * n + columns, sums, mask=exist)


@triton.jit(do_not_specialize=("rows", "n", "steps"))
def norm_weights_kernel(
    g_ptr, x_ptr, mean_ptr, rstd_ptr, dw_ptr, db_ptr, rows, n, steps,
    CENTER: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr,
    VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up ``steps`` tiles of long lines, of BLOCK columns."""
    n = n // VEC * VEC  # tells the compiler what divides it
    part = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(0, steps):
        tile = part * steps + step
        numbers = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        valid = numbers < rows
        mean, rstd = load_stats(mean_ptr, rstd_ptr, numbers, valid, CENTER)
        grad, _, h = load_gradients(
            g_ptr, x_ptr, x_ptr, numbers * n + columns, columns, valid & (columns < n), mean, rstd,
            CENTER, False, "evict_first",
        )  # fmt: skip
        dw += grad * h
        db += grad
    if DW:
        store_part(dw_ptr, part, n, dw, columns, columns < n, VEC, ROWS)
    if DB:
        store_part(db_ptr, part, n, db, columns, columns < n, VEC, ROWS)


def new_parts(x: Tensor, number: int, n: int, wants: tuple[bool, bool]) -> Tensor:
    """Return memory for them, one row at least: a pointer has to point somewhere."""
    return x.new_empty(max(sum(wants), 1), number, n, dtype=torch.float32)


def sums_of_long(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    t: Tiling,
    center: bool,
    wants: tuple[bool, bool],
) -> Tensor:
    """Add up the wanted ones of grad * h and grad over at most PARTS parts of the lines."""
    tiles = -(-t.lines // ROWS)
    steps = -(-tiles // PARTS)
    parts = new_parts(x, -(-tiles // steps), t.n, wants)
    if any(wants):
        launch(
            norm_weights_kernel,
            (-(-t.n // COLUMNS), parts.shape[1], 1),
            (grad, x, mean, rstd, parts[0], parts[-1]),
            (t.lines, t.n, steps),
            (center, *wants, t.layout[2], ROWS, COLUMNS),
            WARPS,
        )
    return parts
