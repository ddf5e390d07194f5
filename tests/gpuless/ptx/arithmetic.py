"""The arithmetic of PTX on arrays of NumPy: each operation rounds once, as IEEE 754 has it."""

from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

WARP = 32
"""Lanes that move together."""

FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
INTEGERS = {
    f"{kind}{bits}": getattr(np, f"{'int' if kind == 's' else 'uint'}{bits}")
    for kind in "sub"
    for bits in (8, 16, 32, 64)
}
PACKED = {"bf16": np.uint16, "f16x2": np.uint32, "bf16x2": np.uint32, "u16x2": np.uint32}
TYPES: dict[str, Any] = FLOATS | INTEGERS | PACKED | {"f32x2": np.uint64, "pred": np.bool_}
"""What holds PTX's types; what NumPy does not know, as bits."""
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

NAN16 = np.uint16(0x7FFF)
NANS = {4: np.uint32(0x7FFFFFFF).view(np.float32), 8: np.uint64(0x7FF8 << 48).view(np.float64)}
"""What every NaN is that an instruction makes; FP32 and FP64 by size."""
MIN_NORMAL = 2.0**-126


def one_nan(x: Array) -> Array:
    """Return FP32 or FP64 with every NaN as the hardware writes it: lanes compare bits."""
    nan = np.isnan(x)
    return np.where(nan, NANS[x.itemsize], x) if nan.any() else x


def flushed(x: Array) -> Array:
    """Return FP32 with subnormals turned into zeros of the same sign (``.ftz``)."""
    return np.where(np.abs(x) < np.float32(MIN_NORMAL), np.copysign(np.float32(0), x), x)


def fma32(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c in FP32, rounded once.

    The product is exact in FP64; where a sum that is rounded twice could show, it is rounded to
    odd the first time.
    """
    product, c = np.multiply(a, b, dtype=np.float64), c.astype(np.float64)
    total = product + c
    bits = total.view(np.int64)
    halfway = (bits & 0x1FFFFFFF) == 0x10000000
    if (halfway | (np.abs(total) < MIN_NORMAL)).any():
        total = _sum_to_odd(product, c)
    return total.astype(np.float32)


def _sum_to_odd(a: Array, b: Array) -> Array:
    """Return a + b in FP64, to the odd one of two neighbours: rounding that again is as once."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & (bits & 1 == 0) & (total != 0)
    towards = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + towards, bits).view(np.float64)


def fma16(a: Array, b: Array, c: Array, kind: str) -> Array:
    """Return a * b + c as the bits of "f16" or "bf16", rounded once; given are halves in FP32."""
    total = _sum_to_odd(np.multiply(a, b, dtype=np.float64), c.astype(np.float64))
    if kind == "f16":
        return np.where(np.isnan(total), NAN16, total.astype(np.float16).view(np.uint16))
    near = total.astype(np.float32)
    beyond = np.where(total > near, np.float32(np.inf), np.float32(-np.inf))
    even = (near != total) & (near.view(np.uint32) & 1 == 0)
    return bf16_bits(np.where(even, np.nextafter(near, beyond), near))


def fma64(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c in FP64, rounded once; few lanes differ where kernels use it."""
    known: dict[tuple[float, float, float], float] = {}
    shape = np.broadcast_shapes(a.shape, b.shape, c.shape)
    out = np.empty(shape)
    rows = zip(*(np.broadcast_to(x, shape).tolist() for x in (a, b, c)), strict=True)
    for i, row in enumerate(rows):
        if row not in known:
            exact = all(map(np.isfinite, row))
            total = Fraction(row[0]) * Fraction(row[1]) + Fraction(row[2]) if exact else 0
            known[row] = float(total) if total else row[0] * row[1] + row[2]
        out[i] = known[row]
    return out


def bf16_bits(x: Array) -> Array:
    """Return FP32 as the bits of bfloat16, to nearest, ties to even."""
    bits = x.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)
    return np.where(np.isnan(x), NAN16, rounded.astype(np.uint16))


def f16_bits(x: Array) -> Array:
    """Return FP32 as the bits of FP16, to nearest, ties to even."""
    return np.where(np.isnan(x), NAN16, x.astype(np.float16).view(np.uint16))


def widened(bits: Array, kind: str) -> Array:
    """Return the bits of "f16" or "bf16" as FP32."""
    bits = bits.view(np.uint16)
    if kind == "bf16":
        return one_nan((bits.astype(np.uint32) << np.uint32(16)).view(np.float32))
    return one_nan(bits.view(np.float16).astype(np.float32))


def converted(x: Array, to: str, of: str) -> Array:
    """Return ``x`` of type ``of`` as ``to``: to nearest, integers towards zero and saturated."""
    if to in ("f16", "bf16"):
        single = x if of == "f32" else x.astype(np.float32)
        return f16_bits(single) if to == "f16" else bf16_bits(single)
    if of in ("f16", "bf16"):
        return widened(x, of)
    if of in FLOATS and to not in FLOATS:
        limits = np.iinfo(TYPES[to])
        whole = np.trunc(np.nan_to_num(x.astype(np.float64), nan=0.0))
        return np.clip(whole, limits.min, limits.max).astype(TYPES[to])
    wide = x.astype(TYPES[to])
    return one_nan(wide) if to in ("f32", "f64") else wide


def extreme(a: Array, b: Array, kind: str, larger: bool, nan: bool) -> Array:
    """Return the larger or the smaller; ``nan``: NaN where one is, else the other number."""
    if kind not in FLOATS:
        return np.maximum(a, b) if larger else np.minimum(a, b)
    if nan:
        out = np.maximum(a, b) if larger else np.minimum(a, b)
    else:
        out = np.fmax(a, b) if larger else np.fmin(a, b)
    zeros = (a == 0) & (b == 0)
    if zeros.any():  # +0 is above -0
        unsigned = UNSIGNED[out.itemsize]
        signs = a.view(unsigned), b.view(unsigned)
        sign = np.bitwise_and(*signs) if larger else np.bitwise_or(*signs)
        out = np.where(zeros, sign.view(out.dtype), out)
    return one_nan(out) if kind in ("f32", "f64") else out


RELATIONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
UNSIGNED_RELATIONS = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def compared(a: Array, b: Array, relation: str, kind: str) -> Array:
    """Return where the relation holds; of floats one in "u" also where one of them is NaN."""
    if kind in ("f16", "bf16"):
        a, b = (widened(x.view(np.uint16), kind) for x in (a, b))
    elif kind not in FLOATS:
        return RELATIONS[UNSIGNED_RELATIONS.get(relation, relation)](a, b)
    unordered = np.isnan(a) | np.isnan(b)
    if relation in ("num", "nan"):
        return unordered if relation == "nan" else ~unordered
    if relation in RELATIONS:
        return RELATIONS[relation](a, b) & ~unordered
    return RELATIONS[relation[:-1]](a, b) | unordered


def shifted_left(a: Array, by: Array) -> Array:
    """Return a << by; 0 where all bits leave."""
    inside = by < 8 * a.itemsize
    return np.where(inside, a << np.where(inside, by, 0).astype(a.dtype), a.dtype.type(0))


def shifted_right(a: Array, by: Array) -> Array:
    """Return a >> by; only the sign, or 0, where all bits leave."""
    bits = 8 * a.itemsize
    if a.dtype.kind == "i":
        return a >> np.minimum(by, bits - 1).astype(a.dtype)
    inside = by < bits
    return np.where(inside, a >> np.where(inside, by, 0).astype(a.dtype), a.dtype.type(0))


def funnel_right(low: Array, high: Array, by: Array) -> Array:
    """Return 32 bits of high:low, ``by`` above the lowest."""
    both = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
    return (both >> by.astype(np.uint64)).astype(np.uint32)


def divided(a: Array, b: Array) -> Array:
    """Return a / b of integers, towards zero; all ones for a division by zero."""
    wide, by = a.astype(np.int64), b.astype(np.int64)
    quotient = np.abs(wide) // np.where(by == 0, 1, np.abs(by))
    signed = np.where((wide < 0) != (by < 0), -quotient, quotient)
    return np.where(by == 0, -1, signed).astype(a.dtype)


def field(a: Array, begin: Array, size: Array) -> Array:
    """Return ``size`` bits from ``begin`` on, with their sign if ``a`` has one (``bfe``)."""
    signed = a.dtype.kind == "i"
    wide = (a if signed else a.astype(np.uint64)).astype(np.int64) >> begin.astype(np.int64)
    size = size.astype(np.int64)
    low = wide & ((np.int64(1) << size) - 1)
    if signed:
        negative = low >> np.maximum(size - 1, 0) & 1
        low = np.where(negative, low - (np.int64(1) << size), low)
    return low.astype(a.dtype)


def permuted(a: Array, b: Array, selector: Array) -> Array:
    """Return four of the eight bytes of b:a, by the selector's nibbles (``prmt``).

    Where a nibble's top bit is set it is that byte's sign, eight times.
    """
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out: Any = np.uint32(0)
    for k in range(4):
        nibble = (selector >> np.uint32(4 * k) & np.uint32(15)).astype(np.uint64)
        byte = both >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
        sign = np.where(byte & np.uint64(0x80), 0xFF, 0)
        byte = np.where(nibble & np.uint64(8), sign, byte)
        out = out | byte.astype(np.uint32) << np.uint32(8 * k)
    return out
