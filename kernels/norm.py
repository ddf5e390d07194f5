"""layer_norm and rms_norm over the last dimensions: half storage, FP32 arithmetic. 4 B/element.

y = (x - mean) * rstd * weight + bias, with rstd = 1 / sqrt(mean((x - mean)**2) + eps); rms_norm has
neither mean nor bias. For ``add_norm`` the kernels first add a residual. Several short lines make
up a tile. A longer line fills a program's registers. A long line is read twice, the second time
from L2 and from its end.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._implementations import TraceableOp, line_sums
from tritonamp.kernels._launch import Launch, allocate
from tritonamp.kernels._lines import (
    WIDEST,
    cached_by_shape,
    column_offsets,
    dense,
    dtype_of,
    line_offsets,
    tiling,
)
from tritonamp.kernels._norms import (
    add_moments,
    affine,
    load_sum,
    moments,
    reciprocal_std,
    store_stats,
)
from tritonamp.kernels._sample import Sample
from tritonamp.kernels._shipped import BF16, HALF, Shipped, build_name
from tritonamp.kernels.device import tl, triton

PER_THREAD = 16  # elements that a thread holds, and as many of weight and bias
LONGEST = 16384  # line that registers hold
# Of a thread in the loop. Without a limit, ptxas spills rather than take more than 40.
MAX_REGISTERS = 64


# not specialised: Triton would build another kernel for sizes of 1 and for multiples of 16
@triton.jit(do_not_specialize=("rows", "n", "blocks", "eps"))
def norm_kernel(
    x_ptr, r_ptr, w_ptr, b_ptr, sum_ptr, y_ptr, stats_ptr, rows, n, blocks, eps,
    ADD: tl.constexpr, CENTER: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute whole lines, which are held in registers."""
    lines, numbers, valid = line_offsets(
        tl.program_id(0), rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS
    )
    columns, exist = column_offsets(0, n, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
    offs, mask = lines + columns, valid & exist
    stored = load_sum(x_ptr, r_ptr, offs, mask, ADD, "")
    # the rounded sum, which the residual stream takes on and the backward reads
    if ADD:
        tl.store(sum_ptr + offs, stored, mask=mask)
    x = stored.to(tl.float32)
    mean, squares = moments(x, mask, n, CENTER)
    rstd = reciprocal_std(squares, n, eps)
    y = affine(x, mean, rstd, w_ptr, b_ptr, columns, exist, CENTER, WEIGHT, BIAS)
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)
    store_stats(stats_ptr, numbers, rows, valid, mean, rstd, CENTER)


@triton.jit(do_not_specialize=("rows", "n", "blocks", "eps"))
def norm_long_kernel(
    x_ptr, r_ptr, w_ptr, b_ptr, sum_ptr, y_ptr, stats_ptr, rows, n, blocks, eps,
    ADD: tl.constexpr, CENTER: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute lines that are too long for registers, which are read twice."""
    lines, numbers, valid = line_offsets(
        tl.program_id(0), rows, n, blocks, ROW_MAJOR, ALIGN, VEC, ROWS
    )
    mean = tl.zeros([ROWS, 1], tl.float32)
    squares = tl.zeros([ROWS, 1], tl.float32)
    for at in range(0, n, BLOCK):
        columns, exist = column_offsets(at, n, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
        mask = valid & exist
        # evict_last, because the second loop reads the line again
        x = load_sum(x_ptr, r_ptr, lines + columns, mask, ADD, "evict_last").to(tl.float32)
        # merged tile by tile around their own means, because raw sums of
        # squares cancel if the mean is large
        mean, squares = add_moments(x, mask, min(BLOCK, n - at), mean, squares, at, CENTER)
    rstd = reciprocal_std(squares, n, eps)
    # from the end of the line, which L2 still holds
    for back in range(0, n, BLOCK):
        at = (n - 1) // BLOCK * BLOCK - back
        columns, exist = column_offsets(at, n, rows, ROW_MAJOR, ALIGN, VEC, BLOCK)
        offs, mask = lines + columns, valid & exist
        # added again, because this thread may not see what other threads have stored of the sum
        stored = load_sum(x_ptr, r_ptr, offs, mask, ADD, "evict_first")
        if ADD:
            tl.store(sum_ptr + offs, stored, mask=mask, eviction_policy="evict_first")
        x = stored.to(tl.float32)
        y = affine(x, mean, rstd, w_ptr, b_ptr, columns, exist, CENTER, WEIGHT, BIAS)
        y = y.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + offs, y, mask=mask, eviction_policy="evict_first")
    store_stats(stats_ptr, numbers, rows, valid, mean, rstd, CENTER)


Norm = Callable[..., Sequence[Tensor]]
"""Function of x, weight and bias that returns the result and the statistics."""


@cached_by_shape
def _forward(
    shape: tuple[int, ...], n: int, dtypes: tuple[Any, ...], added: bool, eps: float, center: bool
) -> Norm:
    """Return a function of x, and with ``added`` of a residual.

    ``dtypes`` are those of x, the result, weight and bias; None for a weight that is missing.
    """
    given, dtype, weight, bias = dtypes
    lines = math.prod(shape) // n if n else 0
    total, y = dense(shape, given), dense(shape, dtype)
    # mean and rstd are rows of one tensor, which takes one allocation
    stats = dense((1 + center, lines), torch.float32)
    results = (total, y, stats) if added else (y, stats)
    # a grid of 0 programs is an invalid launch
    if not lines:
        return lambda x, *others: allocate(x, results)
    # a vector that lies in one line, also in a long one, because odd lengths are rare here
    vec = math.gcd(n, WIDEST // max(given.itemsize, dtype.itemsize))
    t = tiling((lines, n), 1, 1, PER_THREAD, LONGEST, vec)
    launch = Launch(
        norm_kernel if t.whole else norm_long_kernel,
        (t.grid[0], 1, 1),
        (*t.sizes, float(eps)),
        (added, center, weight is not None, bias is not None, *t.layout),
        t.num_warps,
        # only the loop spills without the limit
        None if t.whole else MAX_REGISTERS,
        results=results,
    )

    def run(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None
    ) -> Sequence[Tensor]:
        x = x.contiguous()
        # a kernel's pointer has to be valid, also where nothing is loaded or stored
        w = x if weight is None else weight.contiguous()
        b = x if bias is None else bias.contiguous()
        if residual is None:
            return launch(x, x, w, b, x)
        return launch(x, residual.contiguous(), w, b)

    return run


def norm_prepared(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: int,
    eps: float,
    center: bool,
    dtype: torch.dtype,
    added: bool = False,
) -> Norm:
    """Return a function that does ``norm_triton`` on tensors of these shapes and dtypes.

    With ``added`` the function takes a residual, too, and returns the sum first.
    """
    dtypes = x.dtype, dtype, dtype_of(weight), dtype_of(bias)
    return _forward(x.shape, n, dtypes, added, eps, center)


def norm_triton(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: int,
    eps: float,
    center: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    y, stats = norm_prepared(x, weight, bias, n, eps, center, dtype)(x, weight, bias)
    return y, stats


def norm_torch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: int,
    eps: float,
    center: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    lines = x.reshape(-1, n).float() if n else x.new_empty(0, 0, dtype=torch.float32)
    w, b = (None if given is None else given.reshape(-1).float() for given in (weight, bias))
    if center:
        y, mean, rstd = torch.native_layer_norm(lines, (n,), w, b, eps)
        return y.view(x.shape).to(dtype), torch.stack([mean.view(-1), rstd.view(-1)])
    rstd = torch.rsqrt(line_sums(lines.square(), 1, keepdim=True) / n + eps)
    y = lines * rstd
    if w is not None:
        y = y * w
    if b is not None:
        y = y + b
    return y.view(x.shape).to(dtype), rstd.view(1, -1)


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: int,
    eps: float,
    center: bool,
    dtype: torch.dtype,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Normalise lines of ``n`` neighbours to variance 1 in FP32, rounded once.

    Args:
        x: float16, bfloat16 or float32, of any shape whose last dimensions have ``n`` elements.
        weight: n elements, half or float32, or None.
        bias: n elements, half or float32, or None.
        n: elements of a line.
        eps: number that is added to the variance.
        center: subtract the mean first (layer_norm), or not (rms_norm).
        dtype: dtype of the result.
        backend: "auto", "triton" or "eager".

    Returns:
        The result, and mean and rstd, FP32 of shape [2, lines]; without ``center`` rstd, [1,
        lines].
    """
    return NORM(backend, x, weight, bias, n, eps, center, dtype)


def line_args(x: Tensor, dim: int, center: bool, affine: bool) -> tuple[Any, ...]:
    """Return the arguments of a sample's call, in which elements of a line are neighbours."""
    lines = x.movedim(dim, -1)
    n = lines.shape[-1]
    w = torch.linspace(0.5, 2, n, device=x.device) if affine else None
    b = torch.linspace(-1, 1, n, device=x.device).to(x.dtype) if affine and center else None
    return lines, w, b, n, 1e-5, center, x.dtype


def _sample(center: bool, affine: bool) -> Sample:
    name = "layer_norm" if center else "rms_norm"
    sample = Sample(
        lambda x, dim: line_args(x, dim, center, affine),
        any_order=True,
        rows_only=True,
        variant=name,
    )
    if affine:
        return sample._replace(variant=f"{name} affine")
    return sample._replace(reads=2, writes=2, of_line=(0, 4 + 4 * center))


NORM = TraceableOp(
    norm_triton,
    norm_torch,
    [_sample(center, affine) for center in (True, False) for affine in (False, True)],
    left_to_inductor=True,
    prepared=norm_prepared,
)


def shipped_cases() -> Iterator[tuple[str, Tensor, Tensor, bool]]:
    """Yield name, x, an FP32 weight, and True for layer_norm or False for rms_norm."""
    lengths = 32, 256, 1000, 1024, 8192, 16384, 65536
    for n, center in zip(lengths, itertools.cycle((True, False)), strict=False):
        dtype = BF16 if n == 1024 else HALF
        name = build_name("layer_norm" if center else "rms_norm", dtype, f"n={n}")
        x = torch.empty(4096, n, dtype=dtype, device="meta")
        yield name, x, torch.empty(n, device="meta"), center


def shipped() -> Iterator[Shipped]:
    """Yield the calls whose builds are checked."""
    for name, x, w, center in shipped_cases():
        args = x, w, w if center else None, len(w), 1e-5, center, x.dtype
        yield Shipped(name, norm_triton, args, 64, 16, 0)
