"""Races: two threads, the same bytes, at least one of them writes, and no barrier between."""

import math
from typing import NamedTuple

import numpy as np
from gpuless.ptx.arithmetic import WARP, Array

NOBODY = -1


class Touch(NamedTuple):
    """An access of some lanes to one piece of memory, for the record.

    Attributes:
        at: where each begins, in bytes.
        size: bytes of each.
        threads: who they are, numbered through the whole grid, ascending.
        clocks: when it is for each: barriers of its program << 32 | barriers of its warp.
        same: by lane, whether what it writes was there already; None: it reads.
        agree: by lane, whether what it writes is there afterwards.
        atomic: whether it is one.
    """

    at: Array
    size: int
    threads: Array
    clocks: Array
    same: Array | None = None
    agree: Array | None = None
    atomic: bool = False


class Shadow:
    """The last writer and the last reader of each unit of memory.

    All accesses so far were multiples of a unit.

    Args:
        size: number of bytes, a multiple of 16.
        threads: number of threads of a program.
    """

    def __init__(self, size: int, threads: int) -> None:
        self.threads, self.unit = threads, 16
        units = size // self.unit
        self.writer = np.full(units, NOBODY, np.int64)
        self.written = np.zeros(units, np.int64)  # the writer's clock
        self.atomic = np.zeros(units, np.bool_)
        self.least = np.full(units, NOBODY, np.int64)  # the first and the last of the readers
        self.most = np.full(units, NOBODY, np.int64)
        self.read = np.zeros(units, np.int64)  # the readers' clock

    def note(self, touch: Touch) -> dict[str, int]:
        """Record an access; return the kinds of races that it is in, and at which byte."""
        if touch.size % self.unit:
            self._refine(math.gcd(self.unit, touch.size))
        unit, low, high, clock, same, agree = self._by_unit(touch)
        found: dict[str, int] = {}

        def tell(kind: str, where: Array, others: Array) -> None:
            if not where.any():
                return
            programs = others // self.threads != low // self.threads
            warps = others // WARP != low // WARP
            scopes = {"programs": programs, "warps": ~programs & warps, "lanes": ~warps}
            for scope, selected in scopes.items():
                if (selected & where).any():
                    found[f"{kind} of {scope}"] = int(unit[selected & where][0]) * self.unit

        writer = self.writer[unit]
        race = (writer != NOBODY) & ((writer != low) | (writer != high))
        if race.any():
            race &= ~self._ordered(writer, self.written[unit], low, clock)
        if touch.atomic:
            race &= ~self.atomic[unit]
        if same is None:
            tell("read-after-write race", race, writer)
            self._note_readers(unit, low, high, clock)
            return found
        tell("write-write race", race & ~same, writer)
        tell("write-write race, same values", race & same, writer)
        if not touch.atomic:
            tell("write-write race in one instruction", (low != high) & ~agree, high)
        least, most = self.least[unit], self.most[unit]
        readers = (least != NOBODY) & ((least != low) | (most != high))
        if readers.any():
            for other in least, most:
                apart = readers & (other != low)
                apart &= ~self._ordered(other, self.read[unit], low, clock)
                tell("write-after-read race", apart & ~same, other)
                tell("write-after-read race, same values", apart & same, other)
        self.writer[unit] = np.where(low == high, low, high)
        self.written[unit], self.atomic[unit] = clock, touch.atomic
        return found

    def _by_unit(self, touch: Touch) -> tuple[Array, ...]:
        """Return units, each once; of each the first and last thread, clock, and both flags."""
        nothing = np.zeros(len(touch.at), np.bool_)
        same = nothing if touch.same is None else touch.same
        agree = nothing if touch.agree is None else touch.agree
        units, threads, clocks = touch.at // self.unit, touch.threads, touch.clocks
        each = touch.size // self.unit
        if each > 1:
            units = (units[:, None] + np.arange(each)).reshape(-1)
            threads, clocks, same, agree = (
                np.repeat(x, each) for x in (threads, clocks, same, agree)
            )
        high = threads
        steps = np.diff(units)
        if not (steps > 0).all():
            order = np.argsort(units, kind="stable")  # threads stay ascending
            units = units[order]
            first = np.flatnonzero(np.r_[True, np.diff(units) != 0])
            last = np.r_[first[1:], len(units)] - 1
            units, high = units[first], threads[order[last]]
            threads, clocks = threads[order[first]], clocks[order[first]]
            same, agree = (np.logical_and.reduceat(x[order], first) for x in (same, agree))
        none = touch.same is None
        return units, threads, high, clocks, None if none else same, None if none else agree

    def _note_readers(self, unit: Array, low: Array, high: Array, clock: Array) -> None:
        """Add readers to those of the same time; later ones take the place of earlier ones."""
        least, most, before = self.least[unit], self.most[unit], self.read[unit]
        fresh = least == NOBODY
        if not fresh.all():
            fresh |= self._ordered(least, before, low, clock) & self._ordered(
                most, before, low, clock
            )
            low = np.where(fresh, low, np.minimum(least, low))
            high = np.where(fresh, high, np.maximum(most, high))
        self.least[unit], self.most[unit], self.read[unit] = low, high, clock

    def _ordered(self, before: Array, then: Array, now: Array, clock: Array) -> Array:
        """Tell whether what ``before`` did at ``then`` is over for thread ``now`` at ``clock``."""
        same_program = before // self.threads == now // self.threads
        same_warp = before // WARP == now // WARP
        of_warp = 0xFFFFFFFF
        return (same_program & (then >> 32 < clock >> 32)) | (
            same_warp & ((then & of_warp) < (clock & of_warp))
        )

    def _refine(self, unit: int) -> None:
        times, self.unit = self.unit // unit, unit
        for name in ("writer", "written", "atomic", "least", "most", "read"):
            setattr(self, name, np.repeat(getattr(self, name), times))
