"""The rules of moves, bits, comparisons and conversions."""

from functools import partial, reduce

import numpy as np
from gpuless.ptx import arithmetic as a
from gpuless.ptx.arithmetic import INTEGERS, TYPES, UNSIGNED, Array
from gpuless.ptx.parsing import Unsupported
from gpuless.ptx.rules import Opcode, Rule, Value, allow


def _same(x: Array) -> Array:
    return x


def _mov(opcode: Opcode) -> Value:
    allow(opcode)
    return Value(_same, (opcode[-1],))


def _cache_policy(opcode: Opcode) -> Value:
    """A hint to the cache, which there is none of."""
    return Value(lambda *_: np.zeros(1, np.uint64), ())


def _bitwise(opcode: Opcode) -> Value:
    allow(opcode)
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[opcode[0]]
    return Value(function, (opcode[-1],) * 2)


def _not(opcode: Opcode) -> Value:
    allow(opcode)
    return Value(np.invert, (opcode[-1],))


def _count_of_ones(opcode: Opcode) -> Value:
    allow(opcode)

    def count(x: Array) -> Array:
        octets = np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1)
        return np.unpackbits(octets, axis=1).sum(1, dtype=np.uint32)

    return Value(count, (opcode[-1],))


def _shift(opcode: Opcode) -> Value:
    allow(opcode)
    function = a.shifted_left if opcode[0] == "shl" else a.shifted_right
    return Value(function, (opcode[-1], "u32"))


def _funnel_shift(opcode: Opcode) -> Value:
    allow(opcode, "l", "r", "wrap")
    if "wrap" not in opcode:
        raise Unsupported(".".join(opcode))
    size, low_bits = np.uint32(32), np.uint32(31)

    def left(low: Array, high: Array, by: Array) -> Array:
        return a.funnel_right(low, high, size - (by & low_bits))

    def right(low: Array, high: Array, by: Array) -> Array:
        return a.funnel_right(low, high, by & low_bits)

    return Value(left if "l" in opcode else right, (opcode[-1], opcode[-1], "u32"))


def _field(opcode: Opcode) -> Value:
    allow(opcode)
    return Value(a.field, (opcode[-1], "u32", "u32"))


def _permute(opcode: Opcode) -> Value:
    """LLVM fills up vectors of bytes with whatever there is."""
    allow(opcode)
    return Value(a.permuted, (opcode[-1],) * 3, padded=True)


def _select(opcode: Opcode) -> Value:
    allow(opcode)
    return Value(lambda x, y, p: np.where(p, x, y), (opcode[-1], opcode[-1], "pred"))


# Comparisons and conversions


def _compare(opcode: Opcode) -> Value:
    if len(opcode) != 3:
        raise Unsupported(".".join(opcode))
    _, relation, of = opcode
    return Value(lambda x, y: a.compared(x, y, relation, of), (of, of))


def _convert(opcode: Opcode) -> Value:
    to, of = opcode[-2:]
    modes = list(opcode[1:-2])
    if to in ("f16x2", "bf16x2"):
        bits = a.f16_bits if to == "f16x2" else a.bf16_bits

        def pair(high: Array, low: Array) -> Array:
            return bits(high).astype(np.uint32) << np.uint32(16) | bits(low).astype(np.uint32)

        if modes != ["rn"]:
            raise Unsupported(".".join(opcode))
        return Value(pair, (of, of))
    if (to, of) == ("f32", "f32") and set(modes) in ({"sat"}, {"ftz", "sat"}):
        if "ftz" in modes:
            return Value(lambda x: a.flushed(a.saturated(x)), (of,))
        return Value(a.saturated, (of,))
    if (to, of) == ("f32", "f32") and modes in (["rmi"], ["rmi", "ftz"]):
        zeros = a.flushed if "ftz" in modes else np.copy
        return Value(lambda x: a.one_nan(np.floor(zeros(x))), (of,))
    to_integer = of not in INTEGERS and to in INTEGERS
    if modes not in ([["rzi"]] if to_integer else [[], ["rn"]]):
        raise Unsupported(".".join(opcode))
    return Value(partial(a.converted, to=to, of=of), (of,))


def _extreme(opcode: Opcode) -> Value:
    of, larger = opcode[-1], opcode[0] == "max"
    if opcode[1:] == ("relu", "s32"):  # sm_90 and up: what is negative becomes 0
        pick = np.maximum if larger else np.minimum
        return Value(lambda x, y: np.maximum(pick(x, y), np.int32(0)), (of, of))
    allow(opcode, "NaN")
    if of != "u16x2":
        function = partial(a.extreme, kind=of, larger=larger, nan="NaN" in opcode)
        # three of them from sm_100 on
        return Value(lambda *given: reduce(function, given), (of, of), repeats=True)
    pick, low = np.maximum if larger else np.minimum, np.uint32(0xFFFF)
    return Value(lambda x, y: pick(x & low, y & low) | pick(x & ~low, y & ~low), (of, of))


def _sign(opcode: Opcode) -> Value:
    kind, of = opcode[0], opcode[-1]
    if opcode == ("abs", "ftz", "f32"):  # libdevice's erf
        return Value(lambda x: np.abs(a.flushed(x)), (of,))
    allow(opcode)
    if of in INTEGERS:
        return Value(np.abs if kind == "abs" else np.negative, (of,))
    unsigned = UNSIGNED[np.dtype(TYPES[of]).itemsize]
    bits = 16 if "16" in of else 8 * np.dtype(TYPES[of]).itemsize
    sign = unsigned(1 << bits - 1 | (1 << 2 * bits - 1 if of.endswith("x2") else 0))
    if kind == "abs":
        return Value(lambda x: x.view(unsigned) & ~sign, (of,))
    return Value(lambda x: x.view(unsigned) ^ sign, (of,))


RULES: dict[str, Rule] = {
    "abs": _sign,
    "and": _bitwise,
    "bfe": _field,
    "createpolicy": _cache_policy,
    "cvt": _convert,
    "max": _extreme,
    "min": _extreme,
    "mov": _mov,
    "neg": _sign,
    "not": _not,
    "popc": _count_of_ones,
    "or": _bitwise,
    "prmt": _permute,
    "selp": _select,
    "setp": _compare,
    "shf": _funnel_shift,
    "shl": _shift,
    "shr": _shift,
    "xor": _bitwise,
}
