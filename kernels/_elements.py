"""Programs of elementwise kernels: which part of which row each of them computes."""

import math
from typing import NamedTuple

from torch import Tensor

from tritonamp.kernels._lines import MAX_VECTOR, WIDEST, power_of_two
from tritonamp.kernels.device import tl, triton

LARGEST = 1024  # elements of a program
OF_WARP = 256  # elements of a warp: a thread holds 16 bytes of each half tensor
SHORTEST = 128  # elements of a row; shorter ones would leave most threads of a warp idle


class Rows(NamedTuple):
    """Tensors of one shape as rows: contiguous ones as one row, halves of a tensor as many.

    Attributes:
        grid: number of programs.
        sizes: elements of a row, programs of a row, and for each tensor the stride of its rows.
        full: every program computes ``block`` elements, and needs no mask.
        vec: number of neighbours that a thread loads at once; it divides all distances.
        block: elements of a program.
        warps: warps of a program.
    """

    grid: tuple[int, int, int]
    sizes: tuple[int, ...]
    full: bool
    vec: int
    block: int
    warps: int


def rows_of(*tensors: Tensor) -> tuple[Rows, list[Tensor]]:
    """Return the rows of tensors of one shape, and contiguous rows as arguments of the launch.

    A tensor is copied if its rows are not contiguous, or if they are short and have gaps.

    Args:
        tensors: tensors of one shape, with one element or more.
    """
    shape = tensors[0].shape
    n = shape[-1] if shape else 1
    if n < SHORTEST or all(x.is_contiguous() for x in tensors):
        given = [x.contiguous() for x in tensors]
        rows, n = 1, given[0].numel()
        distances = [0] * len(given)
    else:
        given = [x.reshape(-1, n) for x in tensors]  # copies where this is no view
        given = [x if x.stride(1) == 1 else x.contiguous() for x in given]
        rows, distances = len(given[0]), [x.stride(0) for x in given]
    widest = WIDEST // max(x.element_size() for x in given)
    vec = math.gcd(MAX_VECTOR, widest, n, *distances)
    block = max(power_of_two(n, LARGEST), OF_WARP)
    blocks, grid = -(-n // block), (rows * -(-n // block), 1, 1)
    sizes = n, blocks, *distances
    return Rows(grid, sizes, n % block == 0, vec, block, block // OF_WARP), given


@triton.jit
def element_offsets(n, blocks, FULL: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """Return the row of this program, and offsets and mask of its elements within the row; int64.

    Args:
        n: elements of a row.
        blocks: programs of a row.
        FULL: whether BLOCK divides n.
        VEC: number that divides n.
        BLOCK: elements of a program.
    """
    pid = tl.program_id(0)
    start = (pid % blocks).to(tl.int64) * BLOCK
    j = tl.arange(0, BLOCK)
    row = (pid // blocks).to(tl.int64)
    # a constant mask of True, which the compiler removes
    if FULL:
        return row, start + j, tl.full([BLOCK], True, tl.int1)
    else:
        # tells the compiler that VEC divides the mask's bound, or it would load element by element
        return row, start + j, j < n // VEC * VEC - start
