"""How far a command is, on stderr, and the files that it has written."""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tritonamp.diagnosis.terminal import fitted, in_bytes, in_seconds, width

WORTH_SAYING = 0.1  # seconds
LONG = 10.0  # seconds that are worth a line in advance
RUNS, RUNS_OF_DIFF = 5, 9  # duration of a check, as a multiple of its first run; measured on a CPU


class Line:
    """A line on stderr that the next text replaces. If stderr is no terminal, nothing is shown."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, text: str) -> None:
        """Replace the text of the line; "" clears it."""
        if sys.stderr.isatty():
            text = text[: _columns() - 1]
            padded = text.ljust(len(self._shown))
            print(f"\r{padded}", end="\r" if not text else "", file=sys.stderr, flush=True)
            self._shown = text

    def say(self, text: str) -> None:
        """Print a text that stays, above the line."""
        self.show("")
        print(fitted(text), file=sys.stderr, flush=True)


def _columns() -> int:
    """Return the columns of the terminal that shows stderr, also if stdout goes elsewhere."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return width()
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or width()
    except OSError:
        return width()


class _Runs(logging.Handler):
    """Shows each run of a check, and says after a long first one how long it will take."""

    def __init__(self, line: Line, factor: int) -> None:
        super().__init__()
        self._line, self._factor = line, factor
        self._start, self._count = time.perf_counter(), 0

    def emit(self, record: logging.LogRecord) -> None:
        self._count += 1
        seconds = time.perf_counter() - self._start
        if self._count == 2 and self._factor * seconds >= LONG:
            self._line.say(
                f"check: the first run took {in_seconds(seconds)}, and all of it takes about "
                f"{in_seconds(self._factor * seconds)}; remedies that have to be tried add to it"
            )
        said = f", {in_seconds(seconds)} so far" if self._count > 1 else ""
        self._line.show(f"check: run {self._count}: {record.getMessage()}{said}")


@contextlib.contextmanager
def runs_shown(compares: bool) -> Iterator[None]:
    """Show the runs of ``tritonamp.check``. ``compares``: whether it compares two levels."""
    logger, line = logging.getLogger("tritonamp.check"), Line()
    handler = _Runs(line, RUNS_OF_DIFF if compares else RUNS)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False  # the user's log has not asked for level DEBUG
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
        line.show("")


class Checks:
    """Shows how many checks of the selftest are done, and about how long the others take.

    ``backend`` is the name of the tested backend.
    """

    def __init__(self, backend: str) -> None:
        self._line, self._has_kernels = Line(), backend == "triton"
        self._start, self._count, self._all = time.perf_counter(), 0, 0

    def expect(self, count: int) -> None:
        """Note the number of checks. With kernels, also print about how long they take."""
        self._all = count
        if self._has_kernels:
            self._line.say(
                f"selftest: {count} checks, meant to take a minute on a GPU, and several in "
                "Triton's interpreter"
            )

    def tell(self, name: str) -> None:
        """Count the check ``name``, which is done."""
        self._count += 1
        seconds = time.perf_counter() - self._start
        left = in_seconds(seconds / self._count * (self._all - self._count))
        self._line.show(f"selftest: {self._count} of {self._all}, about {left} left: {name}")

    def end(self) -> None:
        """Clear the line."""
        self._line.show("")


def wrote(path: Path, start: float) -> str:
    """Return the line about a file: its name, its size, and the time since ``start``."""
    seconds = time.perf_counter() - start
    took = f", {in_seconds(seconds)}" if seconds >= WORTH_SAYING else ""
    return fitted(f"wrote {path} ({in_bytes(path.stat().st_size)}{took})")
