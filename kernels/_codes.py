"""Moments of one byte an element, in Triton and with the same bits in torch.

A code is a float of 3 mantissa bits whose exponents count down from the exponent that a block of
128 elements shares. A signed code has 4 exponent bits and reaches down 17 powers of two below the
block's largest value. An unsigned code has 5 exponent bits and reaches down 33 powers of two.
Codes of whole blocks come first in memory, then a byte for each block's exponent.
"""

import torch
from torch import Tensor

from tritonamp.kernels._memory_order import BLOCK
from tritonamp.kernels._random_bits import rounded, rounded_twin
from tritonamp.kernels.device import tl, triton

# Kernels below repeat these constants as literals, because a jitted function can read no global
# that is not a tl.constexpr.
SIGNED, UNSIGNED = 15, 31
"""Kinds of codes; each is the largest exponent field of its codes."""
_DROPPED = 20  # bits of an FP32 mantissa that a code lacks
_LEAST_EXPONENT = 40  # least exponent of a block: units of its codes are still normal numbers
_NOT_FINITE = 255  # exponent of a block with NaN
_LARGEST = 1.875 * 2.0**127  # largest value of a code


@triton.jit
def block_exponents(r):
    """Return the exponents, int32, of blocks of rounded values, a block in each row of ``r``."""
    # not of the exact values, because rounding up may raise the largest exponent of a block
    return tl.maximum(tl.max((r.to(tl.int32, bitcast=True) >> 23) & 0xFF, 1), 40)


@triton.jit
def encoded(x, r, exponent, random, KIND: tl.constexpr):
    """Return the codes, int32, of FP32 values.

    Args:
        x: FP32 values.
        r: the values after ``rounded(x, random, 20)``.
        exponent: exponent of each value's block, from ``block_exponents(r)``.
        random: the bits that ``r`` was rounded with.
        KIND: 15 for signed codes, 31 for unsigned ones. An unsigned code is 0 only for 0, because
            updates divide by it.
    """
    below = (exponent - KIND) << 3
    code = ((r.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> 20) - below
    # codes below 8 are multiples of a unit, 1 / per_unit (the exponents of x and 1 / x sum to 254)
    per_unit = ((256 + KIND - exponent) << 23).to(tl.float32, bitcast=True)
    # A block with NaN has no unit. From 8 units on the code above is used; the limit keeps these
    # products from overflowing int32.
    units = tl.where(exponent == 255, 0.0, tl.minimum(tl.abs(x) * per_unit, 8.0))
    up = (random >> 12).to(tl.int32).to(tl.float32) * 9.5367431640625e-07  # 2^-20
    code = tl.where(code >= 8, code, (units + up).to(tl.int32))
    if KIND == 15:
        return tl.where((x < 0.0) & (code != 0), code | 128, code)
    return tl.where((x > 0.0) & (code == 0), 1, code)


@triton.jit
def decoded(code, exponent, KIND: tl.constexpr):
    """Return the FP32 values of codes and their blocks' exponents, both int32."""
    magnitude = code & 127 if KIND == 15 else code
    normal = ((magnitude + ((exponent - KIND) << 3)) << 20).to(tl.float32, bitcast=True)
    unit = ((exponent - KIND - 2) << 23).to(tl.float32, bitcast=True)
    # codes below 8 are multiples of a unit, like subnormal numbers
    x = tl.where(magnitude >= 8, normal, magnitude.to(tl.float32) * unit)
    if KIND == 15:
        x = tl.where(code >= 128, -x, x)
    return tl.where(exponent == 255, float("nan"), x)


@triton.jit
def load_moment(codes, exponents_ptr, offs, blocks, end, KIND: tl.constexpr):
    """Return FP32 moments of whole blocks, a block in each row of ``offs``; 0 from ``end`` on."""
    code = tl.load(codes + offs, mask=offs < end, other=0).to(tl.int32)
    exponent = tl.load(exponents_ptr + blocks, mask=blocks * 128 < end, other=40).to(tl.int32)
    return decoded(code, tl.expand_dims(exponent, 1), KIND)


@triton.jit
def store_moment(codes, exponents_ptr, offs, blocks, end, x, random, KIND: tl.constexpr):
    """Store FP32 moments of whole blocks, a block in each row of ``offs``, up to ``end``.

    Magnitudes beyond the largest code become the largest code, because an inf would take the
    exponent of its whole block.
    """
    # comparisons instead of a clamp, because they take fewer registers
    x = tl.where(x > 3.190147189883798e38, 3.190147189883798e38, x)  # NaN stays NaN
    if KIND == 15:
        x = tl.where(x < -3.190147189883798e38, -3.190147189883798e38, x)
    r = rounded(x, random, 20)
    exponent = block_exponents(r)
    code = encoded(x, r, tl.expand_dims(exponent, 1), random, KIND)
    tl.store(codes + offs, code.to(tl.uint8), mask=offs < end)
    tl.store(exponents_ptr + blocks, exponent.to(tl.uint8), mask=blocks * 128 < end)


# The form that ``StateFormat`` asks for. The exponents of a tensor follow its ``stride`` codes.


@triton.jit
def load_signed(state, offs, mask, blocks, whole, stride):
    return load_moment(state, state + stride, offs, blocks, whole, 15)


@triton.jit
def load_unsigned(state, offs, mask, blocks, whole, stride):
    return load_moment(state, state + stride, offs, blocks, whole, 31)


@triton.jit
def store_signed(state, offs, mask, blocks, whole, stride, x, random):
    store_moment(state, state + stride, offs, blocks, whole, x, random, 15)


@triton.jit
def store_unsigned(state, offs, mask, blocks, whole, stride, x, random):
    store_moment(state, state + stride, offs, blocks, whole, x, random, 31)


def encode(x: Tensor, random: Tensor | None, kind: int) -> tuple[Tensor, Tensor]:
    """Return codes and exponents of blocks of FP32 values.

    Args:
        x: FP32 values of shape (n,), where n is a multiple of BLOCK.
        random: random bits, int64 of shape (n,). None: round down in magnitude, which is exact for
            decoded values.
        kind: SIGNED or UNSIGNED.

    Returns:
        Codes, uint8 of shape (n,), and exponents, uint8 of shape (n / BLOCK,).
    """
    random = torch.zeros_like(x, dtype=torch.int64) if random is None else random
    x = x.clamp(-_LARGEST, _LARGEST)  # an inf would take the exponent of its whole block
    bits = rounded_twin(x, random, _DROPPED).view(torch.int32)
    exponent = ((bits >> 23) & 0xFF).view(-1, BLOCK).amax(1).clamp_min(_LEAST_EXPONENT)
    e = exponent.repeat_interleave(BLOCK)
    code = ((bits & 0x7FFFFFFF) >> _DROPPED) - ((e - kind) << 3)
    # codes below 8 are multiples of a unit
    per_unit = ((256 + kind - e) << 23).view(torch.float32)
    units = torch.where(e == _NOT_FINITE, 0.0, (x.abs() * per_unit).clamp_max(8.0))
    up = (random >> (32 - _DROPPED)).float() * 2.0**-_DROPPED
    code = torch.where(code >= 8, code, (units + up).to(torch.int32))
    if kind == SIGNED:
        code = torch.where((x < 0) & (code != 0), code | 128, code)
    else:
        code = torch.where((x > 0) & (code == 0), 1, code)
    return code.to(torch.uint8), exponent.to(torch.uint8)


def decode(code: Tensor, exponent: Tensor, kind: int) -> Tensor:
    """Return the FP32 values, shape (n,), of codes and exponents that ``encode`` returned."""
    code, e = code.to(torch.int32), exponent.to(torch.int32).repeat_interleave(BLOCK)
    magnitude = code & 127 if kind == SIGNED else code
    normal = ((magnitude + ((e - kind) << 3)) << _DROPPED).view(torch.float32)
    unit = ((e - kind - 2) << 23).view(torch.float32)
    x = torch.where(magnitude >= 8, normal, magnitude.float() * unit)
    if kind == SIGNED:
        x = torch.where(code >= 128, -x, x)
    return torch.where(e == _NOT_FINITE, float("nan"), x)
