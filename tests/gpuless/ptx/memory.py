"""Memory that kernels read and write, and what is watched about it."""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from gpuless.ptx.arithmetic import UNSIGNED, Array
from gpuless.ptx.findings import Findings
from gpuless.ptx.races import Shadow, Touch

POISON = {
    1: np.array([0xAD], np.uint8),
    2: np.array([0x7DAD], np.uint16),
    4: np.array([0x7FADDEAD], np.uint32),
    8: np.array([0x7FF4DEADDEADDEAD], np.uint64),
}
"""What is read where nothing was written, by size: NaN as a float, far away as an address."""
ATOMICS: dict[str, Any] = {
    "add": np.add,
    "and": np.bitwise_and,
    "max": np.maximum,
    "min": np.minimum,
    "or": np.bitwise_or,
}


class Access(NamedTuple):
    """What one instruction asks of memory.

    Attributes:
        kernel: name.
        text: of the instruction.
        addresses: as the kernel sees them, one for each lane.
        lanes: their places among those that move together.
        threads: their numbers in the whole grid.
        clocks: when it is for them, see ``Touch``.
        per_program: threads of a program.
        width: bytes of an element.
        count: elements of each lane.
    """

    kernel: str
    text: str
    addresses: Array
    lanes: Array
    threads: Array
    clocks: Array
    per_program: int
    width: int
    count: int = 1

    @property
    def size(self) -> int:
        """Bytes of each lane."""
        return self.width * self.count


class Piece:
    """Bytes in a row.

    Args:
        raw: the bytes; their number is a multiple of 16.
        name: for people.
        begin: where in ``raw`` it really begins.
        written: which bytes from there on have a value; None: all.
    """

    def __init__(self, raw: Array, name: str, begin: int = 0, written: Array | None = None) -> None:
        self.size, self.name, self.begin, self.written = len(raw), name, begin, written
        self.views = {width: raw.view(kind) for width, kind in UNSIGNED.items()}
        self.shadow: Shadow | None = None

    def read(self, at: Array, width: int, count: int) -> list[Array]:
        view, first = self.views[width], at // width
        return [view[first + k] for k in range(count)]

    def write(self, at: Array, width: int, values: Sequence[Array]) -> None:
        view, first = self.views[width], at // width
        for k, value in enumerate(values):
            view[first + k] = value

    def unwritten(self, at: Array, size: int) -> Array | None:
        """Return which accesses meet bytes without a value; None: none does."""
        if self.written is None:
            return None
        ready = np.logical_and.reduce([self.written[at - self.begin + k] for k in range(size)])
        return None if ready.all() else ~ready

    def note_written(self, at: Array, size: int) -> None:
        if self.written is not None:
            for k in range(size):
                self.written[at - self.begin + k] = True


Part = tuple[Piece, Array, Any]
"""A piece, offsets in it, and which of the lanes these are of."""


class Space:
    """A state space of PTX: loads, stores and atomics, each of them watched.

    Args:
        name: "global" or "shared".
        races: whether they are looked for.
    """

    def __init__(self, name: str, findings: Findings, races: bool) -> None:
        self.name, self.findings, self.races = name, findings, races

    def parts(self, access: Access) -> list[Part]:
        """Return where the lanes' accesses go; report, and leave out, those that go nowhere."""
        raise NotImplementedError

    def load(self, access: Access) -> list[Array]:
        """Return what each lane finds, element by element."""
        lanes = len(access.addresses)
        out = [np.full(lanes, POISON[access.width][0]) for _ in range(access.count)]
        for piece, at, which in self.parts(access):
            if (missing := piece.unwritten(at, access.size)) is not None:
                where = f"{piece.name} at {int(at[missing][0]) - piece.begin:+d}"
                lane = np.arange(lanes)[which][missing][0]
                kind = f"read of {self.name} memory that nobody wrote"
                self.report(access, kind, f"{where}, {int(missing.sum())} lanes", lane)
            for k, found in enumerate(piece.read(at, access.width, access.count)):
                out[k][which] = found
            self._watch(access, piece, at, which)
        return out

    def store(self, access: Access, values: Sequence[Array]) -> None:
        """Write the lanes' elements; where lanes meet, the last one's stay."""
        for piece, at, which in self.parts(access):
            mine = [value[which] for value in values]
            before = piece.read(at, access.width, access.count) if self.races else []
            piece.write(at, access.width, mine)
            piece.note_written(at, access.size)
            if self.races:
                after = piece.read(at, access.width, access.count)
                same, agree = (_equal(found, mine) for found in (before, after))
                self._watch(access, piece, at, which, same, agree)

    def atomic(self, access: Access, value: Array, operation: str) -> Array:
        """Combine memory with each lane's value, one lane after another; return what was there.

        That is poison where lanes meet, because their order is undefined.
        """
        out = np.full(len(access.addresses), POISON[access.width][0])
        for piece, at, which in self.parts(access):
            view, first = piece.views[access.width].view(value.dtype), at // access.width
            if len(np.unique(first)) == len(first):
                out[which] = view[first].view(out.dtype)
            ATOMICS[operation].at(view, first, value[which])
            no = np.zeros(len(at), np.bool_)
            self._watch(access, piece, at, which, no, no, atomic=True)
        return out

    def report(self, access: Access, kind: str, detail: str, lane: Any) -> None:
        program, thread = divmod(int(access.threads[lane]), access.per_program)
        detail += f"; program {program}, thread {thread}"
        self.findings.note(kind, access.kernel, access.text, detail)

    def _watch(
        self,
        access: Access,
        piece: Piece,
        at: Array,
        which: Any,
        same: Array | None = None,
        agree: Array | None = None,
        atomic: bool = False,
    ) -> None:
        if not self.races or not len(at):
            return
        if piece.shadow is None:
            piece.shadow = Shadow(piece.size, access.per_program)
        threads, clocks = access.threads[which], access.clocks[which]
        touch = Touch(at, access.size, threads, clocks, same, agree, atomic)
        for kind, byte in piece.shadow.note(touch).items():
            detail = f"{piece.name} at {byte - piece.begin:+d}"
            self.findings.note(f"{self.name} {kind}", access.kernel, access.text, detail)


class Region(NamedTuple):
    """Global memory that a kernel may touch.

    Attributes:
        begin: its address as the kernel sees it.
        size: bytes.
        real: its address in this process; the same as ``begin``, modulo 16.
        name: for people.
        written: by byte; None: all of it has values.
    """

    begin: int
    size: int
    real: int
    name: str
    written: Array | None = None


class GlobalMemory(Space):
    """Memory of tensors, each at its address; everything between them is out of bounds."""

    def __init__(self, regions: Iterable[Region], findings: Findings, races: bool = True) -> None:
        super().__init__("global", findings, races)
        self.regions = sorted(regions, key=lambda region: region.begin)
        self.pieces = [_piece(region) for region in self.regions]
        nowhere = (1 << 63) - 1
        self.begins = np.array([r.begin for r in self.regions] + [nowhere], np.uint64)
        self.ends = np.array([r.begin + r.size for r in self.regions] + [nowhere], np.uint64)

    def parts(self, access: Access) -> list[Part]:
        a, size = access.addresses, access.size
        if (wrong := a & np.uint64(size - 1)).any():
            lane = int(np.flatnonzero(wrong)[0])
            self.report(access, "misaligned", f"{size} B at {int(a[lane]):#x}", lane)
        first = int(np.searchsorted(self.begins, a.min(), "right")) - 1
        if first >= 0 and int(a.max()) + size <= int(self.ends[first]):
            return [self._part(first, a, slice(None))]
        places = np.searchsorted(self.begins, a, "right").astype(np.int64) - 1
        inside = (places >= 0) & (a + np.uint64(size) <= self.ends[places])
        if not inside.all():
            self._report_outside(access, np.flatnonzero(~inside), places)
        chosen = ((i, np.flatnonzero(inside & (places == i))) for i in np.unique(places[inside]))
        return [self._part(i, a[which], which) for i, which in chosen]

    def _part(self, place: int, a: Array, which: Any) -> Part:
        base = self.regions[place].begin & ~15
        return self.pieces[place], (a - np.uint64(base)).astype(np.int64), which

    def _report_outside(self, access: Access, lanes: Array, places: Array) -> None:
        lane, where = lanes[0], hex(int(access.addresses[lanes[0]]))
        if self.regions:
            near = self.regions[min(max(int(places[lane]), 0), len(self.regions) - 1)]
            offset = int(access.addresses[lane]) - near.begin
            where = f"{offset:+d} of {near.name} ({near.size} B)"
        detail = f"{access.size} B at {where}, {len(lanes)} lanes"
        self.report(access, "out of bounds", detail, lane)


class SharedMemory(Space):
    """The shared memory of programs that move together, one after another in one array.

    Args:
        size: bytes of a program.
        programs: how many.
    """

    def __init__(self, size: int, programs: int, findings: Findings) -> None:
        super().__init__("shared", findings, races=True)
        self.size, self.stride = size, -(-max(size, 16) // 16) * 16
        raw = np.full(self.stride * programs, POISON[1][0])
        self.piece = Piece(raw, "shared memory", 0, np.zeros(len(raw), np.bool_))

    def parts(self, access: Access) -> list[Part]:
        a = access.addresses.astype(np.int64)
        good = (a + access.size <= self.size) & (a % access.size == 0)
        at = a + self.stride * (access.lanes // access.per_program)
        if good.all():
            return [(self.piece, at, slice(None))]
        lane = int(np.flatnonzero(~good)[0])
        kind = "shared memory: out of bounds or misaligned"
        self.report(access, kind, f"{access.size} B at {a[lane]:+d} of {self.size} B", lane)
        return [(self.piece, at[good], np.flatnonzero(good))]


def _piece(region: Region) -> Piece:
    begin = region.begin % 16
    size = -(-(begin + region.size) // 16) * 16
    memory = (ctypes.c_uint8 * size).from_address(region.real - begin)
    return Piece(np.frombuffer(memory, np.uint8), region.name, begin, region.written)


def _equal(found: Sequence[Array], values: Sequence[Array]) -> Array:
    return np.logical_and.reduce([a == b for a, b in zip(found, values, strict=True)])
