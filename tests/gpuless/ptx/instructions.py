"""Instructions as functions that change a wave: its registers, or memory.

What only computes has its rule in bit_rules.py or number_rules.py.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import numpy as np
from gpuless.ptx import bit_rules, number_rules, warp
from gpuless.ptx.arithmetic import TYPES, UNSIGNED, compared
from gpuless.ptx.memory import ATOMICS
from gpuless.ptx.operands import Mask, Step, addresses, as_register, reader, register_type
from gpuless.ptx.parsing import Guard, Instruction, Unsupported, address
from gpuless.ptx.rules import Opcode, Rule, Value

if TYPE_CHECKING:
    from gpuless.ptx.machine import Wave


@lru_cache(maxsize=1 << 16)  # kernels have many in common
def step(found: Instruction) -> Step:
    """Return the function that runs an instruction.

    Raises:
        Unsupported: an unknown instruction.
    """
    kind = found.opcode[0]
    if kind == "mov" and any("{" in operand for operand in found.operands):
        run = _unpack(found) if found.operands[0].startswith("{") else _pack(found)
    elif kind == "setp" and found.opcode[-1].endswith("x2"):
        run = _compare_pairs(found)
    else:
        run = EFFECTS.get(kind, _compute)(found)
    if found.guard is None:
        return run
    targets = [name for name in found.registers if name[0] not in "[_"]  # memory, nothing
    return _guarded(run, found.guard, targets)


def _guarded(run: Step, guard: Guard, targets: Sequence[str]) -> Step:
    def guarded(wave: "Wave", mask: Mask) -> None:
        wanted = wave.read(guard.register) ^ guard.negated
        if mask is not None:
            wanted = wanted & mask
        if wanted.all():
            run(wave, None)
        elif wanted.any():
            run(wave, np.broadcast_to(wanted, (wave.lanes,)))
        else:
            wave.pass_over(targets)

    return guarded


def _compute(found: Instruction) -> Step:
    computed, target = _value(found.opcode), found.registers[0]
    given = found.operands[1:]
    kinds, more = computed.operands, len(given) - len(computed.operands)
    if computed.repeats and more > 0:
        kinds += kinds[-1:] * more
    elif kinds and more:
        raise Unsupported(found.text)
    function = computed.function
    readers = [
        reader(operand, kind, computed.padded) for operand, kind in zip(given, kinds, strict=False)
    ]

    def compute(wave: "Wave", mask: Mask) -> None:
        result = function(*[read(wave) for read in readers])
        if computed.approximate:
            result = wave.jittered(result)
        wave.write(target, as_register(target, result), mask)

    return compute


def _compare_pairs(found: Instruction) -> Step:
    """Return the function of a comparison of two pairs of halves, with a predicate for each."""
    _, relation, of = found.opcode
    readers = [reader(operand, of) for operand in found.operands[1:]]

    def compare(wave: "Wave", mask: Mask) -> None:
        given = [read(wave) for read in readers]
        for k, name in enumerate(found.registers):
            x, y = ((bits >> np.uint32(16 * k)).astype(np.uint16) for bits in given)
            wave.write(name, compared(x, y, relation, of.removesuffix("x2")), mask)

    return compare


RULES: dict[str, Rule] = bit_rules.RULES | number_rules.RULES


@cache
def _value(opcode: Opcode) -> Value:
    if opcode[0] not in RULES:
        raise Unsupported(".".join(opcode))
    return RULES[opcode[0]](opcode)


def _pack(found: Instruction) -> Step:
    whole, parts = np.dtype(TYPES[found.opcode[-1]]), found.operands[1].strip("{}").split(",")
    bits, target = 8 * whole.itemsize // len(parts), found.registers[0]
    # one half may be anything
    readers = [reader(part.strip(), f"b{bits}", padded=True) for part in parts]

    def pack(wave: "Wave", mask: Mask) -> None:
        shifted = (
            read(wave).astype(whole) << whole.type(bits * k) for k, read in enumerate(readers)
        )
        wave.write(target, sum(shifted, whole.type(0)), mask)

    return pack


def _unpack(found: Instruction) -> Step:
    whole, read = np.dtype(TYPES[found.opcode[-1]]), reader(found.operands[1], found.opcode[-1])
    size = whole.itemsize // len(found.registers)
    targets = [(k, name) for k, name in enumerate(found.registers) if name != "_"]

    def unpack(wave: "Wave", mask: Mask) -> None:
        bits = read(wave)
        for k, name in targets:
            part = bits >> bits.dtype.type(8 * size * k)
            wave.write(name, part.astype(UNSIGNED[size]), mask)

    return unpack


# Memory


def _parameter(found: Instruction) -> Step:
    of, target = found.opcode[-1], found.registers[0]
    name, _ = address(found.operands[1])
    bits, wide = UNSIGNED[np.dtype(TYPES[of]).itemsize], np.int64 if of[0] == "s" else np.uint64

    def parameter(wave: "Wave", mask: Mask) -> None:
        given = wave.parameters[name].view(bits)[:1].view(TYPES[of])
        wave.write(target, given.astype(wide).astype(register_type(target)), mask)

    return parameter


def _load(found: Instruction) -> Step:
    if found.opcode[1] == "param":
        return _parameter(found)
    space, width = found.opcode[1], _width(found)
    where, targets = addresses(found.operands[1], space), found.registers
    signed = found.opcode[-1][0] == "s"  # a wider register takes the sign, too
    kind = TYPES[found.opcode[-1]] if signed else UNSIGNED[width]

    def load(wave: "Wave", mask: Mask) -> None:
        access = wave.access(found.text, where(wave), mask, width, len(targets))
        wave.counters.memory("ld", space, access)
        for name, loaded in zip(targets, wave.spaces[space].load(access), strict=True):
            wave.write_lanes(name, as_register(name, loaded.view(kind)), access.lanes, mask)

    return load


def _store(found: Instruction) -> Step:
    space, width = found.opcode[1], _width(found)
    where, kind = addresses(found.operands[0], space), found.opcode[-1] if width > 1 else "b16"
    readers = [reader(part.strip(), kind) for part in found.operands[1].strip("{}").split(",")]

    def store(wave: "Wave", mask: Mask) -> None:
        access = wave.access(found.text, where(wave), mask, width, len(readers))
        wave.counters.memory("st", space, access)
        given = [wave.of_lanes(read(wave), access.lanes, mask) for read in readers]
        values = [bits.view(UNSIGNED[bits.itemsize]).astype(UNSIGNED[width]) for bits in given]
        wave.spaces[space].store(access, values)

    return store


def _atomic(found: Instruction) -> Step:
    returns = found.opcode[0] == "atom"
    place, given = found.operands[1:3] if returns else found.operands[:2]
    space, operation, width = found.opcode[1], found.opcode[-2], _width(found)
    of_halves = found.opcode[-1].removesuffix("x2") in ("f16", "bf16")  # held as integers here
    if operation not in ATOMICS or given.startswith("{") or of_halves:
        raise Unsupported(found.text)
    where, read = addresses(place, space), reader(given, found.opcode[-1])

    def atomic(wave: "Wave", mask: Mask) -> None:
        access = wave.access(found.text, where(wave), mask, width, 1)
        wave.counters.memory("atom", space, access)
        values = wave.of_lanes(read(wave), access.lanes, mask)
        before = wave.spaces[space].atomic(access, values, operation)
        if returns:
            name = found.registers[0]
            wave.write_lanes(name, as_register(name, before), access.lanes, mask)

    return atomic


def _width(found: Instruction) -> int:
    return np.dtype(TYPES[found.opcode[-1]]).itemsize


EFFECTS: dict[str, Callable[[Instruction], Step]] = {
    "atom": _atomic,
    "bar": warp.warp_barrier,
    "ld": _load,
    "ldmatrix": warp.matrices,
    "red": _atomic,
    "redux": warp.reduce,
    "shfl": warp.shuffle,
    "st": _store,
    "stmatrix": warp.matrices,
}
"""Instructions that do more than compute, by their first part."""
