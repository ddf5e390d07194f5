"""Numbers of a build's machine code, read from ``cuobjdump`` or from AMD's assembly.

The body of a loop counts once.
"""

import hashlib
import math
import multiprocessing
import os
import re
import subprocess
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import amd_code
import triton
from builds import Build, compiled
from triton.runtime.cache import get_cache_manager

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
WIDE = 16  # bytes that one instruction can move on every architecture

LIMITS = {  # of a multiprocessor with its 65536 registers: warps, programs, KiB of shared memory
    70: (64, 32, 96), 75: (32, 16, 64), 80: (64, 32, 164), 86: (48, 16, 100),
    89: (48, 24, 100), 90: (64, 32, 228), 100: (64, 32, 228), 120: (48, 24, 100),
}  # fmt: skip


class Row(NamedTuple):
    """The numbers of a build; None if the disassembler does not know the architecture.

    Attributes:
        registers: number of registers of a thread.
        stack, local: bytes of stack and of local memory of a thread.
        shared: bytes of shared memory of a program.
        occupancy: fraction of the warps that a multiprocessor can hold.
        tile_loads, tile_stores: bytes of whole tiles that a thread has to move, by the widest
            possible access.
        loads, stores: number of accesses by width in bytes.
        in_flight: largest number of bytes that a multiprocessor waits for.
        spills: number of loads and stores of local memory.
        scalar_spills: number of scalar registers that are kept in lanes of vector registers, on
            AMD's GPUs only.
        atomics: opcodes of atomics.
        instructions: number of instructions per element.
        ex2: number of MUFU.EX2 per element.
        absorbed: number of multiply-adds that add a product to a value from another lane.
    """

    build: Build
    registers: int
    stack: int
    local: int
    shared: int
    occupancy: float
    tile_loads: dict[int, int]
    tile_stores: dict[int, int]
    loads: dict[int, int] | None = None
    stores: dict[int, int] | None = None
    in_flight: int | None = None
    spills: int | None = None
    atomics: list[str] | None = None
    instructions: float | None = None
    ex2: float | None = None
    absorbed: int = 0
    scalar_spills: int = 0


def measured(todo: Iterable[Build]) -> Iterator[Row]:
    with ProcessPoolExecutor(
        os.cpu_count(), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        yield from pool.map(measure, todo)


def measure(build: Build) -> Row:
    """Compile a build, and return its numbers."""
    built = compiled(build)
    return of_amd(build, built) if build.amd else of_nvidia(build, built)


def of_nvidia(build: Build, built: Any) -> Row:
    usage, sass = disassembled(built.asm["cubin"])
    registers, stack, local = resources(usage)
    shared = built.metadata.shared
    resident = resident_warps(build.arch, build.warps, registers, shared)
    occupancy = resident / LIMITS[build.arch][0]
    row = Row(build, registers, stack, local, shared, occupancy, *moved_by_threads(build, built))
    row = row._replace(absorbed=absorbed(built.asm["ptx"]))
    code = instructions(sass)
    if not code:
        return row
    opcodes, for_each = [opcode for opcode, _ in code], build.threads / build.tile
    return row._replace(
        loads=widths(opcodes, "LDG"),
        stores=widths(opcodes, "STG"),
        in_flight=resident * 32 * outstanding(code),
        spills=sum(opcode.startswith(("LDL", "STL")) for opcode in opcodes),
        atomics=[opcode for opcode in opcodes if re.match(r"(ATOM[GS]?|REDG?)\b", opcode)],
        instructions=round(len(code) * for_each, 2),
        ex2=round(opcodes.count("MUFU.EX2") * for_each, 2),
    )


def disassembled(cubin: bytes) -> tuple[str, str]:
    """Return resource usage and instructions as ``cuobjdump`` prints them, without encodings.

    Instructions are empty if ``cuobjdump`` does not know the architecture. Triton's cache keeps the
    output next to the cubin, because disassembling takes as long as compiling.
    """
    tool = f"{triton.__version__} {CUOBJDUMP.name}".encode()
    cache = get_cache_manager(hashlib.sha256(tool + cubin).hexdigest())
    if kept := cache.get_file("disassembled.z"):
        usage, _, sass = zlib.decompress(Path(kept).read_bytes()).decode().partition("\f")
        return usage, sass
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run(
                [CUOBJDUMP, what, file.name], capture_output=True, text=True, check=False
            ).stdout
            for what in ("-res-usage", "-sass")
        )
    sass = re.sub(r" */\* 0x[0-9a-f]{16} \*/$", "", sass, flags=re.MULTILINE)
    if instructions(sass):
        cache.put(zlib.compress(f"{usage}\f{sass}".encode()), "disassembled.z", binary=True)
    return usage, sass


def of_amd(build: Build, built: Any) -> Row:
    """Return the numbers of AMD's assembly, without bytes in flight and exp2."""
    text, shared = built.asm["amdgcn"], built.metadata.shared
    registers, stack = amd_code.noted(text, "vgpr_count", "private_segment_fixed_size")
    spills, scalar_spills = amd_code.noted(text, "vgpr_spill_count", "sgpr_spill_count")
    occupancy = amd_code.occupancy(build.amd, build.options["num_warps"], registers, shared)
    row = Row(build, registers, stack, 0, shared, occupancy, *moved_by_threads(build, built))
    code = amd_code.instructions(text)
    opcodes = [opcode for opcode, _ in code]
    return row._replace(
        loads=amd_code.widths(opcodes, "load"),
        stores=amd_code.widths(opcodes, "store"),
        spills=spills,
        scalar_spills=scalar_spills,
        atomics=[opcode for opcode in opcodes if "_atomic_" in opcode],
        instructions=round(len(code) * build.threads / build.tile, 2),
        absorbed=amd_code.absorbed(code),
    )


def moved_by_threads(build: Build, built: Any) -> Iterator[dict[int, int]]:
    """Yield ``tile_bytes`` of loads, then of stores, for one tile without masks."""
    tiles = 2 if build.has_blocks else 1  # the second is the masked tail, with the same accesses
    for what in "load", "store":
        found = tile_bytes(built.asm["ttir"], what, build.tile, build.threads, build.widest)
        yield {size: bytes_moved // tiles for size, bytes_moved in found.items()}


def resources(usage: str) -> tuple[int, int, int]:
    """Return registers, and bytes of stack and local memory, from ``cuobjdump -res-usage``."""
    return tuple(int(re.search(rf"\b{what}:(\d+)", usage)[1]) for what in ("REG", "STACK", "LOCAL"))


def instructions(sass: str) -> list[tuple[str, str]]:
    """Return opcodes with modifiers, and operands, from ``cuobjdump -sass``, without padding."""
    found = re.findall(
        r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)([^;]*);", sass, re.MULTILINE
    )
    return [(opcode, operands) for opcode, operands in found if opcode != "NOP"]


def width(opcode: str) -> int:
    """Return the number of bytes that one thread loads or stores."""
    special = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    return next((special[part] for part in opcode.split(".") if part in special), 4)


def widths(opcodes: Iterable[str], what: str) -> dict[int, int]:
    return dict(
        sorted(Counter(width(opcode) for opcode in opcodes if opcode.split(".")[0] == what).items())
    )


def outstanding(code: Iterable[tuple[str, str]]) -> int:
    """Return the most bytes that a thread has requested and not yet used.

    The code is read from top to bottom.
    """
    most, pending = 0, {}  # register to its bytes: the thread waits where it is mentioned next
    for opcode, operands in code:
        registers = [int(number) for number in re.findall(r"\bR(\d+)", operands)]
        for register in registers:
            pending.pop(register, None)
        if opcode.startswith("LDG."):
            size = width(opcode)
            pending |= {registers[0] + i: min(size, 4) for i in range(max(size // 4, 1))}
            most = max(most, sum(pending.values()))
    return most


def tile_bytes(ttir: str, what: str, tile: int, threads: int, widest: int) -> dict[int, int]:
    """Return bytes of whole tiles that a thread loads or stores, by access width.

    Other accesses are left out, because they are partial results. ``widest`` is the number of
    elements in the widest access.
    """
    found: Counter[int] = Counter()
    for shape, bits in re.findall(rf"\btt\.{what} .*: tensor<([\dx]+)x!tt\.ptr<[a-z]+(\d+)>", ttir):
        if math.prod(map(int, shape.split("x"))) == tile:
            of_thread = tile * int(bits) // 8 // threads
            found[min(of_thread, widest * int(bits) // 8, WIDE)] += of_thread
    return dict(found)


def absorbed(ptx: str) -> int:
    """Return the number of multiply-adds that add a product to a value from another lane.

    The other lane adds the same two values but rounds the other product. So sums that all lanes
    should agree on differ by an ulp.
    """
    sent, found = set(), 0
    for opcode, operands in re.findall(r"^\s+(?:@!?%p\d+\s+)?([a-z][\w.]*)\s+([^;]*);", ptx, re.M):
        result, *given = (operand.strip() for operand in operands.split(","))
        if opcode.startswith("shfl.") or (opcode.startswith("mov.") and given[0] in sent):
            sent.add(result.split("|")[0])
        found += opcode.startswith("fma.") and given[2] in sent
    return found


def resident_warps(arch: int, warps: int, registers: int, shared: int) -> int:
    """Return the number of warps of programs with these needs that a multiprocessor holds."""
    max_warps, max_programs, kib = LIMITS[arch]
    # four parts of a multiprocessor, each hands its registers out by eight
    by_registers = 4 * (65536 // 4 // (32 * 8 * -(-registers // 8)))
    shared += 1024 if arch >= 80 else 0  # the system's own
    by_shared = kib * 1024 // shared if shared else max_programs
    return warps * min(max_programs, max_warps // warps, by_registers // warps, by_shared)
