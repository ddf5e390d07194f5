"""A grid of programs, run on arrays: one lane for each thread of several programs at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gpuless.ptx.arithmetic import TYPES, UNSIGNED, WARP, Array
from gpuless.ptx.counters import Counters
from gpuless.ptx.instructions import step
from gpuless.ptx.memory import POISON, Access, GlobalMemory, SharedMemory, Space
from gpuless.ptx.operands import Mask, Step, register_type
from gpuless.ptx.parsing import Kernel, Unsupported, parse
from gpuless.ptx.progress import SCHEDULES, Progress

MAX_BLOCKS = 1_000_000
"""Basic blocks after which programs are taken to hang."""


@dataclass(frozen=True)
class Options:
    """How a grid runs.

    Attributes:
        lanes: threads that move together, about.
        schedule: "lockstep", or "up", "down", "random": the order in which a program's warps run.
        jitter: ulps by which approximate instructions are off, at random.
        races: whether they are looked for in global memory; in shared memory they always are.
        accesses: whether sectors and bank conflicts are counted.
        programs: given how many a grid has, the numbers of those that run, ascending; None: all
            run. Where some do not, results are not to be looked at.
        seed: of what is random.
    """

    lanes: int = 4096
    schedule: str = "lockstep"
    jitter: int = 0
    races: bool = True
    accesses: bool = False
    programs: Callable[[int], Array] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"expected one of {SCHEDULES}, got {self.schedule!r}")

    def chosen(self, total: int) -> Array:
        """Return the numbers of the programs that run, ascending, of so many."""
        return np.arange(total) if self.programs is None else self.programs(total)


class Program:
    """A kernel that can run: its text, and each block's instructions as functions."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.kernel: Kernel = parse(text)
        self.steps: list[list[Step]] = [
            [step(found) for found in block.instructions] for block in self.kernel.blocks
        ]

    def run(
        self,
        grid: Sequence[int],
        arguments: Sequence[float],
        regions: GlobalMemory,
        shared: int = 0,
        options: Options | None = None,
    ) -> Counters:
        """Run a grid, or some of its programs.

        Args:
            grid: programs along x, y and z.
            arguments: of the entry; pointers to scratch memory at its end may be left out.
            regions: what it may touch; receives the findings.
            shared: bytes of shared memory that a program has.
            options: how it runs.
        """
        options = options or Options()
        kernel = self.kernel
        chosen = options.chosen(grid[0] * grid[1] * grid[2])  # x is fastest
        together = max(1, options.lanes // kernel.threads)
        counters = Counters(kernel, options.accesses)
        missing = len(kernel.parameters) - len(arguments)
        given = dict(zip(kernel.parameters, [*arguments, *[0] * missing], strict=True))
        parameters = {name: _bits(x, kernel.parameters[name]) for name, x in given.items()}
        with np.errstate(all="ignore"):
            for begin in range(0, len(chosen), together):
                here = chosen[begin : begin + together]
                Wave(self, here, grid, parameters, regions, shared, options, counters).run()
        return counters


class Wave:
    """Some programs of a grid that move together.

    Attributes:
        lanes: how many threads they have.
        parameters: of the kernel, as bits.
        spaces: memory by state space.
    """

    def __init__(
        self,
        program: Program,
        numbers: Array,
        grid: Sequence[int],
        parameters: dict[str, Array],
        memory: GlobalMemory,
        shared: int,
        options: Options,
        counters: Counters,
    ) -> None:
        self.program, self.kernel, self.parameters = program, program.kernel, parameters
        self.options, self.counters, self.findings = options, counters, memory.findings
        self.threads, self.numbers, self.grid = self.kernel.threads, numbers, grid
        self.lanes = self.threads * len(numbers)
        self.spaces: dict[str, Space] = {
            "global": memory,
            "shared": SharedMemory(shared, len(numbers), memory.findings),
        }
        self._registers: dict[str, Array] = {}
        self._all_lanes = np.arange(self.lanes)
        self._thread = np.repeat(numbers, self.threads) * self.threads
        self._thread += np.tile(np.arange(self.threads), len(numbers))
        self._barriers = np.zeros(len(numbers), np.int64)  # that a program has passed
        self._warp_barriers = np.zeros(self.lanes // WARP, np.int64)
        self._random = np.random.default_rng((options.seed, int(numbers[0])))

    # Registers

    def read(self, name: str, padded: bool = False) -> Array:
        """Return a register; poison if never written, which is a finding unless ``padded``."""
        found = self._registers.get(name)
        if found is None:
            if not padded:
                self.complain("read of a register that nobody wrote", name, "")
            return _poison(register_type(name))
        return found

    def write(self, name: str, x: Array, mask: Mask) -> None:
        if mask is not None:
            x = np.where(mask, x, self._registers.get(name, _poison(x.dtype)))
        self._registers[name] = x

    def pass_over(self, names: Sequence[str]) -> None:
        """Note that an instruction has written to these registers, though in no lane that is here.

        As where lanes of another warp are here, too, which it does write in.
        """
        for name in names:
            self._registers.setdefault(name, _poison(register_type(name)))

    def write_lanes(self, name: str, x: Array, lanes: Array, mask: Mask) -> None:
        """Write what only the lanes of the mask have."""
        if mask is not None:
            whole = np.empty(self.lanes, x.dtype)
            whole[:] = self._registers.get(name, _poison(x.dtype))
            whole[lanes] = x
            x = whole
        self._registers[name] = x

    def of_lanes(self, x: Array, lanes: Array, mask: Mask) -> Array:
        """Return what ``lanes``, those of the mask, have of ``x``."""
        if len(x) == 1:
            return np.repeat(x, len(lanes))
        return x if mask is None else x[lanes]

    def special(self, name: str) -> Array:
        """Return a special register."""
        x, y, _ = self.grid
        places = {
            "ctaid.x": self.numbers % x,
            "ctaid.y": self.numbers // x % y,
            "ctaid.z": self.numbers // (x * y),
        }
        if name.startswith("nctaid."):
            return np.array([self.grid["xyz".index(name[-1])]], np.uint32)
        if name in places:
            place = places[name].astype(np.uint32)
            return place if len(place) == 1 else np.repeat(place, self.threads)
        if name == "tid.x":
            return np.tile(np.arange(self.threads, dtype=np.uint32), len(self.numbers))
        if name == "laneid":
            return np.tile(np.arange(WARP, dtype=np.uint32), self.lanes // WARP)
        raise Unsupported(f"%{name}")

    def jittered(self, x: Array) -> Array:
        """Return FP32 off by some ulps, where that is asked for and a GPU could be."""
        limit = self.options.jitter
        if not limit:
            return x
        by = self._random.integers(-limit, limit + 1, x.shape, np.int32)
        moved = (x.view(np.int32) + by).view(np.float32)
        tiny = np.abs(x) < np.float32(2.0**-125)
        exact = tiny | (x == 1) | ~np.isfinite(x) | ~np.isfinite(moved)
        return np.where(exact, x, moved)

    # Memory, and who waits for whom

    def access(self, text: str, addresses: Array, mask: Mask, width: int, count: int) -> Access:
        """Return what an instruction asks of memory."""
        lanes = self._all_lanes if mask is None else np.flatnonzero(mask)
        clocks = self._barriers[lanes // self.threads] << 32 | self._warp_barriers[lanes // WARP]
        return Access(
            kernel=self.kernel.name,
            text=text,
            addresses=self.of_lanes(addresses, lanes, mask),
            lanes=lanes,
            threads=self._thread[lanes],
            clocks=clocks,
            per_program=self.threads,
            width=width,
            count=count,
        )

    def expect_whole_warps(self, mask: Mask, text: str) -> None:
        if mask is not None:
            active = mask.reshape(-1, WARP)
            if (active.any(1) != active.all(1)).any():
                self.complain("diverged warp", text, "not all lanes are here")

    def pass_warp_barrier(self, mask: Mask) -> None:
        """Note that what these warps did so far is over for them."""
        here = slice(None) if mask is None else mask.reshape(-1, WARP).any(1)
        self._warp_barriers[here] += 1

    def complain(self, kind: str, text: str, detail: str) -> None:
        self.findings.note(kind, self.kernel.name, text, detail)

    # Running

    def run(self) -> None:
        """Run the programs to their ends."""
        progress = Progress(len(self.numbers), self.threads, self.options.schedule, self._random)
        for _ in range(MAX_BLOCKS):
            found = progress.next()
            if found is None:
                if progress.over:
                    return
                here, faults = progress.release()
                for fault in faults:
                    self.complain(fault, "bar.sync", "")
                self._barriers[here] += 1
                continue
            at, mask = found
            warps = self.lanes // WARP if mask is None else mask.reshape(-1, WARP).any(1).sum()
            self.counters.blocks[at] += int(warps)
            for run in self.program.steps[at]:
                run(self, mask)
            progress.leave(at, self.kernel.blocks[at], mask, self._taken(at))
        self.complain("hang", self.kernel.blocks[at].opcodes[-1], f"in block {at}")

    def _taken(self, at: int) -> Array | bool:
        guard = self.kernel.blocks[at].guard
        if guard is None:
            return True
        taken = self.read(guard.register) ^ guard.negated
        return bool(taken[0]) if taken.all() == taken.any() else taken


def _poison(dtype: Any) -> Array:
    return np.array([True]) if dtype == np.bool_ else POISON[dtype.itemsize]


def _bits(given: float, kind: str) -> Array:
    if kind == "f32":
        return np.array([given], np.float32).view(np.uint32)
    if kind == "f64":
        return np.array([given], np.float64).view(np.uint64)
    size = np.dtype(TYPES[kind]).itemsize
    return np.array([int(given) & (1 << 64) - 1], np.uint64).view(UNSIGNED[size])
