"""What the compiler makes of every shipped kernel, for every architecture, and the gates on it.

    python bench/static.py --op softmax --arch 80 90

Needs no GPU. A kernel joins by ``shipped()`` in its module, see
``tritonamp.kernels._shipped.Shipped``. One line for each build; failed gates on stderr, exit status
1. Numbers are of the code as it stands: the body of a loop counts once.
"""

import argparse
import contextlib
import importlib
import json
import math
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import tritonamp.kernels

TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
TYPES |= {torch.int32: "i32", torch.int64: "i64"}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SNAPSHOT = (
    Path(__file__).parent / "static" / f"triton-{'.'.join(triton.__version__.split('.')[:2])}.json"
)

LIMITS = {  # of a multiprocessor with its 65536 registers: warps, programs, KiB of shared memory
    70: (64, 32, 96), 75: (32, 16, 64), 80: (64, 32, 164), 86: (48, 16, 100),
    89: (48, 24, 100), 90: (64, 32, 228), 100: (64, 32, 228), 120: (48, 24, 100),
}  # fmt: skip
FIRST_BF16 = 80
FIRST_DISASSEMBLED = 75  # by every supported Triton; up to 3.6 also sm_70

WIDE = 16  # bytes that one instruction can move on each of them
MIN_OCCUPANCY = 0.25
MIN_IN_FLIGHT = 32 << 10  # bytes for each multiprocessor of an sm_90
MAX_GROWTH = 1.15
STACK = {
    70: 8
}  # bytes: without uniform registers, two numbers that a loop does not change may be put aside


class Build(NamedTuple):
    """One launch of a shipped call, for one architecture.

    Attributes:
        call, kernel: names; the kernel's with a number where the call launches it again.
        function: where the kernel is found, module and name.
        signature, constants: by the names of the kernel's parameters.
        n: length of a line, 0 where the kernel knows none.
        max_registers, max_instructions, exp2, max_shared: see ``Shipped``; exp2 is for all launches
            of the call.
    """

    arch: int
    call: str
    kernel: str
    function: tuple[str, str]
    signature: dict[str, str]
    constants: dict[str, Any]
    n: int
    warps: int
    maxnreg: int | None
    max_registers: int
    max_instructions: float | None
    exp2: int
    max_shared: int | None

    @property
    def name(self) -> str:
        return f"{self.call}: {self.kernel}"

    @property
    def tile(self) -> int:
        """Elements that a program works on at a time."""
        return self.constants.get("ROWS", 1) * self.constants.get("BLOCK", 1)

    @property
    def moves_tensors(self) -> bool:
        """Whether memory bandwidth is what it is about; else it handles a few numbers."""
        return "ALIGN" in self.constants or "VEC" in self.constants

    @property
    def row_major(self) -> bool:
        return self.constants.get("ROW_MAJOR", True)

    @property
    def aligned(self) -> bool:
        """Whether what it moves starts at multiples of 16 bytes."""
        return self.constants.get("ALIGN", 8) >= 8 and self.constants.get("VEC", 4) > 1

    @property
    def judged(self) -> bool:
        """Whether instructions for each element say something.

        That needs one whole line, no masks, no loop, and length.
        """
        rows, block = self.constants.get("ROWS", 1), self.constants.get("BLOCK", 1)
        full = self.constants.get("ALIGN", block) == block
        return self.row_major and full and rows == 1 and block >= max(self.n, 1024)


class Row(NamedTuple):
    """What was measured of a build; None where the disassembler does not know the architecture.

    Attributes:
        registers, stack, local: of a thread, the last two in bytes.
        shared: bytes of a program.
        occupancy: fraction of the warps that a multiprocessor can hold.
        tile_loads, tile_stores: bytes of whole tiles that a thread has to move, by the width that
            they allow for.
        loads, stores: how many of each width in bytes.
        in_flight: bytes that a multiprocessor waits for, at most.
        spills: loads and stores of local memory.
        atomics: opcodes.
        instructions, ex2: for each element; all of them, MUFU.EX2.
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


# What there is to build


def builds(ops: list[str] | None, archs: list[int], only: str) -> Iterator[Build]:
    small = set()  # kernels that handle a few numbers come with many calls
    for module in pkgutil.iter_modules(tritonamp.kernels.__path__):
        if not ops or module.name in ops:
            for arch in archs:
                for build in module_builds(
                    importlib.import_module(f"tritonamp.kernels.{module.name}"), arch, only
                ):
                    if build.moves_tensors or (build.kernel, arch) not in small:
                        yield build
                    if not build.moves_tensors:
                        small.add((build.kernel, arch))


def module_builds(module: Any, arch: int, only: str) -> Iterator[Build]:
    for case in module.shipped() if hasattr(module, "shipped") else ():
        if not re.search(only, case.name):
            continue
        with recorded_launches() as launch:
            case.function(*case.args)
        times: Counter[str] = Counter()
        for kernel, _, tensors, sizes, constants, warps, *maxnreg in (
            call.args for call in launch.call_args_list
        ):
            if arch < FIRST_BF16 and (
                tl.bfloat16 in constants or any(t.dtype is torch.bfloat16 for t in tensors)
            ):
                continue  # refused there
            times[kernel.__name__] += 1
            pointers = ["*" + TYPES[tensor.dtype] for tensor in tensors]
            numbers = [
                "fp32" if isinstance(size, float) else "i64" if size >= 1 << 31 else "i32"
                for size in sizes
            ]
            kinds = pointers + numbers + ["constexpr"] * len(constants)
            given = dict(zip(kernel.arg_names, (*tensors, *sizes, *constants), strict=True))
            yield Build(
                arch,
                case.name,
                kernel.__name__
                + (f" {times[kernel.__name__]}" if times[kernel.__name__] > 1 else ""),
                (kernel.fn.__module__, kernel.__name__),
                dict(zip(kernel.arg_names, kinds, strict=True)),
                {name: given[name] for name in kernel.arg_names[len(tensors) + len(sizes) :]},
                given.get("n", 0),
                warps,
                maxnreg[0] if maxnreg else None,
                case.max_registers,
                case.max_instructions,
                case.exp2,
                case.max_shared,
            )


@contextlib.contextmanager
def recorded_launches() -> Iterator[mock.Mock]:
    """Have every module of the kernels call the mock that this yields, not ``launch``."""
    launch = mock.Mock()
    with contextlib.ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.startswith("tritonamp.kernels.") and hasattr(module, "launch"):
                patches.enter_context(mock.patch.object(module, "launch", launch))
        yield launch


# Measuring


def measured(todo: Iterable[Build]) -> Iterator[Row]:
    with ProcessPoolExecutor(
        os.cpu_count(), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        yield from pool.map(measure, todo)


def measure(build: Build) -> Row:
    """Compiles it and reads the result."""
    module, name = build.function
    pointers = [i for i, kind in enumerate(build.signature.values()) if kind.startswith("*")]
    source = ASTSource(
        fn=getattr(importlib.import_module(module), name),
        signature=build.signature,
        constexprs=build.constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
    )
    options = {"num_warps": build.warps, "maxnreg": build.maxnreg, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", build.arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run(
                [CUOBJDUMP, what, file.name], capture_output=True, text=True, check=False
            ).stdout
            for what in ("-res-usage", "-sass")
        )
    registers, stack, local = resources(usage)
    shared = compiled.metadata.shared
    resident = resident_warps(build.arch, build.warps, registers, shared)
    moved = [
        tile_bytes(compiled.asm["ttir"], what, build.tile, 32 * build.warps)
        for what in ("load", "store")
    ]
    row = Row(build, registers, stack, local, shared, resident / LIMITS[build.arch][0], *moved)
    code = instructions(sass)
    if not code:
        return row
    opcodes, for_each = [opcode for opcode, _ in code], 32 * build.warps / build.tile
    return row._replace(
        loads=widths(opcodes, "LDG"),
        stores=widths(opcodes, "STG"),
        in_flight=resident * 32 * outstanding(code),
        spills=sum(opcode.startswith(("LDL", "STL")) for opcode in opcodes),
        atomics=[opcode for opcode in opcodes if re.match(r"(ATOM[GS]?|REDG?)\b", opcode)],
        instructions=round(len(code) * for_each, 2),
        ex2=round(opcodes.count("MUFU.EX2") * for_each, 2),
    )


def resources(usage: str) -> tuple[int, int, int]:
    """Return registers, bytes of stack and of local memory, of ``cuobjdump -res-usage``."""
    return tuple(int(re.search(rf"\b{what}:(\d+)", usage)[1]) for what in ("REG", "STACK", "LOCAL"))


def instructions(sass: str) -> list[tuple[str, str]]:
    """Return opcodes with their modifiers, and operands, of ``cuobjdump -sass``; no padding."""
    found = re.findall(
        r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)([^;]*);", sass, re.MULTILINE
    )
    return [(opcode, operands) for opcode, operands in found if opcode != "NOP"]


def width(opcode: str) -> int:
    """Bytes that one thread loads or stores."""
    special = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    return next((special[part] for part in opcode.split(".") if part in special), 4)


def widths(opcodes: Iterable[str], what: str) -> dict[int, int]:
    return dict(
        sorted(Counter(width(opcode) for opcode in opcodes if opcode.split(".")[0] == what).items())
    )


def outstanding(code: Iterable[tuple[str, str]]) -> int:
    """Return the most bytes that a thread has asked for and not touched yet.

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


def tile_bytes(ttir: str, what: str, tile: int, threads: int) -> dict[int, int]:
    """Return bytes of whole tiles that a thread loads or stores, by access width.

    What is no tile is a partial result.
    """
    found: Counter[int] = Counter()
    for shape, bits in re.findall(rf"\btt\.{what} .*: tensor<([\dx]+)x!tt\.ptr<[a-z]+(\d+)>", ttir):
        if math.prod(map(int, shape.split("x"))) == tile:
            of_thread = tile * int(bits) // 8 // threads
            found[min(of_thread, WIDE)] += of_thread
    return dict(found)


def resident_warps(arch: int, warps: int, registers: int, shared: int) -> int:
    """Return how many warps a multiprocessor holds of programs with such needs."""
    max_warps, max_programs, kib = LIMITS[arch]
    by_registers = 4 * (
        65536 // 4 // (32 * 8 * -(-registers // 8))
    )  # four parts, each hands them out by eight
    shared += 1024 if arch >= 80 else 0  # the system's own
    by_shared = kib * 1024 // shared if shared else max_programs
    return warps * min(max_programs, max_warps // warps, by_registers // warps, by_shared)


# Gates


def gates(row: Row) -> list[str]:
    """Return what is wrong with one build: what was got, what is allowed."""
    build, wrong = row.build, []
    if row.stack > STACK.get(build.arch, 0) or row.local or (row.spills and not row.stack):
        wrong.append(
            f"{row.stack} B of stack, {row.local} B of local memory, {row.spills} spills: "
            "allowed are 0"
        )
    if build.max_shared is not None and row.shared > build.max_shared:
        wrong.append(
            f"{row.shared} B of shared memory, allowed are {build.max_shared}: "
            "a layout is converted"
        )
    allowed = build.max_registers if build.aligned else 255
    if build.arch == 70:
        allowed = allowed * 3 // 2  # it has no uniform registers for what all threads share
    if row.registers > allowed:
        wrong.append(f"{row.registers} registers, allowed are {allowed}")
    if row.occupancy == 0:
        wrong.append("a multiprocessor cannot hold it")
    elif row.occupancy < MIN_OCCUPANCY and build.aligned and build.moves_tensors:
        wrong.append(f"occupancy {row.occupancy:.2f}, allowed is {MIN_OCCUPANCY} and more")
    wrong += code_gates(row)
    return [f"sm_{build.arch} {build.name}: {what}" for what in wrong]


def code_gates(row: Row) -> Iterator[str]:
    """Yield what is wrong with its instructions."""
    build = row.build
    if row.instructions is None:
        if build.arch >= FIRST_DISASSEMBLED:
            yield "cuobjdump printed no instructions"
        return
    floats = [opcode for opcode in row.atomics if re.search(r"\.(B?F\d|CAS)", opcode)]
    if floats:
        yield (
            f"{', '.join(floats)}: atomics on floating-point numbers (CAS stands in for them), "
            "allowed are none"
        )
    if build.max_instructions and build.judged and row.instructions > build.max_instructions:
        yield (
            f"{row.instructions:.2f} instructions for each element, "
            f"allowed are {build.max_instructions:g}"
        )
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
    if narrow and "VEC" not in build.constants:  # which has a masked tail of single elements
        yield f"{narrow} loads of 2 B or less, allowed are none"


def exp2_gate(rows: Iterable[Row]) -> list[str]:
    """Return what is wrong with MUFU.EX2 in all launches of a call together.

    Column-major tiles have too few columns to rescale sums for free.
    """
    calls: dict[tuple[int, str, int], float] = {}
    for row in rows:
        if row.ex2 is not None and row.build.row_major:
            call = row.build.arch, row.build.call, row.build.exp2
            calls[call] = calls.get(call, 0) + row.ex2
    return [
        f"sm_{arch} {call}: {got:.2f} MUFU.EX2 for each element, allowed are {allowed}"
        for (arch, call, allowed), got in calls.items()
        if round(got) != allowed
    ]


def growth_gate(row: Row, snapshot: dict[str, dict[str, list[float | None]]]) -> list[str]:
    """Against the committed numbers of the same Triton version."""
    name, arch = row.build.name, row.build.arch
    if str(arch) not in snapshot.get(name, {}):
        return [f"sm_{arch} {name}: not in {SNAPSHOT.name}, write that with --snapshot"]
    before, now = snapshot[name][str(arch)], (row.registers, row.instructions)
    return [
        f"sm_{arch} {name}: {new:g} {what}, {old:g} in {SNAPSHOT.name}: "
        f"allowed is {MAX_GROWTH} times as many"
        for what, new, old in zip(
            ("registers", "instructions for each element"), now, before, strict=True
        )
        if new is not None and old is not None and new > MAX_GROWTH * old
    ]


def snapshot_text(rows: Iterable[Row]) -> str:
    """One line for each build: registers and instructions for each element, by architecture."""
    numbers: dict[str, dict[int, tuple[int, float | None]]] = {}
    for row in rows:
        numbers.setdefault(row.build.name, {})[row.build.arch] = row.registers, row.instructions
    return (
        "{\n"
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(numbers[name])}" for name in sorted(numbers))
        + "\n}\n"
    )


def line(row: Row) -> str:
    """Return a row of the table."""
    build = row.build
    size = f"{build.constants.get('ROWS', 1)}x{build.constants.get('BLOCK', 1)}"
    start = f"{build.arch:<4}{build.name:64}{size:>8} {build.warps:2} warps "
    start += f"{row.registers:3} registers {row.shared:5} B shared {row.occupancy:4.0%}"
    if row.instructions is None:
        return f"{start}, not disassembled"
    loads, stores = (
        " ".join(f"{count}x{size}" for size, count in w.items()) for w in (row.loads, row.stores)
    )
    return (
        f"{start} {row.in_flight / 1024:4.0f} KiB in flight "
        f"{row.instructions:5.2f} instructions {row.ex2:4.2f} ex2 "
        f"{row.spills} spills, loads {loads}, stores {stores}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Builds every shipped kernel and checks what the compiler made of it."
    )
    parser.add_argument(
        "--arch", type=int, nargs="+", choices=LIMITS, metavar="N", help="architectures, like 80 90"
    )
    parser.add_argument("--op", nargs="+", help="kernel modules, like softmax")
    parser.add_argument(
        "--only", default="", help="calls whose name this regular expression finds, like n=1024"
    )
    parser.add_argument(
        "--json", action="store_true", help="a JSON object for each build, on one line"
    )
    parser.add_argument("--snapshot", action="store_true", help=f"write {SNAPSHOT.name}")
    args = parser.parse_args(arguments)
    if args.snapshot and (args.arch or args.op or args.only):
        parser.error("--snapshot takes everything: leave out --arch, --op and --only")
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error(
            "TRITON_INTERPRET is set: kernels would be interpreted, not compiled. Unset it"
        )

    rows = []
    for row in measured(builds(args.op, args.arch or list(LIMITS), args.only)):
        fields = row._asdict() | {"build": row.build._asdict()}
        print(json.dumps(fields, default=str) if args.json else line(row), flush=True)
        rows.append(row)
    if not rows:
        parser.error("nothing to build: no kernel module has that name and ships such a call")
    failed = [message for row in rows for message in gates(row)] + exp2_gate(rows)
    if args.snapshot:
        SNAPSHOT.write_text(snapshot_text(rows))
    elif SNAPSHOT.exists():
        snapshot = json.loads(SNAPSHOT.read_text())
        failed += [message for row in rows for message in growth_gate(row, snapshot)]
    else:
        print(
            f"no {SNAPSHOT.name}: growth is not checked for this version of Triton", file=sys.stderr
        )
    print(*failed, sep="\n", end="\n" if failed else "", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
