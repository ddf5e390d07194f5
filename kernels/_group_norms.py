"""How group norm kernels walk over [N, C, S] in either memory format, and what both directions share.

A line is the ``depth * spatial`` elements of one group of one image. A tile of it is [ROWS, BLOCK]:
[channels, spatial] where channels lie apart, [spatial, channels] where they are neighbours
(LAST), so that columns are neighbours in memory. One program has one line.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tritonamp.kernels._lines import MAX_WARPS, WIDEST, cached_by_shape, power_of_two
from tritonamp.kernels.device import WARP_SIZE, tl, triton

LOOP = 4096  # elements of a tile that moves along a line


class Groups(NamedTuple):
    """How lines lie, and the tile that moves along them. All of it follows from the shape.

    Attributes:
        lines: how many: images times groups.
        sizes: groups, channels of a group, elements of a channel.
        layout: LAST, WHOLE (a tile holds a line), VEC (neighbours that a thread loads at once),
            ROWS, BLOCK.
    """

    lines: int
    sizes: tuple[int, int, int]
    layout: tuple[bool, bool, int, int, int]
    num_warps: int


@cached_by_shape
def walk(
    shape: tuple[int, ...], groups: int, last: bool, itemsize: int, per_thread: int, longest: int
) -> Groups:
    """Return how to walk over a tensor of this shape.

    Args:
        shape: [N, C, ...].
        groups: of channels.
        last: whether channels are neighbours in memory.
        itemsize: bytes of an element.
        per_thread: elements that a thread is to hold.
        longest: line that a program holds in its registers.
    """
    depth, spatial = shape[1] // groups, math.prod(shape[2:])
    rows, columns = (spatial, depth) if last else (depth, spatial)
    vec = math.gcd(columns, WIDEST // itemsize)
    block = power_of_two(columns)
    whole = block * power_of_two(rows) <= longest
    if not whole:
        block = power_of_two(columns, LOOP)
    tile_rows = power_of_two(rows, (longest if whole else LOOP) // block)
    warps = max(tile_rows * block // (WARP_SIZE * per_thread), 1)
    layout = last, whole, vec, tile_rows, block
    return Groups(shape[0] * groups, (groups, depth, spatial), layout, min(warps, MAX_WARPS))


def memory_format(x: Tensor) -> torch.memory_format:
    """Return the format in which ``x`` lies, or is to be brought: channels last, or contiguous."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(x.dim(), torch.contiguous_format)
    lies_so = x.is_contiguous(memory_format=last) and not x.is_contiguous()
    return last if lies_so else torch.contiguous_format


@triton.jit
def line_start(groups, depth, spatial, LAST: tl.constexpr, VEC: tl.constexpr):
    """Return this program's group, its image, its first address, and the distance of two rows."""
    line = tl.program_id(0).to(tl.int64)
    group, image = line % groups, line // groups
    if LAST:
        depth = depth // VEC * VEC  # tells the compiler what divides it
        return group, image, image * groups * depth * spatial + group * depth, groups * depth
    else:
        spatial = spatial // VEC * VEC
        return group, image, line * depth * spatial, spatial


@triton.jit
def tile_offsets(
    channel, place, depth, spatial, stride,
    LAST: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return of the tile at that channel and place the offsets, its channels, and what exists.

    Channels are [ROWS, 1], or with LAST [1, BLOCK].
    """
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, BLOCK)[None, :]
    if LAST:
        depth = depth // VEC * VEC
        offs = (place + i).to(tl.int64) * stride + channel + j
        return offs, channel + j, (place + i < spatial) & (channel + j < depth)
    else:
        spatial = spatial // VEC * VEC
        offs = (channel + i).to(tl.int64) * stride + place + j
        return offs, channel + i, (channel + i < depth) & (place + j < spatial)


@triton.jit
def load_of_channels(pointer, group, depth, channels, GIVEN: tl.constexpr, MISSING: tl.constexpr):
    """Return a weight's value for each of these channels of a group, or where there is none MISSING."""
    if GIVEN:
        return tl.load(pointer + group * depth + channels, mask=channels < depth, other=0.0).to(
            tl.float32
        )
    else:
        return MISSING
