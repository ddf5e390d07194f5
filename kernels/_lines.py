"""Memory addresses in a contiguous tensor that is seen as lines along one dimension.

A tensor of shape (outer, n, inner) holds groups of [rows, n] matrices. With inner == 1 it is one
row-major matrix of ``outer`` rows. Otherwise it is ``outer`` column-major matrices of ``inner``
rows, in which neighbours in memory are rows. A program computes a tile of ROWS lines and BLOCK
columns. Addresses are int64, because tensors may exceed 2**31 elements.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tritonamp.kernels._by_length import is_by_length, thread
from tritonamp.kernels._launch import Room
from tritonamp.kernels.device import WARP_SIZE, tl, triton

F = TypeVar("F", bound=Callable[..., Any])

WIDEST = 16  # bytes that one instruction loads or stores
MAX_VECTOR = 8  # half elements in WIDEST bytes
# Lines side by side that a thread holds. More would cost exchanges, because each line is summed up
# across lanes.
COLUMN_VECTOR = 4
MAX_WARPS, LOOP_WARPS = 32, 8
SHORT = 4096  # elements of a tile of several short lines
SIDE = 64  # lines of a tile of columns
MANY = 128  # programs that fill a GPU well enough; fewer share their lines with others
MAX_SPLITS = 256
# By length, lines of more elements are shared, and each program gets as many. Vocabularies are
# shorter, so that their lines are read from L2 the second time.
LONG_LINE, SEGMENT = 1 << 18, 1 << 16
# Results that a function under ``cached_by_shape`` keeps. A run with more shapes starts again,
# instead of growing without bound.
MOST_SHAPES = 4096


class Tiling(NamedTuple):
    """The tiles of a kernel over the lines of one tensor, computed from the shape.

    Attributes:
        n: elements of a line.
        lines: number of lines.
        whole: a program's tile covers whole lines; else the program moves along them.
        splits: number of programs that share a line.
        steps: number of tiles of a line that one program computes.
        grid: number of programs, (groups * blocks, splits, 1).
        sizes: rows of a group, n, and blocks of a group, as in ``line_offsets``.
        layout: ROW_MAJOR, ALIGN, VEC, ROWS, BLOCK. ALIGN is a power of two that divides the
            distance of two lines (row-major) or two columns; if it equals BLOCK, every tile is full
            and needs no mask. VEC is the number of neighbours that a thread loads at once; if it is
            more than ALIGN, lines begin and end within vectors, and their edges are loaded one by
            one.
        num_warps: warps of a program.
    """

    n: int
    lines: int
    whole: bool
    splits: int
    steps: int
    grid: tuple[int, int, int]
    sizes: tuple[int, int, int]
    layout: tuple[bool, int, int, int, int]
    num_warps: int


def cached_by_shape(function: F) -> F:
    """Cache the results of a function of a shape, dtypes and plain values; no result is None.

    Results inside of ``by_length`` are kept apart.
    """
    of_shape: dict[tuple[Any, ...], Any] = {}
    of_length: dict[tuple[Any, ...], Any] = {}

    def clear() -> None:
        of_shape.clear()
        of_length.clear()

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        known = of_length if thread.inside else of_shape  # no call, because steps come here, too
        try:
            # not functools.cache, which would raise where a traced size has no hash
            found = known.get(args)
        except TypeError:  # a traced size has no hash
            return function(*args)
        if found is None:
            if len(known) >= MOST_SHAPES:
                known.clear()
            found = known[args] = function(*args)
        return found

    wrapper.cache_clear = clear  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


def tiling(
    shape: Sequence[int],
    first: int,
    last: int,
    per_thread: int,
    longest: int,
    vec: int,
    side: int = SIDE,
    over_lines: bool = False,
) -> Tiling:
    """Return the tiling of a contiguous tensor for lines along some of its dimensions.

    Inside of ``by_length`` the layout, the warps and the steps depend on the length of the lines
    alone, and on whether their dimensions are the last ones.

    Args:
        shape: shape of the tensor.
        first: first dimension of the lines.
        last: last dimension of the lines, included.
        per_thread: elements that a thread holds.
        longest: longest line that a program holds in its registers.
        vec: elements that a thread accesses at once, 16 bytes of the widest dtype. 16 bytes of the
            half dtype would leave gaps between the FP32 elements of neighbouring threads.
        side: fewest lines side by side in a tile of columns, for which a tile gives up lines until
            it holds all columns; not above SIDE.
        over_lines: whether each program also adds up over its lines, and leaves a row of sums.
    """
    # closed form instead of autotuning, which stalls a first call, and
    # makes results vary between runs
    rank = max(len(shape), 1)
    first, last = in_range(first, rank), in_range(last, rank)
    outer, inner = math.prod(shape[:first]), math.prod(shape[last + 1 :])
    n = math.prod(shape[first : last + 1])
    fixed = is_by_length()
    row_major = last == rank - 1 if fixed else inner == 1
    groups, rows, width = (1, outer, n) if row_major else (outer, inner, inner)
    align = next(power for power in (MAX_VECTOR, 4, 2, 1) if width % power == 0)
    if fixed and not row_major:
        align = 1  # whatever the number of columns
    rows_seen = MANY * SHORT if fixed else rows  # by length, tiles are those of many lines

    # a loop over columns holds fewer elements, because their addresses take registers, too
    of_loop = per_thread if row_major else min(per_thread, 16)
    loop = LOOP_WARPS * WARP_SIZE * of_loop  # elements of a tile that moves along the lines
    # a tile of whole lines if registers hold them, and of several lines if these are short
    if row_major:
        block = power_of_two(n, min(longest, MAX_WARPS * WARP_SIZE * per_thread))
        lines = 1
        if block <= 512:
            lines = power_of_two(rows_seen, SHORT // block)
        # Sums over lines want few programs, so each takes several longer lines, too, and has as
        # many warps more: bytes in flight are those of all warps. Few lines stay apart, because
        # they would leave programs idle.
        elif over_lines:
            lines = power_of_two(-(-rows_seen // MANY), SHORT // block)
    else:
        # as many lines side by side as fill a sector of memory, and more
        lines = power_of_two(rows_seen, min(max(loop // power_of_two(n), side), SIDE))
        block = power_of_two(n, loop // lines)
    if block < n:  # the program moves along the lines
        block, per_thread = loop // lines, of_loop
    # Loops over rows read whole vectors, and the edges separately. Other tiles take vectors that
    # divide the line, because a mask that ends inside a vector splits its load. So do loops by
    # length, because the edges of a line depend on its number.
    if not row_major:
        vec = min(vec, align, COLUMN_VECTOR)
    elif block >= n or fixed:
        vec = min(vec, align)
    # every tile is full, and the kernel is built without masks
    if row_major and lines == 1 and n % block == 0:
        align = block
    num_warps = min(max(lines * block // (WARP_SIZE * per_thread), 1), MAX_WARPS)
    blocks = -(-rows // lines)

    # A few long lines would leave a GPU idle, so programs share them,
    # four times as many as fill it.
    splits, steps = 1, max(-(-n // block), 1)
    if fixed and n > LONG_LINE:
        steps = max(-(-steps // MAX_SPLITS), SEGMENT // block)
        splits = -(-n // (steps * block))
    elif not fixed and steps > 1 and 0 < groups * blocks < MANY:
        steps = -(-steps // min(MAX_SPLITS, -(-4 * MANY // (groups * blocks)), steps))
        splits = -(-n // (steps * block))
    grid, sizes = (groups * blocks, splits, 1), (rows, n, blocks)
    layout = row_major, align, vec, lines, block
    return Tiling(n, groups * rows, block >= n, splits, steps, grid, sizes, layout, num_warps)


def dense(shape: Sequence[int], dtype: torch.dtype) -> Room:
    """Return the room of a contiguous tensor, for ``Launch.results``."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(shape), tuple(reversed(strides[: len(shape)])), dtype


def dtype_of(tensor: Tensor | None) -> torch.dtype | None:
    """Return the dtype of ``tensor``, or None if there is no tensor."""
    return None if tensor is None else tensor.dtype


def contiguous_or(other: Tensor, tensor: Tensor | None) -> Tensor:
    """Return ``tensor`` in contiguous memory, or ``other`` if there is no tensor.

    A kernel's pointer has to be valid, also where nothing is loaded.
    """
    return other if tensor is None else tensor.contiguous()


def in_range(dim: int, rank: int) -> int:
    """Return ``dim`` counted from the front; raise torch's IndexError if it is out of range."""
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
    pid, rows, n, blocks,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return offsets, numbers and mask of the lines of program ``pid``, each [ROWS, 1]; int64.

    ``blocks`` programs share a group of ``rows`` lines. If ALIGN < VEC, the offset of a line is
    that of the vector that holds its first element, ``line_lead`` elements before that element.
    """
    i = tl.arange(0, ROWS)[:, None]
    if ROW_MAJOR:
        # int64 before the product with n: a tensor may have more than 2**31 elements
        start = pid.to(tl.int64) * ROWS
        numbers = start + i
        if ALIGN < VEC:
            offs = start * n // VEC * VEC + i
        else:
            n = n // VEC * VEC  # tells the compiler that VEC divides n, so that loads are vectors
            offs = start * n + i * n.to(tl.int64)
    else:
        rows = rows // VEC * VEC
        group = (pid // blocks).to(tl.int64)
        start = (pid % blocks).to(tl.int64) * ROWS
        numbers = group * rows + (start + i)
        offs = group * n * rows + (start + i)
    # a constant mask of True disappears, so that loads depend on columns alone
    if ROWS == 1:
        return offs, numbers, tl.full([1, 1], True, tl.int1)
    else:
        return offs, numbers, i < rows - start


@triton.jit
def line_lead(pid, n, ALIGN: tl.constexpr, VEC: tl.constexpr):
    """Return the offset of a line's first element relative to ``line_offsets``."""
    if ALIGN < VEC:
        return pid.to(tl.int64) * n % VEC  # in 64 bits, because it is added to n
    else:
        return 0


@triton.jit
def column_offsets(
    start, end, rows,
    ROW_MAJOR: tl.constexpr, ALIGN: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the offsets of columns ``start`` to ``start + BLOCK`` from a line's start, and a mask.

    The mask is that of columns before ``end``.
    """
    j = tl.arange(0, BLOCK)[None, :]
    if ROW_MAJOR:
        # tells the compiler that VEC divides the mask's bound, or it would load element by element
        end = end // VEC * VEC
        offs = start + j
    else:
        offs = (start + j).to(tl.int64) * (rows // VEC * VEC)
    # a constant mask of True, which the compiler removes: every tile is full
    if ALIGN == BLOCK and ROW_MAJOR:
        return offs, tl.full([1, BLOCK], True, tl.int1)
    else:
        return offs, j < end - start


@triton.jit
def segment_bounds(n, steps, ALIGN: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """Return the begin and the end of this program's segment of a shared line; int64."""
    lead = line_lead(tl.program_id(0), n, ALIGN, VEC)
    begin = lead + tl.program_id(1).to(tl.int64) * steps * BLOCK
    return begin, min(begin + steps * BLOCK, lead + n)


@triton.jit
def whole_vectors(begin, end, ALIGN: tl.constexpr, VEC: tl.constexpr):
    """Return the first and the last of the columns ``begin`` to ``end`` that fill vectors."""
    if ALIGN < VEC:
        return (begin + VEC - 1) // VEC * VEC, end // VEC * VEC
    else:
        return begin, end


@triton.jit
def edge_offsets(begin, end, first, last, VEC: tl.constexpr):
    """Return the columns that fill no vector, and a mask, both of shape [1, 256].

    These are the columns from ``begin`` to ``first`` and from ``last`` to ``end``.
    """
    # 256 places, one for each thread of such a program. With a tile of the 2 VEC places that can
    # exist, each thread would compute all of them (Triton 3.6 and 3.8).
    k = tl.arange(0, 256)[None, :]
    offs = tl.where(k < VEC, first, last) - VEC + k
    return offs, (offs >= tl.where(k < VEC, begin, first)) & (offs < end)
