"""Use of a format's range by a tensor: largest magnitude, zeros, subnormals. 2 B/element.

The kernel returns at once if a flag on the device is 0. So it can be part of a CUDA graph or of a
compiled forward and still read only every hundredth step.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tritonamp.kernels._implementations import Implementations
from tritonamp.kernels._launch import Launch
from tritonamp.kernels._magnitudes import float_bits, is_normal, magnitude
from tritonamp.kernels._sample import ListSample
from tritonamp.kernels._shipped import Shipped
from tritonamp.kernels._tables import DTYPES
from tritonamp.kernels.device import WARP_SIZE, tl, triton

AMAX, ELEMENTS, ZEROS, SUBNORMALS, FORMAT = range(5)
"""Places in a row, int64: bits of the largest magnitude in FP32 (inf and NaN above all others),
three counts, and the format's number in ``FORMATS``.
"""
ROW = 5
FORMATS = [None, torch.float64, torch.float32, torch.bfloat16, torch.float16]
"""Formats by number, the narrowest last. A row that has seen several names the narrowest."""

# A thread waits for several vectors of 16 bytes at once, and a program adds up several blocks, so
# that few atomics meet in a row.
_WARPS = 4
_VECTORS = 4  # vectors of 16 bytes that a thread waits for
_BLOCKS = 16  # blocks of one program


@triton.jit(do_not_specialize=("n",))
def ranges_kernel(
    x_ptr, row_ptr, on_ptr, n,
    FORMAT: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Count in BLOCKS blocks of BLOCK elements, in vectors of VEC."""
    # on the device, because a host that asked would wait, and a graph would fix the answer
    if tl.load(on_ptr) == 0:
        return
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    begin = tl.program_id(0).to(tl.int64) * (BLOCK * BLOCKS)
    end = min(begin + BLOCK * BLOCKS, n)
    whole = begin + (end - begin) // VEC * VEC
    j = tl.arange(0, BLOCK)
    # each thread counts in its own vectors, so that nothing is exchanged before the end
    largest = tl.zeros([BLOCK // VEC], tl.int32)  # of the VEC neighbours that one thread holds
    nonzero = tl.zeros([BLOCK // VEC], tl.int32)
    normal = tl.zeros([BLOCK // VEC], tl.int32)
    for at in range(begin, whole, BLOCK):
        x = tl.load(x_ptr + at + j, mask=at + j < whole, other=0.0)
        number = tl.reshape(magnitude(x, TYPE), (BLOCK // VEC, VEC))
        largest = tl.maximum(largest, tl.max(number, 1))
        nonzero += tl.sum((number != 0).to(tl.int32), 1)
        normal += tl.sum(is_normal(number, TYPE).to(tl.int32), 1)
    rest = whole + tl.arange(0, VEC)
    number = magnitude(tl.load(x_ptr + rest, mask=rest < end, other=0.0), TYPE)
    amax = max(tl.max(largest, 0), tl.max(number, 0))
    some = tl.sum(nonzero, 0) + tl.sum((number != 0).to(tl.int32), 0)
    many = tl.sum(normal, 0) + tl.sum(is_normal(number, TYPE).to(tl.int32), 0)
    # integers, for which the order of programs does not matter
    tl.atomic_max(row_ptr, float_bits(amax, TYPE).to(tl.int64), sem="relaxed")
    tl.atomic_add(row_ptr + 1, end - begin, sem="relaxed")
    tl.atomic_add(row_ptr + 2, end - begin - some, sem="relaxed")
    tl.atomic_add(row_ptr + 3, (some - many).to(tl.int64), sem="relaxed")
    tl.atomic_max(row_ptr + 4, tl.full((), FORMAT, tl.int64), sem="relaxed")


def ranges_triton(x: Tensor, row: Tensor, on: Tensor) -> None:
    vec = 16 // x.element_size()
    block = WARP_SIZE * _WARPS * _VECTORS * vec
    grid = -(-x.numel() // (block * _BLOCKS)), 1, 1
    constants = FORMATS.index(x.dtype), vec, block, _BLOCKS
    Launch(ranges_kernel, grid, (x.numel(),), constants, _WARPS)(x, row, on)


def ranges_torch(x: Tensor, row: Tensor, on: Tensor) -> None:
    if on.device.type == "cpu" and not on:  # a device's flag would make the host wait
        return
    numbers, lowest = x.abs(), torch.finfo(x.dtype).tiny
    bits = numbers.amax().float().view(torch.int32).long()
    zeros, small = (numbers == 0).sum(), (numbers < lowest).sum()
    size, form, nothing = (bits.new_full((), n) for n in (x.numel(), FORMATS.index(x.dtype), 0))
    largest = torch.stack([bits, nothing, nothing, nothing, form])
    counts = torch.stack([nothing, size, zeros, small - zeros, nothing])
    # times the flag, instead of a branch on it, for the same reason
    row.copy_(torch.maximum(row, largest * on) + counts * on)


def ranges(x: Tensor, row: Tensor, on: Tensor, backend: str = "auto") -> None:
    """Add a tensor's use of its format's range to a row of numbers.

    Args:
        x: tensor of a floating dtype, of any shape and strides. An element that an expanded tensor
            repeats counts once. A tensor with gaps is copied first.
        row: int64 of shape (ROW,), updated in place: AMAX and FORMAT become the maximum of old and
            new values, ELEMENTS, ZEROS and SUBNORMALS are added up.
        on: 0-d int32 on the same device, 1 or 0; 0 leaves the row unchanged and ``x`` unread.
        backend: "auto", "triton" or "eager".
    """
    with torch.no_grad():
        x = _gapless(x)
        if x.numel():
            kernel = x.dtype in DTYPES and RANGES.uses_triton(backend, x)
            RANGES.run(backend, kernel, x, row, on)


def _gapless(x: Tensor) -> Tensor:
    """Return the elements of ``x``, each once, in memory order."""
    once = x[tuple(0 if stride == 0 else slice(None) for stride in x.stride())]
    order = sorted(range(once.dim()), key=once.stride, reverse=True)
    return once.permute(order).contiguous()


@torch.library.custom_op("tritonamp::ranges", mutates_args=("row",))
def ranges_traced(x: Tensor, row: Tensor, on: Tensor, backend: str) -> None:
    """Run ``ranges`` as one operation of a compiled graph."""
    ranges(x, row, on, backend)


def _sample(dtype: torch.dtype | None, variant: str, bytes: int) -> ListSample:
    def args(tensors: list[Tensor], half: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.cat([t.flatten() for t in tensors]).to(dtype or half)
        x[1::7] *= torch.finfo(x.dtype).tiny  # subnormal, most of them
        x[2::11] = 0.0
        return x, x.new_zeros(ROW, dtype=torch.int64), x.new_ones((), dtype=torch.int32)

    return ListSample(args, lambda args, _: [args[1].double()], bytes, variant)


RANGES = Implementations(
    ranges_triton, ranges_torch, [_sample(None, "", 2), _sample(torch.float32, "of float32", 4)]
)


def shipped() -> Iterator[Shipped]:
    """Yield calls for each dtype."""
    row, on = torch.empty(ROW, dtype=torch.int64), torch.empty((), dtype=torch.int32)
    for dtype, name in DTYPES.items():
        x = torch.empty(1 << 20, dtype=dtype, device="meta")
        args = x, row.to("meta"), on.to("meta")
        yield Shipped(f"ranges {name}", ranges_triton, args, 48, 22, 0)
