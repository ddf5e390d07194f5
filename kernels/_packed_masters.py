"""FP32 masters as a half value and 16 more bits, in Triton and with the same bits in torch."""

import torch
from torch import Tensor

from tritonamp.kernels.device import tl, triton

# Kernels below repeat these constants as literals, because a jitted function can read no global
# that is not a tl.constexpr.
_LEAST_HALF = 113  # exponent of 2^-14, float16's least normal number
_ULP_SHIFT = 25  # float16: an ulp is 2^(exponent - 10), and the remainder counts 2^-15 of an ulp


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
    # From 2^-14 on this is exact, because the sum of a half value and its own remainder is an FP32
    # number.
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
    """Return FP32 values rounded to the type named TYPE, in FP32; NaN stays some NaN."""
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
