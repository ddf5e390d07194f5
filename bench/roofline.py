"""Estimates times from counted bytes, sectors, instructions and occupancy. No GPU ran these.

The estimate of a launch is the longest of three times:

- memory: bytes of the touched sectors, each counted once, over the bandwidth; or over the bytes
  that the grid's resident warps can request per latency, if that is less;
- cache: bytes of all requested sectors, over the rate of the first cache (128 B per cycle, 64 on a
  T4);
- issue: instructions, at four per cycle and multiprocessor with a program.

Torch's own kernels have the first time only. The low end of an estimate is bytes over bandwidth.
The high end is the sum of the three times, as if nothing overlapped.

Assumptions: bandwidth and clock of data sheets, a latency of 600 ns, one machine instruction per
PTX instruction, registers of sm_90 on every GPU, launches without cost. An estimate has ends
because it cannot order peers that are close.
"""

import functools
import math
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import machine_code
import triton

LATENCY = 600e-9  # seconds


class Gpu(NamedTuple):
    """A GPU according to its data sheet.

    Attributes:
        arch: architecture, for limits of a multiprocessor.
        processors: number of multiprocessors.
        hertz: boost clock.
        bandwidth: bytes per second of memory.
        cache: bytes per cycle of the first cache.
    """

    arch: int
    processors: int
    hertz: float
    bandwidth: float
    cache: int = 128


GPUS = {
    "T4": Gpu(75, 40, 1.59e9, 320e9, 64),
    "A100": Gpu(80, 108, 1.41e9, 2039e9),
    "L4": Gpu(89, 58, 2.04e9, 300e9),
    "H100": Gpu(90, 132, 1.98e9, 3350e9),
    "H200": Gpu(90, 132, 1.98e9, 4800e9),
}


class Built(NamedTuple):
    """The numbers of a kernel that ptxas compiled.

    Attributes:
        registers: number of registers of a thread.
        in_flight: bytes that a thread requests before it waits.
    """

    registers: int
    in_flight: int


class Work(NamedTuple):
    """The counts of a case.

    Attributes:
        elements: number of elements.
        kernels: counts of the launches, from ``peer_counts``.
        own: bytes of each of torch's own kernels.
    """

    elements: int
    kernels: list[dict[str, Any]]
    own: list[int]


@functools.cache
def built(ptx: str, arch: int) -> Built:
    """Compile a kernel's text by ptxas, and return its numbers."""
    ptxas = triton.knobs.nvidia.ptxas.path
    suffix = "a" if arch >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        command = [ptxas, f"--gpu-name=sm_{arch}{suffix}", str(source), "-o", str(cubin)]
        subprocess.run(command, check=True, capture_output=True)
        usage, sass = machine_code.disassembled(cubin.read_bytes())
    code = machine_code.instructions(sass)
    return Built(machine_code.resources(usage)[0], machine_code.outstanding(code))


def times(kernel: dict[str, Any], gpu: Gpu) -> tuple[float, float, float]:
    """Return the seconds of one launch for memory, cache and issue."""
    warps, programs = kernel["warps"], math.prod(kernel["grid"])
    needs = gpu.arch, warps, kernel["registers"], kernel["shared"]
    # one program at least: registers are those of sm_90, and may be too many for another GPU
    resident = gpu.processors * max(machine_code.resident_warps(*needs), warps)
    asked = min(resident, warps * programs) * 32 * max(kernel["in_flight"], 4)
    rate = min(gpu.bandwidth, asked / LATENCY)
    cycles = min(gpu.processors, programs) * gpu.hertz
    issued = kernel["instructions"] / 32
    return (
        kernel["bytes"] / rate,
        kernel["asked"] / (cycles * gpu.cache),
        issued / (cycles * 4),
    )


def estimate(work: Work, gpu: Gpu) -> tuple[float, float, float]:
    """Return low end, estimate and high end, in nanoseconds per thousand elements."""
    own = sum(work.own) / gpu.bandwidth
    launches = [times(kernel, gpu) for kernel in work.kernels]
    low = own + sum(kernel["bytes"] for kernel in work.kernels) / gpu.bandwidth
    ends = low, own + sum(map(max, launches)), own + sum(map(sum, launches))
    return tuple(round(1e12 * seconds / work.elements, 4) for seconds in ends)


def estimates(work: Work) -> dict[str, tuple[float, float, float]]:
    return {name: estimate(work, gpu) for name, gpu in GPUS.items()}


def limit(work: Work, gpu: Gpu = GPUS["H100"]) -> str:
    """Return the limit for most of the time: "memory", "in flight", "cache" or "issue"."""
    spent = {"memory": sum(work.own) / gpu.bandwidth}
    for kernel in work.kernels:
        memory, cache, issue = times(kernel, gpu)
        # longer than by bandwidth: too few bytes are asked for in a latency
        waits = memory > 1.01 * kernel["bytes"] / gpu.bandwidth
        named = {"in flight" if waits else "memory": memory, "cache": cache, "issue": issue}
        most = max(named, key=lambda what: named[what])
        spent[most] = spent.get(most, 0.0) + named[most]
    return max(spent, key=lambda what: spent[what])
