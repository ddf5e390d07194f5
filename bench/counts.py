"""Counts per element of what every shipped kernel executes, with gates on their growth.

    python bench/counts.py --arch 90 --only "softmax.*n=1000"
    python bench/counts.py --peers --only "softmax n=1000"  # others' kernels next to ours
    python bench/counts.py --models --only GPT-2  # bytes of a forward and backward of models

Needs no GPU, because some programs of each launch run in the emulator of tests/gpuless/ptx. The
calls are those of ``static.py``. That script reads machine code, and counts the body of a loop
once; this one counts executed PTX instructions. It prints a line per launch, and failed gates on
stderr with exit status 1. After a kernel got better, call it with ``--snapshot``.
"""

import argparse
import importlib
import multiprocessing
import os
import pkgutil
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import builds
import model_tables
import numpy as np
import side_by_side
import snapshots
import torch
from snapshots import Numbers

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # the emulator is the tests'

from gpuless.ptx.emulated import kept_as_ptx
from gpuless.ptx.findings import Findings
from gpuless.ptx.machine import Options, Program
from gpuless.ptx.memory import GlobalMemory, Region
from gpuless.ptx.regions import TrackedMemory

import tritonamp.kernels

SNAPSHOT = snapshots.FOLDER / f"counts-triton-{snapshots.VERSION}.json"
ARCHS = [90]
PROGRAMS = 4  # of each launch
TAG = 1 << 48  # between the addresses of arguments
PAGE = 512  # bytes; torch's memory on a GPU begins at multiples of it


class Row(NamedTuple):
    """What was counted in one launch.

    Attributes:
        name: names of the call and the kernel.
        arch: architecture.
        instructions: PTX instructions that a thread runs, per element.
        loads, stores: sectors of 32 bytes per request of a warp; 0 without requests.
        asked: bytes of all requested sectors, per element.
        conflicts: passes over the banks of shared memory, relative to the passes without conflicts;
            0 without shared memory.
    """

    name: str
    arch: int
    instructions: float
    loads: float
    stores: float
    asked: float
    conflicts: float


WHAT = (  # of a row, from its third field on
    "instructions for each element", "sectors a load", "sectors a store", "bytes asked for",
    "passes over the banks",
)  # fmt: skip


def rows_of(module: str, arch: int, only: str) -> list[Row]:
    """Return the counts of one module's calls."""
    memory = TrackedMemory()
    with memory.in_force(), kept_as_ptx():
        kernels = importlib.import_module(f"tritonamp.kernels.{module}")
        return [
            counted(build, call, memory)
            for build, call in builds.module_launches(kernels, arch, only)
            if build.moves_tensors and "bfloat16" not in build.name  # counts as float16 does
        ]


def counted(build: builds.Build, call: builds.Call, memory: TrackedMemory) -> Row:
    """Run some programs of a launch, and return its counts."""
    compiled = builds.compiled(build)
    regions, arguments = [], []
    listed = memory.of_lists()
    for region, tensors in listed:
        regions.append(region)
        for x in tensors:
            x.fill_(0.5)
    for i, tensor in enumerate(call.tensors, 1):
        x, size = real(tensor), bytes_between(tensor)
        regions.append(Region(x.data_ptr() + i * TAG, size, x.data_ptr(), f"argument {i}"))
        listed.append((regions[-1], [x]))  # alive
        arguments.append(x.data_ptr() + i * TAG)
    total = call.grid[0] * call.grid[1] * call.grid[2]
    options = Options(races=False, accesses=True, programs=spread)
    findings = Findings()
    space = GlobalMemory(regions, findings, races=False)
    ran = Program(compiled.asm["ptx"]).run(
        call.grid,
        [*arguments, *call.sizes],
        space,
        compiled.metadata.shared,
        options,
    )
    assert not findings, "\n".join(map(str, findings.values()))
    elements = elements_of(build, call) * len(options.chosen(total)) / total
    return Row(
        build.name,
        build.arch,
        round(32 * sum(ran.instructions.values()) / elements, 2),
        round(ran.sectors["ld"] / max(ran.requests["ld"], 1), 2),
        round(ran.sectors["st"] / max(ran.requests["st"], 1), 2),
        round(32 * sum(ran.sectors.values()) / elements, 2),
        round(ran.waves / max(ran.ideal, 1), 2),
    )


def spread(total: int) -> np.ndarray:
    """Return the numbers of programs to run instead of all, with the first and the last."""
    return np.unique(np.linspace(0, total - 1, PROGRAMS).astype(int))


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros instead of a tensor of the meta device; their pages are not allocated yet."""
    if tensor.device.type != "meta":
        return tensor
    memory = torch.from_numpy(np.zeros(bytes_between(tensor) + PAGE, np.uint8))
    return memory[-memory.data_ptr() % PAGE :]


def bytes_between(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to the end of the last, gaps of views included."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def elements_of(build: builds.Build, call: builds.Call) -> int:
    """Return the number of elements that all programs process together."""
    given = dict(zip(build.signature, call.tensors, strict=False))
    if "numel_ptr" in given:
        return int(given["numel_ptr"].sum())
    return max(tensor.numel() for tensor in call.tensors)


def numbers(row: Row) -> Numbers:
    """Return the committed numbers of a launch."""
    values = dict(zip(WHAT, row[2:], strict=True))
    return Numbers(row.name, row.arch, f"sm_{row.arch}", values)


def line(row: Row) -> str:
    return (
        f"{row.arch:<4}{row.name:72} {row.instructions:6.2f} instructions {row.asked:6.2f} B asked "
        f"{row.loads:5.2f} sectors a load {row.stores:5.2f} a store {row.conflicts:5.2f} passes"
    )


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program if options contradict one another."""
    if args.peers and args.models:
        parser.error("expected --peers or --models, got both")
    if (args.peers or args.models) and (args.arch or args.op):
        mode = "--peers is for sm_90" if args.peers else "--models is for CUDA"
        parser.error(f"{mode} and all operations: leave out --arch and --op")
    if args.json and not (args.peers or args.models):
        parser.error("--json is of --peers and --models: add one")
    if args.models and (reason := model_tables.unknown(args.only)):
        parser.error(reason)


def main(arguments: list[str] | None = None) -> int:
    parser = snapshots.parser_for(SNAPSHOT, __doc__.splitlines()[0], builds.NVIDIA)
    parser.add_argument(
        "--peers", action="store_true",
        help="also kernels of other packages, for sm_90; --snapshot writes bench/results/",
    )  # fmt: skip
    parser.add_argument(
        "--models", action="store_true",
        help="bytes of a forward and backward of models; --only chooses names of models",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="of --peers and --models: an object on each line"
    )
    args = snapshots.parsed(parser, arguments)
    check(parser, args)
    if args.peers:
        return side_by_side.main(args.only, args.json, args.snapshot)
    if args.models:
        return model_tables.main(args.only, args.json, args.snapshot)
    modules = args.op or [m.name for m in pkgutil.iter_modules(tritonamp.kernels.__path__)]
    tasks = [(module, arch, args.only) for arch in args.arch or ARCHS for module in modules]
    rows: list[Row] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        for found in pool.map(rows_of, *zip(*tasks, strict=True)):
            print(*map(line, found), sep="\n", flush=True)
            rows += found
    return snapshots.finish(SNAPSHOT, list(map(numbers, rows)), [], args.snapshot)


if __name__ == "__main__":
    sys.exit(main())
