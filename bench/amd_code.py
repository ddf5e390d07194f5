"""Reads numbers from AMD's assembly as Triton keeps it, for ``machine_code.py``."""

import re
from collections import Counter
from collections.abc import Iterable

LIMITS = {  # of a SIMD unit: waves, registers of a lane, how many are handed out at once
    "gfx90a": (8, 512, 8), "gfx942": (8, 512, 8),
    "gfx1100": (16, 1536, 24), "gfx1201": (16, 1536, 24),
}  # fmt: skip
SIMDS = 4  # that share the work of a program: of a CU, of RDNA's pairs of them
LDS = {"gfx90a": 64 << 10, "gfx942": 64 << 10, "gfx1100": 128 << 10, "gfx1201": 128 << 10}
WIDTHS = {"dwordx4": 16, "b128": 16, "dwordx3": 12, "b96": 12, "dwordx2": 8, "b64": 8}
WIDTHS |= {"dword": 4, "b32": 4, "ushort": 2, "short": 2, "u16": 2, "b16": 2, "ubyte": 1}
WIDTHS |= {"byte": 1, "u8": 1, "b8": 1}
FROM_LANES = re.compile(r"v_mov_b32_dpp|ds_bpermute|ds_permute|ds_swizzle|v_permlane")


def noted(text: str, *names: str) -> list[int]:
    """Return numbers of the code object's metadata."""
    return [int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in names]


def instructions(text: str) -> list[tuple[str, str]]:
    """Return opcodes and operands; an instruction that issues two operations gives both."""
    found = []
    for line in re.findall(r"^\t([a-z]\w+[^;\n]*)", text, re.MULTILINE):
        for part in line.split("::"):
            opcode, _, operands = part.strip().partition(" ")
            found.append((opcode, operands))
    return found


def widths(opcodes: Iterable[str], what: str) -> dict[int, int]:
    """Return the number of accesses to global memory by width in bytes."""
    found: Counter[int] = Counter()
    for opcode in opcodes:
        if re.match(rf"(global|buffer|flat)_{what}_", opcode):
            size = opcode.removesuffix("_hi").removesuffix("_d16").rpartition("_")[2]
            found[WIDTHS[size]] += 1
    return dict(sorted(found.items()))


def occupancy(arch: str, waves: int, registers: int, shared: int) -> float:
    """Return the fraction of a CU's waves that programs with these needs can fill."""
    most, of_lane, granule = LIMITS[arch]
    by_registers = SIMDS * min(most, of_lane // (granule * -(-max(registers, 1) // granule)))
    programs = by_registers // waves
    if shared:
        programs = min(programs, LDS[arch] // shared)
    return programs * waves / (SIMDS * most)


def absorbed(code: Iterable[tuple[str, str]]) -> int:
    """Return the number of multiply-adds that add a product to a value from another lane.

    ``machine_code.absorbed`` says why that matters. The code is read from top to bottom, because
    registers are reused.
    """
    sent: set[str] = set()
    found = 0
    for opcode, operands in code:
        if not operands.startswith("v") or re.search(r"_store_|_write", opcode):
            continue
        result, *given = operands.split(",")
        if opcode.startswith(("v_fmac_", "v_dual_fmac_")):
            addend = registers(result)
        elif re.match(r"v_(pk_|dual_)?(fma_|fmamk_)", opcode) and " 1.0" not in given:
            addend = registers(given[2])
        else:  # none, or a product with one, which nothing rounds
            addend = []
        if re.search(r"op_sel_hi:\[\d,\d,0\]", operands):
            addend = addend[:1]
        found += not sent.isdisjoint(addend)
        moved = opcode.startswith(("v_mov_b", "v_dual_mov_")) and sent & {*registers(given[0])}
        if FROM_LANES.match(opcode) or moved:
            sent.update(registers(result))
        else:
            sent.difference_update(registers(result))
    return found


def registers(operand: str) -> list[str]:
    """Return the vector registers of an operand: v3, or v[4:5]."""
    found = re.search(r"\bv(\d+)|\bv\[(\d+):(\d+)\]", operand)
    if not found:
        return []
    first, last = (found[1], found[1]) if found[1] else (found[2], found[3])
    return [f"v{number}" for number in range(int(first), int(last) + 1)]
