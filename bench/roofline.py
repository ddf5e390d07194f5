"""An estimate of times from counts: bytes, sectors, instructions, occupancy. No GPU ran these.

A launch takes the longest of three times:

- memory: the bytes of sectors that it touches, each once, over the bandwidth; or over what the
  warps of its grid that are resident can ask for in a latency, where that is less;
- cache: all sectors asked for, over what the first cache gives (128 B a cycle, on a T4 64);
- issue: instructions over four a cycle and multiprocessor that has a program.

Torch's own kernels: memory alone. The low end of an estimate is bytes over bandwidth; the high end
is the sum of the three, as if nothing overlapped. Assumed: bandwidth and clock of data sheets,
a latency of 600 ns, one PTX instruction for one of the machine's, registers of sm_90 on every GPU,
no cost of launches. Peers that are close may change places; that is why there are ends.
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
    """A GPU as its data sheet has it.

    Attributes:
        arch: its architecture, for limits of a multiprocessor.
        processors: multiprocessors.
        hertz: boost clock.
        bandwidth: bytes in a second.
        cache: bytes that the first cache gives in a cycle.
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
    """What ptxas makes of a kernel.

    Attributes:
        registers: number of registers of a thread.
        in_flight: bytes that a thread requests before it waits.
    """

    registers: int
    in_flight: int


class Work(NamedTuple):
    """What was counted of a case.

    Attributes:
        elements: that it works on.
        kernels: launches, see ``peer_counts``.
        own: bytes of each of torch's own kernels.
    """

    elements: int
    kernels: list[dict[str, Any]]
    own: list[int]


@functools.cache
def built(ptx: str, arch: int) -> Built:
    """Return what ptxas makes of a kernel's text."""
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
    """Return seconds by memory, cache and issue; of one launch."""
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
    """Return nanoseconds for a thousand elements: low end, estimate, high end."""
    own = sum(work.own) / gpu.bandwidth
    launches = [times(kernel, gpu) for kernel in work.kernels]
    low = own + sum(kernel["bytes"] for kernel in work.kernels) / gpu.bandwidth
    ends = low, own + sum(map(max, launches)), own + sum(map(sum, launches))
    return tuple(round(1e12 * seconds / work.elements, 4) for seconds in ends)


def estimates(work: Work) -> dict[str, tuple[float, float, float]]:
    return {name: estimate(work, gpu) for name, gpu in GPUS.items()}


def limit(work: Work, gpu: Gpu = GPUS["H100"]) -> str:
    """Return what limits most of the time: "memory", "in flight", "cache" or "issue"."""
    spent = {"memory": sum(work.own) / gpu.bandwidth}
    for kernel in work.kernels:
        memory, cache, issue = times(kernel, gpu)
        # longer than by bandwidth: too few bytes are asked for in a latency
        waits = memory > 1.01 * kernel["bytes"] / gpu.bandwidth
        named = {"in flight" if waits else "memory": memory, "cache": cache, "issue": issue}
        most = max(named, key=lambda what: named[what])
        spent[most] = spent.get(most, 0.0) + named[most]
    return max(spent, key=lambda what: spent[what])
