"""Instructions of all lanes of a warp together: barriers, shuffles, sums, matrices."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from gpuless.ptx.arithmetic import UNSIGNED, WARP, Array
from gpuless.ptx.memory import ATOMICS
from gpuless.ptx.operands import Mask, Step, addresses, reader
from gpuless.ptx.parsing import Instruction, Unsupported, names

if TYPE_CHECKING:
    from gpuless.ptx.machine import Wave

ALL_LANES = 0xFFFFFFFF


def warp_barrier(found: Instruction) -> Step:
    if found.opcode[1:] != ("warp", "sync"):
        raise Unsupported(found.text)

    def barrier(wave: "Wave", mask: Mask) -> None:
        wave.expect_whole_warps(mask, found.text)
        wave.pass_warp_barrier(mask)

    return barrier


def _of_warps(found: Instruction) -> Callable[["Wave", Mask], Array]:
    """Return what reads the second operand as (warps, 32), all of whose lanes take part."""
    read, members = (
        reader(found.operands[1], found.opcode[-1]),
        reader(found.operands[-1], "u32"),
    )

    def of_warps(wave: "Wave", mask: Mask) -> Array:
        wave.expect_whole_warps(mask, found.text)
        some = members(wave) != ALL_LANES
        if (some if mask is None else some & mask).any():
            raise Unsupported(f"some lanes only: {found.text}")
        return np.broadcast_to(read(wave), (wave.lanes,)).reshape(-1, WARP)

    return of_warps


def reduce(found: Instruction) -> Step:
    values, function, target = _of_warps(found), ATOMICS[found.opcode[2]], found.registers[0]

    def reduce(wave: "Wave", mask: Mask) -> None:
        given = values(wave, mask)
        total = function.reduce(given, axis=1, dtype=given.dtype)
        wave.write(target, np.repeat(total, WARP).view(np.uint32), mask)

    return reduce


def shuffle(found: Instruction) -> Step:
    values, by = _of_warps(found), reader(found.operands[2], "u32")
    how, target = found.opcode[2], found.registers[0]
    if how not in ("bfly", "idx") or found.operands[3] != "31":
        raise Unsupported(found.text)
    lane = np.arange(WARP, dtype=np.uint32)

    def shuffle(wave: "Wave", mask: Mask) -> None:
        given = values(wave, mask)
        other = np.broadcast_to(by(wave), (wave.lanes,)).reshape(-1, WARP)
        other = lane ^ other if how == "bfly" else other & np.uint32(WARP - 1)
        taken = np.take_along_axis(given, other.astype(np.int64), 1).reshape(-1)
        wave.write(target, taken, mask)

    return shuffle


def matrices(found: Instruction) -> Step:
    """Load or store 8x8 matrices of 16-bit elements.

    Eight lanes hold the addresses of the eight rows of 16 bytes. A lane receives two neighbours of
    a row, or of a column if ``transposed``.
    """
    if found.opcode[1:4] != ("sync", "aligned", "m8n8") or not set(found.opcode[4:]) <= {
        "x1", "x2", "x4", "trans", "shared", "b16",
    }:  # fmt: skip
        raise Unsupported(found.text)
    loads, lane = found.opcode[0] == "ldmatrix", np.arange(WARP)
    listed, place = found.operands if loads else found.operands[::-1]
    where, registers = addresses(place, "shared"), names(listed)
    if "trans" in found.opcode:
        width, rows = 2, [2 * (lane % 4), 2 * (lane % 4) + 1]
        inside = (lane // 4 * 2).astype(np.uint32)
    else:
        width, rows, inside = 4, [lane // 4], (lane % 4 * 4).astype(np.uint32)

    def matrices(wave: "Wave", mask: Mask) -> None:
        wave.expect_whole_warps(mask, found.text)
        starts = np.broadcast_to(where(wave), (wave.lanes,)).reshape(-1, WARP)
        active = slice(None) if mask is None else mask.reshape(-1, WARP)[:, 0]
        used = starts[active, : 8 * len(registers)]
        if (used & np.uint32(15)).any():
            wave.complain("misaligned", found.text, "a row of a matrix")
        for k, name in enumerate(registers):
            whole = np.zeros(wave.lanes, np.uint32) if loads else wave.read(name)
            for part, row in enumerate(rows):
                spots = (starts[:, 8 * k + row] + inside).reshape(-1)
                access = wave.access(found.text, spots, mask, width, 1)
                wave.counters.memory("ld" if loads else "st", "shared", access)
                shift = np.uint32(16 * part)
                if loads:
                    [bits] = wave.spaces["shared"].load(access)
                    whole[access.lanes] |= bits.astype(np.uint32) << shift
                else:
                    bits = wave.of_lanes(whole, access.lanes, mask) >> shift
                    wave.spaces["shared"].store(access, [bits.astype(UNSIGNED[width])])
            if loads:
                wave.write(name, whole, mask)

    return matrices
