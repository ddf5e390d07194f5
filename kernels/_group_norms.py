"""Tiles of group norm kernels over [N, C, S] in either memory format.

A line is the ``depth * spatial`` elements of one group of one image. A tile is [lines, channels,
places] if places are neighbours in memory, and [places, lines, channels] if channels are (LAST), so
that neighbours in memory are last. A tile holds ROWS lines of one image, and BLOCK elements of each
line, at PLACES places. The offset of a tile is computed once, in 64 bits.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tritonamp.kernels._by_length import is_by_length
from tritonamp.kernels._lines import MANY, MAX_WARPS, SHORT, WIDEST, power_of_two
from tritonamp.kernels.device import WARP_SIZE, tl, triton

LOOP = 4096  # elements of a tile that moves along a line
WARPS = 16  # warps of such a tile in the backward
SECTOR = 32  # bytes that memory transfers at a time
FARTHEST = 1 << 31  # elements between a tile's first and last, because offsets have 32 bits


class Groups(NamedTuple):
    """The layout of lines, and the tile that moves along them, computed from the shape.

    Attributes:
        images: number of images.
        blocks: number of programs that share the lines of an image.
        whole: a program's tile covers whole lines; else the program moves along them.
        sizes: groups, channels of a group, elements of a channel, elements of a line.
        layout: LAST, ALIGN (BLOCK if every tile is full and needs no mask, else less), VEC
            (neighbours that a thread loads at once), PLACES, ROWS, BLOCK.
        num_warps: warps of a program.
    """

    images: int
    blocks: int
    whole: bool
    sizes: tuple[int, int, int, int]
    layout: tuple[bool, int, int, int, int, int]
    num_warps: int

    @property
    def scattered(self) -> bool:
        """Whether a thread's elements take many accesses, each with an address and a mask."""
        return self.layout[2] < 4


def walk(
    shape: tuple[int, ...], groups: int, last: bool, itemsize: int, per_thread: int, longest: int
) -> Groups:
    """Return the tiling of a tensor of this shape.

    Args:
        shape: shape [N, C, ...] of the tensor.
        groups: number of groups of channels.
        last: whether channels are neighbours in memory.
        itemsize: bytes of an element.
        per_thread: elements for a thread to hold.
        longest: longest line that a program holds in its registers.
    """
    images, depth, spatial = shape[0], shape[1] // groups, math.prod(shape[2:])
    # with one place, both formats are the same memory, and neighbours are channels
    last = last or spatial == 1
    across, along = (spatial, depth) if last else (depth, spatial)
    # columns are neighbours in memory, and strides count what lies apart
    columns = power_of_two(along)
    whole = columns * power_of_two(across) <= longest
    if not whole:
        columns = power_of_two(along, LOOP)
    fill, distance = (longest if whole else LOOP) // columns, shape[1] if last else spatial
    # each warp gets a channel of its own, whose sum is exchanged only at the channel's end
    if not whole and not last:
        fill = max(math.gcd(depth, WARPS), fill)
        columns = min(columns, LOOP // fill)
    # a tile may not reach farther than 32-bit offsets do
    strides = power_of_two(across, min(fill, FARTHEST // distance))
    # several short lines make up a tile; or as many lines as fill a sector of memory, if
    # enough programs remain to fill a GPU
    block, rows = columns * strides, 1
    if whole and block <= 512:
        rows = power_of_two(groups, SHORT // block)
    elif last and depth * itemsize < SECTOR and (is_by_length() or images * groups >= 4 * MANY):
        rows = power_of_two(groups, SECTOR // (depth * itemsize))
    full = along % columns == 0 and across % strides == 0 and groups % rows == 0
    # a vector never crosses the end of a line's neighbours
    vec = math.gcd(along, WIDEST // itemsize)
    warps = min(max(rows * block // (WARP_SIZE * per_thread), 1), MAX_WARPS)
    align, places = block if full else min(vec, block // 2), strides if last else columns
    layout = last, align, vec, places, rows, block
    sizes = groups, depth, spatial, depth * spatial
    return Groups(images, -(-groups // rows), whole, sizes, layout, warps)


def memory_format(x: Tensor) -> torch.memory_format:
    """Return the memory format of ``x``: channels last if it is that alone, else contiguous."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(x.dim(), torch.contiguous_format)
    lies_so = x.is_contiguous(memory_format=last) and not x.is_contiguous()
    return last if lies_so else torch.contiguous_format


@triton.jit
def along_axis(SIZE: tl.constexpr, AXIS: tl.constexpr):
    """Return the integers below SIZE along one axis of three."""
    i = tl.arange(0, SIZE)
    if AXIS == 0:
        return i[:, None, None]
    elif AXIS == 1:
        return i[None, :, None]
    else:
        return i[None, None, :]


@triton.jit
def sum_of_lines(x, LAST: tl.constexpr):
    """Return the sum over each line of a tile; each thread adds up its own elements first."""
    # with one line, a single reduction of the tile is enough, instead of one for each axis
    if x.shape[1 if LAST else 0] == 1:
        return tl.full([1, 1, 1], tl.sum(x), tl.float32)
    else:
        return tl.sum(tl.sum(x, 2, keep_dims=True), 0 if LAST else 1, keep_dims=True)


@triton.jit
def known_to_divide(depth, spatial, LAST: tl.constexpr, VEC: tl.constexpr):
    """Return ``depth`` and ``spatial``, of which the compiler knows one as a multiple of VEC."""
    if LAST:
        return depth // VEC * VEC, spatial
    else:
        return depth, spatial // VEC * VEC


@triton.jit
def tile_lines(
    block, groups,
    LAST: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return a program's groups, in a tile's shape, and the mask of those that exist."""
    i = along_axis(ROWS, 1 if LAST else 0) + block * ROWS
    if ROWS == 1 or ALIGN == BLOCK:
        return i, tl.full([1, 1, 1], True, tl.int1)
    else:
        return i, i < groups


@triton.jit
def tile_start(
    image, block, channel, place, groups, depth, spatial, LAST: tl.constexpr, ROWS: tl.constexpr
):
    """Return the offset of a tile's first element, int64."""
    image = image.to(tl.int64)
    if LAST:
        return ((image * spatial + place) * groups + block * ROWS) * depth + channel
    else:
        return ((image * groups + block * ROWS) * depth + channel) * spatial + place


@triton.jit
def tile_offsets(
    channel, place, valid, groups, depth, spatial,
    LAST: tl.constexpr, ALIGN: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return a tile's offsets from its start, its channels, their mask, and its mask."""
    CHANNELS: tl.constexpr = BLOCK // PLACES
    line = along_axis(ROWS, 1 if LAST else 0)
    i = along_axis(CHANNELS, 2 if LAST else 1)
    j = along_axis(PLACES, 0 if LAST else 2)
    offs = j * (groups * depth) + line * depth + i if LAST else (line * depth + i) * spatial + j
    # a constant mask of True, which the compiler removes: loads are full vectors
    if ALIGN == BLOCK:
        full = tl.full([1, 1, 1], True, tl.int1)
        return offs, channel + i, full, full
    else:
        given = valid & (i < depth - channel)
        return offs, channel + i, given, given & (j < spatial - place)


@triton.jit
def of_channels(pointer, lines, channels, depth, given, GIVEN: tl.constexpr, MISSING: tl.constexpr):
    """Return a weight for each channel of the groups, or MISSING if there is no weight."""
    if GIVEN:
        # FP32 here, so that half and FP32 weights take the same arithmetic
        return tl.load(pointer + (lines * depth + channels), mask=given, other=0.0).to(tl.float32)
    else:
        return MISSING
