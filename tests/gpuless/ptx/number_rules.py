"""The rules of arithmetic on numbers: integers, halves, FP32 and FP64, and approximations."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from gpuless.ptx import arithmetic as a
from gpuless.ptx.arithmetic import FLOATS, INTEGERS, TYPES, Array
from gpuless.ptx.parsing import Unsupported
from gpuless.ptx.rules import Function, Opcode, Rule, Value, allow


def _arithmetic(opcode: Opcode) -> Value:
    of = opcode[-1]
    if of in INTEGERS:
        return _of_integers(opcode)
    if of == "f32x2":
        return _of_pairs(opcode)
    if of in ("f16", "bf16", "f16x2", "bf16x2") and "f32" not in opcode:
        return _of_halves(opcode)
    if of in ("f16", "bf16"):
        return _of_half_and_single(opcode)
    return _of_floats(opcode)


def _of_integers(opcode: Opcode) -> Value:
    kind, of = opcode[0], opcode[-1]
    if kind in ("add", "sub"):
        allow(opcode)
        return Value(np.add if kind == "add" else np.subtract, (of, of))
    if kind in ("div", "rem"):
        allow(opcode)
        if of == "u64":
            raise Unsupported(".".join(opcode))
        return Value(a.divided if kind == "div" else lambda x, y: x - a.divided(x, y) * y, (of, of))
    allow(opcode, "lo", "wide", "hi")
    if kind not in ("mul", "mad"):
        raise Unsupported(".".join(opcode))
    if "hi" in opcode:
        return _upper_half(opcode)
    to = f"{of[0]}{2 * int(of[1:])}" if "wide" in opcode else of
    dtype = TYPES[to]

    def product(x: Array, y: Array) -> Array:
        return np.multiply(x.astype(dtype), y.astype(dtype))

    if kind == "mul":
        return Value(product, (of, of))
    return Value(lambda x, y, z: product(x, y) + z, (of, of, to))


def _upper_half(opcode: Opcode) -> Value:
    """Return the rule of a product's upper bits."""
    kind, of = opcode[0], opcode[-1]
    if kind != "mul" or of[1:] not in ("16", "32"):
        raise Unsupported(".".join(opcode))
    bits, wide, narrow = int(of[1:]), TYPES[f"{of[0]}{2 * int(of[1:])}"], TYPES[of]

    def upper(x: Array, y: Array) -> Array:
        return (np.multiply(x.astype(wide), y.astype(wide)) >> wide(bits)).astype(narrow)

    return Value(upper, (of, of))


PLAIN: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "sqrt": np.sqrt,
}


def _of_pairs(opcode: Opcode) -> Value:
    """Two FP32 in 64 bits, from sm_100 on."""
    allow(opcode, "rn")
    function = a.fma32 if opcode[0] == "fma" else PLAIN[opcode[0]]

    def both(*given: Array) -> Array:
        pairs = [np.ascontiguousarray(x).view(np.float32).reshape(-1, 2) for x in given]
        result = a.one_nan(function(*pairs))
        return np.ascontiguousarray(result).view(np.uint64).reshape(-1)

    return Value(both, ("b64",) * (3 if opcode[0] == "fma" else 2))


def _of_halves(opcode: Opcode) -> Value:
    """One or two in a register; by way of FP32, which is as good except for fma."""
    kind, of = opcode[0], opcode[-1]
    allow(opcode, "rn")
    if kind == "fma":
        return Value(a.fma_bf16 if of.startswith("bf16") else a.fma16, (of,) * 3)
    if kind not in ("add", "sub", "mul"):
        raise Unsupported(".".join(opcode))
    one, bits = of.removesuffix("x2"), a.bf16_bits if of.startswith("bf16") else a.f16_bits

    def halves(*given: Array) -> Array:
        wide = (a.widened(a.halves_of(x), one) for x in given)
        return a.in_registers(bits(PLAIN[kind](*wide)))

    return Value(halves, (of, of))


def _of_half_and_single(opcode: Opcode) -> Value:
    """A half operand with an FP32 one, from sm_100 on."""
    kind, of = opcode[0], opcode[-1]
    allow(opcode, "rn", "f32")
    wide = partial(a.widened, kind=of)
    if kind == "fma":
        return Value(lambda x, y, z: a.one_nan(a.fma32(wide(x), wide(y), z)), ("b16", "b16", "f32"))
    if kind not in ("add", "sub"):
        raise Unsupported(".".join(opcode))
    return Value(lambda x, y: a.one_nan(PLAIN[kind](wide(x), y)), ("b16", "f32"))


def _of_floats(opcode: Opcode) -> Value:
    kind, of = opcode[0], opcode[-1]
    if kind == "div" and "rn" not in opcode:
        return _approximate(opcode)
    if kind == "fma" and of == "f32" and "rm" in opcode:  # libdevice's exp
        allow(opcode, "rm", "ftz")
        return Value(_as_on_a_gpu(a.fma32_down, opcode), (of,) * 3)
    allow(opcode, "rn", "ftz")
    if of not in FLOATS:
        raise Unsupported(".".join(opcode))
    if kind == "fma":
        return Value(_as_on_a_gpu(a.fma32 if of == "f32" else a.fma64, opcode), (of,) * 3)
    return Value(_as_on_a_gpu(PLAIN[kind], opcode), (of, of))


def _as_on_a_gpu(function: Function, opcode: Sequence[str]) -> Function:
    if "ftz" in opcode:
        return lambda *given: a.one_nan(a.flushed(function(*map(a.flushed, given))))
    return lambda *given: a.one_nan(function(*given))


# Functions that a GPU approximates; here they are correctly rounded


def _exp2(x: Array) -> Array:
    return np.exp2(x.astype(np.float64)).astype(np.float32)


def _log2(x: Array) -> Array:
    return np.log2(x.astype(np.float64)).astype(np.float32)


def _reciprocal(x: Array) -> Array:
    return np.divide(np.float32(1), x)


def _rsqrt(x: Array) -> Array:
    return (1 / np.sqrt(x.astype(np.float64))).astype(np.float32)


APPROXIMATE: dict[str, Function] = {
    "div": np.divide,
    "ex2": _exp2,
    "lg2": _log2,
    "rcp": _reciprocal,
    "rsqrt": _rsqrt,
    "sqrt": np.sqrt,
}


def _approximate(opcode: Opcode) -> Value:
    allow(opcode, "approx", "full", "ftz")
    if opcode[-1] != "f32" or not {"approx", "full"} & set(opcode):
        raise Unsupported(".".join(opcode))
    function = _as_on_a_gpu(APPROXIMATE[opcode[0]], opcode)
    return Value(function, ("f32",) * (2 if opcode[0] == "div" else 1), approximate=True)


def _square_root(opcode: Opcode) -> Value:
    if "rn" not in opcode:
        return _approximate(opcode)
    allow(opcode, "rn", "ftz")
    return Value(_as_on_a_gpu(np.sqrt, opcode), (opcode[-1],))


RULES: dict[str, Rule] = {
    "add": _arithmetic,
    "div": _arithmetic,
    "ex2": _approximate,
    "fma": _arithmetic,
    "lg2": _approximate,
    "mad": _arithmetic,
    "mul": _arithmetic,
    "rcp": _approximate,
    "rem": _arithmetic,
    "rsqrt": _approximate,
    "sqrt": _square_root,
    "sub": _arithmetic,
}
