"""Which block each lane is at, who runs next, and who waits at a barrier."""

from collections.abc import Iterator

import numpy as np
from gpuless.ptx.arithmetic import WARP, Array
from gpuless.ptx.parsing import Block

SCHEDULES = ("lockstep", "up", "down", "random")


class Progress:
    """Where the lanes of some programs are.

    Lanes that are at the lowest block run first, so that those that diverged meet again.

    Args:
        programs: how many.
        threads: of each.
        schedule: "lockstep": all warps together; else the order in which a program's warps run,
            each until it waits or exits.
        random: for the schedule "random".
    """

    def __init__(
        self, programs: int, threads: int, schedule: str, random: np.random.Generator
    ) -> None:
        self.shape = programs, threads
        lanes, warps = programs * threads, threads // WARP
        self.block = np.zeros(lanes, np.int32)
        self.alive, self.waiting = np.ones(lanes, np.bool_), np.zeros(lanes, np.bool_)
        order = np.tile(np.arange(warps), (programs, 1))
        if schedule == "down":
            order = order[:, ::-1]
        elif schedule == "random":
            order = random.permuted(order, axis=1)
        self._rank = np.repeat(order.reshape(-1), WARP)
        self._serial = schedule != "lockstep" and warps > 1
        self._common: int | None = None if self._serial else 0  # where all lanes are

    def next(self) -> tuple[int, Array | None] | None:
        """Return a block and the lanes to run it (None: all); None where no lane can go on."""
        if self._common is not None:
            return self._common, None
        runs = self.alive & ~self.waiting
        if not runs.any():
            return None
        if self._serial:
            last = self.shape[1]
            of_program = np.where(runs, self._rank, last).reshape(self.shape).min(1)
            runs &= self._rank == np.repeat(of_program, self.shape[1])
        at = int(self.block[runs].min())
        mask = runs & (self.block == at)
        return at, None if mask.all() else mask

    def leave(self, at: int, block: Block, mask: Array | None, taken: Array | bool) -> None:
        """Move the lanes that ran ``block``, number ``at``, to where its end sends them.

        Args:
            at: its number.
            block: that was run.
            mask: who ran it.
            taken: who meets the end's condition.
        """
        if self._common is not None and isinstance(taken, bool) and block.end in ("bra", "fall"):
            self._common = block.target if block.end == "bra" and taken else at + 1
            return
        if self._common is not None:
            self._common = None
        active = np.ones_like(self.alive) if mask is None else mask
        go = active & taken
        self.block[active] = at + 1
        if block.end == "bra":
            self.block[go] = block.target
        elif block.end == "ret":
            self.alive[go] = False
        elif block.end == "bar":
            self.waiting[go] = True
        self._look_whether_all_are_together()

    @property
    def over(self) -> bool:
        return not self.alive.any()

    def release(self) -> tuple[Array, list[str]]:
        """Let those go on that wait; return whose programs they are, and what is wrong."""
        here = self.waiting.reshape(self.shape).any(1)
        faults = list(self._faults(here))
        self.waiting[:] = False
        self._look_whether_all_are_together()
        return here, faults

    def _faults(self, here: Array) -> Iterator[str]:
        if not self.alive.reshape(self.shape)[here].all():
            yield "barrier that exited threads do not reach"
        waiting = self.waiting.reshape(self.shape)[here]
        block, beyond = self.block.reshape(self.shape)[here], np.iinfo(np.int32).max
        first = np.where(waiting, block, beyond).min(1)
        if (first != np.where(waiting, block, -1).max(1)).any():
            yield "threads wait at different barriers"

    def _look_whether_all_are_together(self) -> None:
        if self._serial or not self.alive.all() or self.waiting.any():
            return
        if (self.block == self.block[0]).all():
            self._common = int(self.block[0])
