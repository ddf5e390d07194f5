"""Compact forms of a step's FP32 values: bfloat16 moments, one-byte moments, masters in two halves.

Every form has a Triton function and a twin in torch with the same bits. Moments are rounded
stochastically, because a second moment usually changes by a thousandth, which is less than half the
distance of two bfloat16 numbers: rounded to the nearest, it would never decay. Whether an element
is rounded up depends on a hash of element and tensor, to which every step adds the golden ratio
(Weyl's sequence). Successive roundings then spread evenly, which leaves less noise in a moment than
independent ones, and a run that is repeated or resumed has the same bits.
"""

import torch
from torch import Tensor

from tritonamp.kernels._device_tables import memory_strides
from tritonamp.kernels.device import tl, triton

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
"""Dtypes of state tensors by the name of a format."""
BLOCK = 128
"""Number of elements of a parameter whose codes share an exponent."""
# Kernels below repeat these constants as literals, because a jitted function can read no global
# that is not a tl.constexpr.
SIGNED, UNSIGNED = 15, 31
"""Kinds of codes, by the field of the largest exponent.

A code is a float of 3 mantissa bits whose exponents count down from the block's exponent. A signed
code has 4 exponent bits and reaches down 17 powers of two below the block's largest value. An
unsigned code has 5 exponent bits and reaches down 33 powers of two.
"""
_DROPPED = 20  # bits of an FP32 mantissa that a code lacks
_LEAST_EXPONENT = 40  # of a block, for which units of its codes are normal numbers
_NOT_FINITE = 255  # the exponent of a block with NaN
_LARGEST = 1.875 * 2.0**127  # largest value of a code
_GOLDEN = 0x9E3779B1  # of 2^32
_NUMBER, _ELEMENT = 0x85EBCA77, 0x27D4EB2F  # odd factors with evenly spread bits
_MIX1, _MIX2 = 0x85EBCA6B, 0xC2B2AE35  # the finaliser of MurmurHash3 (Appleby)
_LEAST_HALF = 113  # the exponent of 2^-14, float16's least normal number
_ULP_SHIFT = 25  # float16: the remainder counts 2^-15 of an ulp, which is 2^(exponent - 10)


# random bits


@triton.jit
def random_bits(offs, step, number):
    """Return 32 random bits for each element's first moment, and for its second moment; uint32.

    Args:
        offs: indices of the elements in their tensor, integers.
        step: step count, float of at most 2^24. Each step turns both results by the golden ratio.
        number: index of the tensor.
    """
    # 0x85EBCA77 exceeds int32, so the product is made in int64 and cut to 32 bits
    seed = (number.to(tl.int64) * 0x85EBCA77 & 0xFFFFFFFF).to(tl.uint32)
    h = (offs.to(tl.uint32) * 0x27D4EB2F) ^ seed
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h ^= h >> 16
    turn = (step.to(tl.int64) * 0x9E3779B1 & 0xFFFFFFFF).to(tl.uint32)
    # a second hash, because equal bits would round both moments of an element alike
    return h + turn, ((h * 0x9E3779B1) ^ (h >> 16)) + turn


def random_bits_twin(like: Tensor, step: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the bits of ``random_bits`` as int64, for each element in memory order."""
    elements = torch.arange(like.numel(), device=like.device)
    h = (elements * _ELEMENT ^ number * _NUMBER) & 0xFFFFFFFF
    h = _times(h ^ (h >> 16), _MIX1)
    h = _times(h ^ (h >> 13), _MIX2)
    h = h ^ (h >> 16)
    turn = step.to(like.device, torch.int64) * _GOLDEN
    return (h + turn) & 0xFFFFFFFF, ((_times(h, _GOLDEN) ^ (h >> 16)) + turn) & 0xFFFFFFFF


def _times(h: Tensor, factor: int) -> Tensor:
    """Return the low 32 bits of a product of 32-bit numbers, without overflow of int64."""
    # 16 bits at a time, because a product of two 32-bit numbers may not fit int64
    low, high = h & 0xFFFF, h >> 16
    return (low * factor + ((high * factor & 0xFFFF) << 16)) & 0xFFFFFFFF


# where elements and codes lie


def in_memory_of(like: Tensor, flat: Tensor) -> Tensor:
    """Return a view of the n elements of ``flat`` in the shape and memory order of ``like``."""
    return flat.as_strided(like.shape, memory_strides(like))


def in_order_of_memory(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the elements of a tensor, shape (n,), in the memory order of ``like``, or in its own.

    The result is a view if the tensor has that memory order, else a copy.
    """
    strides = memory_strides(tensor if like is None else like)
    if tensor.stride() == strides:
        return tensor.as_strided((tensor.numel(),), (1,))
    return (
        torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        .copy_(tensor)
        .as_strided((tensor.numel(),), (1,))
    )


def padded(numel: int) -> int:
    """Return the number of elements of the whole blocks that hold ``numel`` elements."""
    return -(-numel // BLOCK) * BLOCK


def bytes_per_element(state: str) -> float:
    """Return the bytes that an element of a state takes in the format ``state``."""
    dtype = FORMATS[state]
    return dtype.itemsize + (1 / BLOCK if dtype is torch.uint8 else 0)


def codes_size(numel: int) -> int:
    """Return the number of bytes of a moment in codes: those of whole blocks, then exponents."""
    return padded(numel) + padded(numel) // BLOCK


def split_codes(memory: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return codes (padded(numel),) and exponents (padded(numel) / BLOCK,), as views."""
    return memory[: padded(numel)], memory[padded(numel) :]


# FP32 rounded to fewer bits of mantissa


@triton.jit
def rounded(x, random, DROPPED: tl.constexpr):
    """Round FP32 stochastically to a mantissa without its last DROPPED bits; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    up = (random >> (32 - DROPPED)).to(tl.int32)
    # A carry out of the mantissa raises the exponent, which gives the next number, or inf at the
    # end. A NaN could carry into the sign, so it is kept.
    bits = ((bits + up) >> DROPPED) << DROPPED
    return tl.where(x != x, x, bits.to(tl.float32, bitcast=True))


def rounded_twin(x: Tensor, random: Tensor, dropped: int) -> Tensor:
    """Return what ``rounded`` returns; ``random`` is int64."""
    up = (random >> (32 - dropped)).to(torch.int32)
    bits = ((x.view(torch.int32) + up) >> dropped) << dropped
    return torch.where(x.isnan(), x, bits.view(torch.float32))


# moments of one byte


@triton.jit
def block_exponents(r):
    """Return the exponent, int32, of each row of values that are rounded to codes' mantissas."""
    # of rounded values, because rounding up may raise the largest exponent of a block
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
    # below the last power of two: multiples of a unit, 1 / per_unit (fields of x and 1 / x sum to
    # 254)
    per_unit = ((256 + KIND - exponent) << 23).to(tl.float32, bitcast=True)
    # a block with NaN has no unit; larger values are not encoded here, and would overflow int32
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
    # no exponent bits: a multiple of the unit, as subnormal numbers are
    x = tl.where(magnitude >= 8, normal, magnitude.to(tl.float32) * unit)
    if KIND == 15:
        x = tl.where(code >= 128, -x, x)
    return tl.where(exponent == 255, float("nan"), x)


@triton.jit
def load_moment(codes, exponents_ptr, offs, blocks, end, KIND: tl.constexpr):
    """Return FP32 moments of whole blocks, a block in a row of ``offs``; zeros from ``end`` on."""
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
    # below the last power of two: multiples of a unit
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


# masters as a half value and 16 more bits


@triton.jit
def joined(half, remainder, BF16: tl.constexpr):
    """Return FP32 masters from half values, given in FP32, and int16 remainders."""
    bits = half.to(tl.int32, bitcast=True)
    if BF16:
        # Other code may have written 0, inf or NaN to the half value. Its remainder then means
        # nothing: added to these bits, it would make a NaN of 0, and a number of inf.
        magnitude = bits & 0x7FFFFFFF
        alone = ((magnitude == 0) & (remainder < 0)) | (magnitude >= 0x7F800000)
        whole = bits + tl.where(alone, 0, remainder.to(tl.int32))
        return whole.to(tl.float32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 0xFF, 113)  # of 2^-14, float16's least normal number
    unit = ((exponent - 25) << 23).to(tl.float32, bitcast=True)
    # exact for the half value's own remainder from 2^-14 on: their sum is an FP32 number
    return half + remainder.to(tl.float32) * unit


@triton.jit
def split(x, BF16: tl.constexpr):
    """Return half values, in FP32, and int32 remainders of FP32 masters."""
    bits = x.to(tl.int32, bitcast=True)
    if BF16:
        # Ties away from 0, because a remainder then lies in -2^15 to 2^15 - 1 and 16 bits are
        # enough.
        half = ((bits + 0x8000) >> 16) << 16
        half = tl.where(x != x, 0x7FC00000, half)
        remainder = tl.where((half & 0x7FFFFFFF) >= 0x7F800000, 0, bits - half)
        return half.to(tl.float32, bitcast=True), remainder
    half = x.to(tl.float16).to(tl.float32)
    exponent = tl.maximum((half.to(tl.int32, bitcast=True) >> 23) & 0xFF, 113)
    # 279 = 254 + 25: the reciprocal of the unit in joined
    per_unit = ((279 - exponent) << 23).to(tl.float32, bitcast=True)
    finite = tl.abs(half) < float("inf")
    units = tl.where(finite, (x - tl.where(finite, half, 0.0)) * per_unit, 0.0)
    return half, tl.floor(units + 0.5).to(tl.int32)


@triton.jit
def rounded_half(x, TYPE: tl.constexpr):
    """Return FP32 values rounded to the type named TYPE, in FP32; a NaN is some NaN."""
    if TYPE == "bfloat16":
        # in integers, because the interpreter truncates to bfloat16
        bits = x.to(tl.int32, bitcast=True)
        bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        return tl.where(x != x, x, bits.to(tl.float32, bitcast=True))
    elif TYPE == "float16":
        return x.to(tl.float16).to(tl.float32)
    else:
        return x


def join_master(half: Tensor, remainder: Tensor) -> Tensor:
    """Return the FP32 masters of half values and their remainders, with the bits of ``joined``.

    Args:
        half: half values, float16 or bfloat16 of any shape.
        remainder: int16, of the shape of ``half``.
    """
    wide, r = half.float(), remainder.to(torch.int32)
    bits = wide.view(torch.int32)
    if half.dtype is torch.bfloat16:
        # Other code may have written 0, inf or NaN to the half value. Its remainder then means
        # nothing: added to these bits, it would make a NaN of 0, and a number of inf.
        magnitude = bits & 0x7FFFFFFF
        alone = ((magnitude == 0) & (r < 0)) | (magnitude >= 0x7F800000)
        return (bits + torch.where(alone, 0, r)).view(torch.float32)
    exponent = ((bits >> 23) & 0xFF).clamp_min(_LEAST_HALF)
    return wide + r.float() * ((exponent - _ULP_SHIFT) << 23).view(torch.float32)


def split_master(x: Tensor, half_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return half values and int16 remainders of FP32 masters, the inverse of ``join_master``.

    The bits are those of ``split``. In bfloat16 the result is exact for all finite values that
    round to finite ones. In float16 it is exact from 2^-14 to 65504 in magnitude; smaller values
    are off by 2^-40 (1 + 2^-24) at most, and -0 becomes 0. The half value is the nearest one, ties
    away from 0 in bfloat16 and to even in float16.
    """
    bits = x.view(torch.int32)
    if half_dtype is torch.bfloat16:
        # Ties away from 0, because a remainder then lies in -2^15 to 2^15 - 1 and 16 bits are
        # enough.
        half = torch.where(x.isnan(), 0x7FC00000, ((bits + 0x8000) >> 16) << 16)
        r = torch.where((half & 0x7FFFFFFF) >= 0x7F800000, 0, bits - half)
        return half.view(torch.float32).bfloat16(), r.to(torch.int16)
    rounded_half = x.half()
    wide = rounded_half.float()
    exponent = ((wide.view(torch.int32) >> 23) & 0xFF).clamp_min(_LEAST_HALF)
    per_unit = ((254 + _ULP_SHIFT - exponent) << 23).view(torch.float32)
    finite = wide.isfinite()
    units = torch.where(finite, (x - torch.where(finite, wide, 0.0)) * per_unit, 0.0)
    return rounded_half, (units + 0.5).floor().to(torch.int16)
