"""Magnitudes as integers: one comparison orders numbers, inf above them, and NaN above inf."""

from tritonamp.kernels.device import tl, triton


@triton.jit
def magnitude(x, TYPE: tl.constexpr):
    """Return |x| as an integer that orders like |x|, inf above all numbers and NaN above inf."""
    # Without the sign, the bits of floating-point numbers are ordered like the numbers. An integer
    # maximum is exact in any order, so atomics on it give the same bits in every run.
    if tl.float32 == TYPE:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return (x.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32)


@triton.jit
def float_bits(number, TYPE: tl.constexpr):
    """Return the FP32 bits of the value whose ``magnitude`` is ``number``."""
    if tl.float32 == TYPE:
        return number
    else:
        # The sign is cleared again, because a conversion may set that of a NaN, and a signed
        # maximum would then order NaN below all numbers.
        return (
            number.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
            & 0x7FFFFFFF
        )


@triton.jit
def is_normal(number, TYPE: tl.constexpr):
    """Tell whether a value of this magnitude is normal: its exponent field is not 0."""
    if tl.float32 == TYPE:
        return number >= (1 << 23)
    elif tl.float16 == TYPE:
        return number >= (1 << 10)
    else:
        return number >= (1 << 7)
