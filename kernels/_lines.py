"""A contiguous tensor seen as lines along one dimension: how softmax and its kind address memory.

A tensor of shape (outer, n, inner) holds groups of [rows, n] matrices. With inner == 1 it is one
row-major matrix of ``outer`` rows; else ``outer`` matrices of ``inner`` rows, each column-major
(neighbours in memory are rows). A program works on a tile of ROWS lines and BLOCK columns.
Addresses are int64: tensors may exceed 2**31 elements.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from tritonamp.kernels.device import WARP_SIZE, tl, triton

F = TypeVar("F", bound=Callable[..., Any])

MAX_VECTOR = 8  # half elements in 16 bytes, the widest load
MAX_WARPS, LOOP_WARPS = 32, 8
SHORT = 4096  # elements of a tile of several short lines
MANY = 128  # programs that fill a GPU well enough; fewer share their lines with others
MAX_SPLITS = 256


class Tiling(NamedTuple):
    """How a kernel walks over the lines of one tensor. All of it follows from the shape.

    Attributes:
        n: elements of a line. ``lines``: how many.
        whole: a program's tile covers whole lines, else the program moves along them.
        splits: programs that share a line, each ``steps`` tiles of it.
        grid: programs, (groups * blocks, splits, 1).
        sizes: rows, n, blocks: of a group, see ``line_offsets``.
        layout: ROW_MAJOR, ALIGN, ROWS, BLOCK. ALIGN is a power of two that divides the distance of
            two lines (row-major) or two columns; equal to BLOCK it says that every tile is full and
            needs no mask.
    """

    n: int
    lines: int
    whole: bool
    splits: int
    steps: int
    grid: tuple[int, int, int]
    sizes: tuple[int, int, int]
    layout: tuple[bool, int, int, int]
    num_warps: int


def cached_by_shape(function: F) -> F:
    """Remembers the results of a function of a shape and plain values."""
    cached = functools.lru_cache(maxsize=4096)(function)

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        try:
            return cached(*args)
        except TypeError:  # a traced size has no hash
            return function(*args)

    return wrapper  # type: ignore[return-value]


@cached_by_shape
def tiling(shape: Sequence[int], first: int, last: int, per_thread: int, longest: int) -> Tiling:
    """Return the tiling of a contiguous tensor for lines along some of its dimensions.

    Args:
        shape: of the tensor.
        first: dimension where the lines begin.
        last: dimension where they end, included.
        per_thread: elements that a thread is to hold.
        longest: line that a program holds in its registers.
    """
    rank = max(len(shape), 1)
    first, last = in_range(first, rank), in_range(last, rank)
    outer, n, inner = (
        math.prod(shape[:first]),
        math.prod(shape[first : last + 1]),
        math.prod(shape[last + 1 :]),
    )
    row_major = inner == 1
    groups, rows, width = (1, outer, n) if row_major else (outer, inner, inner)
    align = next(power for power in (MAX_VECTOR, 4, 2, 1) if width % power == 0)

    if not row_major:
        per_thread = min(per_thread, 16)  # addresses take registers too
    loop = LOOP_WARPS * WARP_SIZE * per_thread  # elements of a tile that moves along the lines
    if row_major:
        block = power_of_two(n, min(longest, MAX_WARPS * WARP_SIZE * per_thread))
        lines = power_of_two(rows, SHORT // block) if block <= 512 else 1
    else:
        lines = power_of_two(rows, 64)
        block = power_of_two(n, loop // lines)
    if block < n:
        block = loop // lines
    if row_major and lines == 1 and n % block == 0:
        align = block
    num_warps = min(max(lines * block // (WARP_SIZE * per_thread), 1), MAX_WARPS)
    blocks = -(-rows // lines)

    splits, steps = 1, max(-(-n // block), 1)
    if steps > 1 and 0 < groups * blocks < MANY:
        steps = -(-steps // min(MAX_SPLITS, -(-4 * MANY // (groups * blocks)), steps))
        splits = -(-n // (steps * block))
    grid, sizes, layout = (
        (groups * blocks, splits, 1),
        (rows, n, blocks),
        (row_major, align, lines, block),
    )
    return Tiling(n, groups * rows, block >= n, splits, steps, grid, sizes, layout, num_warps)


def in_range(dim: int, rank: int) -> int:
    """``dim`` counted from the front; torch's error where there is no such dimension."""
    if not -rank <= dim < rank:
        raise IndexError(
            "Dimension out of range "
            f"(expected to be in range of [{-rank}, {rank - 1}], but got {dim})"
        )
    return dim % rank


def power_of_two(n: int, limit: int = 1 << 62) -> int:
    """Return the smallest power of two not below ``n``, or the largest not above ``limit``."""
    power = 1
    while power < n and 2 * power <= limit:
        power *= 2
    return power


@triton.jit
def line_offsets(
    pid, rows, n, blocks, ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr
):
    """Return the lines of program ``pid``, each [ROWS, 1]: starts, numbers (int64), which exist.

    ``blocks`` programs share a group of ``rows`` lines.
    """
    i = tl.arange(0, ROWS)[:, None]
    if ROW_MAJOR:
        n = n // ALIGN * ALIGN  # tells the compiler what divides it
        start = pid.to(tl.int64) * ROWS
        numbers = start + i
        offs = start * n + i * n.to(tl.int64)
    else:
        rows = rows // ALIGN * ALIGN
        group = (pid // blocks).to(tl.int64)
        start = (pid % blocks).to(tl.int64) * ROWS
        numbers = group * rows + (start + i)
        offs = group * n * rows + (start + i)
    if ROWS == 1:
        return offs, numbers, tl.full([1, 1], True, tl.int1)
    else:
        return offs, numbers, i < rows - start


@triton.jit
def column_offsets(
    start, rows, n, ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr
):
    """Return where columns ``start`` to ``start + BLOCK`` lie from a line's start; which exist."""
    j = tl.arange(0, BLOCK)[None, :]
    if ROW_MAJOR:
        n = n // ALIGN * ALIGN
        offs = start + j
    else:
        offs = (start + j).to(tl.int64) * (rows // ALIGN * ALIGN)
    if ALIGN == BLOCK and ROW_MAJOR:
        return offs, tl.full([1, BLOCK], True, tl.int1)
    else:
        return offs, j < n - start
