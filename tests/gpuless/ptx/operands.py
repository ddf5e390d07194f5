"""Operands: registers, special registers and constants, read as arrays of one element a lane.

What is the same for all lanes may be an array of one element.
"""

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from gpuless.ptx.arithmetic import TYPES, UNSIGNED, Array
from gpuless.ptx.parsing import Unsupported, address

if TYPE_CHECKING:
    from gpuless.ptx.machine import Wave

Reader = Callable[["Wave"], Array]
Mask = Array | None
"""Lanes that run an instruction; None: all."""
Step = Callable[["Wave", Mask], None]
"""What runs an instruction."""
REGISTERS = {"p": np.bool_, "rs": np.uint16, "r": np.uint32, "rd": np.uint64}
"""What Triton's registers hold, by the letters in front of their numbers."""


@functools.cache
def register_type(name: str) -> Any:
    """Return what the register of this name holds, as a NumPy dtype."""
    kind = name.rstrip("0123456789")
    if kind not in REGISTERS:
        raise Unsupported(f"%{name}")  # two at once, "%p1|%p2", among others
    return np.dtype(REGISTERS[kind])


def as_register(name: str, x: Array) -> Array:
    """Return what the register of this name holds when ``x`` is written to it."""
    dtype = register_type(name)
    return x.view(dtype) if x.dtype.itemsize == dtype.itemsize else x.astype(dtype)


@functools.cache
def reader(operand: str, kind: str, padded: bool = False) -> Reader:
    """Return what reads an operand as PTX's type ``kind``.

    Args:
        operand: like "%r3", "%tid.x", "0f3F800000" or "-1".
        kind: as in TYPES.
        padded: whether the operand may be a register that was never written.
    """
    dtype = np.dtype(TYPES[kind])
    if re.fullmatch(r"%(p|rs|rd|r)\d+", operand):
        return _register_reader(operand[1:], dtype, padded)
    if operand.startswith("%"):
        return lambda wave: wave.special(operand[1:])
    constant = _constant(operand, dtype)
    return lambda wave: constant


def addresses(operand: str, space: str) -> Reader:
    """Return what reads the addresses that an operand like "[%rd1 + 16]" means."""
    if space not in ("global", "shared"):
        raise Unsupported(f"memory in .{space}")
    base, offset = address(operand)
    read = reader(base, "u64" if space == "global" else "u32")
    if not offset:
        return read

    def moved(wave: "Wave") -> Array:
        start = read(wave)
        return start + start.dtype.type(offset & (1 << 8 * start.itemsize) - 1)

    return moved


def _register_reader(name: str, dtype: Any, padded: bool) -> Reader:
    size = register_type(name).itemsize
    if size < dtype.itemsize:
        raise Unsupported(f"%{name} as {dtype}")
    if size > dtype.itemsize:  # its low bits
        narrow = UNSIGNED[dtype.itemsize]
        return lambda wave: wave.read(name, padded).astype(narrow).view(dtype)
    return lambda wave: wave.read(name, padded).view(dtype)


def _constant(text: str, dtype: Any) -> Array:
    if text == "global_smem":  # where shared memory begins
        return np.zeros(1, dtype)
    if text[:2] in ("0f", "0F"):
        return np.array([int(text[2:], 16)], np.uint32).view(dtype)
    if text[:2] in ("0d", "0D"):
        return np.array([int(text[2:], 16)], np.uint64).view(dtype)
    if dtype == np.bool_:
        return np.array([text in ("1", "-1")])
    bits = int(text.rstrip("U"), 0) & (1 << 8 * dtype.itemsize) - 1
    return np.array([bits], UNSIGNED[dtype.itemsize]).view(dtype)
