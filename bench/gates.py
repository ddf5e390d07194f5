"""The limits that builds of kernels have to keep."""

import re
from collections.abc import Iterable, Iterator

from machine_code import Row
from snapshots import VERSION, Numbers

FIRST_DISASSEMBLED = 75  # by every supported Triton; up to 3.6 also sm_70
MIN_OCCUPANCY = 0.25
MIN_IN_FLIGHT = 32 << 10  # bytes for each multiprocessor of an sm_90
CODES = "8bit"  # in the names of calls whose state is codes
# with codes, scalar registers that lie in lanes of vector ones: read in a loop, and written before
AMD_LANES = 40
AMD_REGISTERS = 168  # of a lane's 512: three waves for each SIMD unit of a CU
STACK = {  # bytes: two numbers that a loop does not change may be put aside
    70: 8,  # which has no uniform registers
    75: 8 if VERSION == "3.7" else 0,  # put aside before a loop, and read after it
    100: 8,  # where ptxas rather does so than take a register more
    120: 8 if VERSION == "3.7" else 0,  # as sm_75
}

SHARED = 256 if VERSION == "3.6" else 0  # bytes with codes: a tile's exponents change their layout


def faults(row: Row) -> list[str]:
    """Return the exceeded limits of one build as text, with the value and the limit."""
    start = f"{row.build.target} {row.build.name}: "
    return [
        start + what
        for check in (memory_faults, occupancy_faults, code_faults)
        for what in check(row)
    ]


def memory_faults(row: Row) -> Iterator[str]:
    """Yield values that a build keeps in memory instead of registers."""
    build = row.build
    has_codes = CODES in build.call.split()
    stack = STACK.get(build.arch, 0)
    if row.stack > stack or row.local or (row.spills and not row.stack):
        yield (
            f"{row.stack} B of stack, {row.local} B of local memory, {row.spills} spills: "
            f"allowed are {stack} B of stack for what a loop does not change"
        )
    if build.max_shared is not None:
        shared = max(build.max_shared, SHARED if has_codes else 0)
        if row.shared > shared:
            yield (f"{row.shared} B of shared memory, allowed are {shared}: a layout is converted")
    lanes = AMD_LANES if has_codes else 0
    if row.scalar_spills > lanes and build.moves_tensors:
        yield f"{row.scalar_spills} spills of scalar registers, allowed are {lanes or 'none'}"


def occupancy_faults(row: Row) -> Iterator[str]:
    """Yield the limits that keep programs from running at the same time."""
    build = row.build
    if build.amd:
        allowed = AMD_REGISTERS if build.moves_tensors else 255  # one program needs no others
    else:
        allowed = build.max_registers if build.aligned else 255
        if build.arch == 70:  # it has no uniform registers for what all threads share
            allowed = allowed * 3 // 2
    if row.registers > allowed:
        yield f"{row.registers} registers, allowed are {allowed}"
    if row.occupancy == 0:
        yield "a multiprocessor cannot hold it"
    elif row.occupancy < MIN_OCCUPANCY and build.aligned and build.moves_tensors:
        yield f"occupancy {row.occupancy:.2f}, allowed is {MIN_OCCUPANCY} and more"


def code_faults(row: Row) -> Iterator[str]:
    """Yield exceeded limits of a build's instructions."""
    build = row.build
    if row.absorbed:
        yield (
            f"{row.absorbed} products absorbed by sums across lanes, allowed are none: lanes "
            "disagree. Put the product behind the mask, tl.where(mask, product, 0.0)"
        )
    if row.instructions is None:
        if build.arch >= FIRST_DISASSEMBLED:
            yield "cuobjdump printed no instructions"
        return
    # on gfx1100 the maximum of integers is a loop around cmpswap, too
    pattern = r"_b?f\d|_f(add|min|max)" if build.amd else r"\.(B?F\d|CAS)"
    floats = [opcode for opcode in row.atomics if re.search(pattern, opcode)]
    if floats:
        yield (
            f"{', '.join(floats)}: atomics on floating-point numbers (CAS stands in for them), "
            "allowed are none"
        )
    limit = build.max_instructions if build.judged and not build.amd else None
    if limit and row.instructions > limit:
        yield (f"{row.instructions:.2f} instructions for each element, allowed are {limit:g}")
    if not (build.aligned and build.moves_tensors):
        return
    if build.arch == 90 and row.in_flight < MIN_IN_FLIGHT:
        yield f"{row.in_flight} B in flight, allowed is {MIN_IN_FLIGHT} and more"
    for what, found, needed in (
        ("loads", row.loads, row.tile_loads),
        ("stores", row.stores, row.tile_stores),
    ):
        for size, bytes_needed in needed.items():
            moved = size * found.get(size, 0)
            if moved < bytes_needed:
                yield (
                    f"{moved} of a tile's {bytes_needed} B in {what} of {size} B, "
                    f"allowed is all of it ({found})"
                )
    narrow = sum(count for size, count in row.loads.items() if size <= 2)
    if narrow and build.constants.get("ALIGN", 0) >= build.widest:  # no edges, no tail
        yield f"{narrow} loads of 2 B or less, allowed are none"


def exp2_faults(rows: Iterable[Row]) -> list[str]:
    """Return exceeded limits of MUFU.EX2 in all launches of a call together.

    A count may differ by less than half an instruction per element, because of work per tile such
    as the rescaling of sums. Column-major tiles have too few columns for that, so they are left
    out.
    """
    calls: dict[tuple[str, str, int], float] = {}
    for row in rows:
        build = row.build
        if row.ex2 is not None and build.row_major:
            call = build.target, build.call, build.exp2
            calls[call] = calls.get(call, 0.0) + row.ex2
    return [
        f"{target} {call}: {got:.2f} MUFU.EX2 for each element, allowed are {allowed}"
        for (target, call, allowed), got in calls.items()
        if not allowed - 0.5 < got < allowed + 0.5
    ]


def numbers(row: Row) -> Numbers:
    """Return the committed numbers of a build."""
    build = row.build
    values = {"registers": row.registers, "instructions for each element": row.instructions}
    return Numbers(build.name, build.arch, build.target, values)
