"""Magnitudes as integers: one comparison orders numbers, inf above them, and NaN above inf."""

from tritonamp.kernels.device import tl, triton


@triton.jit
def magnitude(x, TYPE: tl.constexpr):
    """Return |x| as an integer that orders like it, inf above all numbers and NaN above inf."""
    if tl.float32 == TYPE:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return (x.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32)


@triton.jit
def float_bits(number, TYPE: tl.constexpr):
    """Return the bits in FP32 of what has that magnitude."""
    if tl.float32 == TYPE:
        return number
    else:
        return (
            number.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
            & 0x7FFFFFFF
        )


@triton.jit
def is_normal(number, TYPE: tl.constexpr):
    """Tell whether what has that magnitude is neither 0 nor subnormal: its exponent is not 0."""
    if tl.float32 == TYPE:
        return number >= (1 << 23)
    elif tl.float16 == TYPE:
        return number >= (1 << 10)
    else:
        return number >= (1 << 7)
