"""What a launch executed: instructions, sectors of memory, passes over the banks."""

from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np
from gpuless.ptx.arithmetic import WARP, Array
from gpuless.ptx.memory import Access, Region
from gpuless.ptx.parsing import Kernel

SECTOR = 32  # bytes that global memory moves at once
BANKS, BANK = 32, 4  # bytes of one


class Counters:
    """Counts of one run of a kernel.

    Args:
        kernel: the kernel.
        accesses: whether to count memory accesses as well, which takes time.

    Attributes:
        blocks: number of warps that ran each basic block.
        requests: number of warps' accesses to global memory, by "ld", "st" and "atom".
        sectors: number of sectors that these requests touch.
        waves: number of passes over the banks of shared memory.
        ideal: number of passes without bank conflicts.
    """

    def __init__(self, kernel: Kernel, accesses: bool) -> None:
        self.kernel, self.accesses = kernel, accesses
        self.blocks = [0] * len(kernel.blocks)
        self.requests, self.sectors = Counter[str](), Counter[str]()
        self.waves = self.ideal = 0
        self._touched: defaultdict[str, list[Array]] = defaultdict(list)

    @property
    def instructions(self) -> Counter[str]:
        """Instructions that warps ran, by opcode."""
        found: Counter[str] = Counter()
        for times, block in zip(self.blocks, self.kernel.blocks, strict=True):
            for opcode in block.opcodes:
                found[opcode] += times
        return found

    def memory(self, kind: str, space: str, access: Access) -> None:
        if not self.accesses or not len(access.lanes):
            return
        warps = access.lanes // WARP
        if space == "global":
            self.requests[kind] += len(np.unique(warps))
            self.sectors[kind] += _sectors(warps, access)
            self._touched[kind].append(np.unique(access.addresses // np.uint64(SECTOR)))
        else:
            waves, ideal = _bank_passes(access)
            self.waves, self.ideal = self.waves + waves, self.ideal + ideal

    def distinct_bytes(self, regions: Iterable[Region], share: float = 1.0) -> dict[str, float]:
        """Return bytes of touched sectors, counting each once per launch, by kind of request.

        Memory moves these bytes if the cache keeps everything that is touched again.

        Args:
            regions: regions of memory, at the addresses that the kernel saw.
            share: fraction of the programs that ran. The others are taken to touch as much, but no
                region counts for more than its size, because data that all programs read moves
                once.
        """
        found = {}
        for kind, touched in self._touched.items():
            sectors, total = np.unique(np.concatenate(touched)), 0.0
            for region in regions:
                first, last = region.begin // SECTOR, (region.begin + region.size - 1) // SECTOR
                bounds = np.array([first, last + 1], np.uint64)
                begin, end = np.searchsorted(sectors, bounds)
                total += min(float(end - begin) / share, last + 1 - first)
            found[kind] = SECTOR * total
        return found


def _sectors(warps: Array, access: Access) -> int:
    sector = (access.addresses // np.uint64(SECTOR)).astype(np.int64)
    sector -= sector.min()
    return len(np.unique(warps * (int(sector.max()) + 1) + sector))


def _bank_passes(access: Access) -> tuple[int, int]:
    """Return passes, and passes without conflicts: one serves 32 words of 4 B, of each bank one."""
    words = max(access.size // BANK, 1)
    group = np.tile(access.lanes // min(WARP, WARP // words), words)
    word = np.concatenate([access.addresses.astype(np.int64) // BANK + k for k in range(words)])
    pairs = np.unique(np.stack([group, word], 1), axis=0)
    banks, times = np.unique(
        np.stack([pairs[:, 0], pairs[:, 1] % BANKS], 1), axis=0, return_counts=True
    )
    groups, first = np.unique(banks[:, 0], return_index=True)
    return int(np.maximum.reduceat(times, first).sum()), len(groups)
