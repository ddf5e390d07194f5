"""Texts and tables that fit the terminal, and numbers in words."""

import itertools
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence

UNKNOWN = 80  # columns of output to a file or a pipe
LEAST = 40  # columns; a narrower terminal breaks lines itself

# starts of lines whose continuation begins below the text after them: "1. ", "- ", "  to do:   "
_START = re.compile(r" *(?:\d+\. |[-*] |-> |\w[\w ]*: {2,})")
_CODE = re.compile(r" *code: ")
_GAP = "  "


def width(unknown: int = UNKNOWN) -> int:
    """Return the columns of the terminal: COLUMNS, or those of stdout, or else ``unknown``."""
    columns = shutil.get_terminal_size((0, 0)).columns
    return max(columns, LEAST) if columns else unknown


def fitted(text: str, columns: int | None = None) -> str:
    """Break long lines of ``text`` at blanks, and indent their continuation.

    A word that is longer than a line, such as a path, stays whole. So does a line of code, which
    begins with "code: ".

    Args:
        text: lines.
        columns: longest line in characters; None for ``width()``, 0 for no limit.
    """
    columns = width() if columns is None else columns
    if not columns:
        return text
    return "\n".join(
        line if _CODE.match(line) else _wrapped(line, columns, _indent(line, 4))
        for line in text.split("\n")
    )


def paragraph(text: str, columns: int | None = None) -> str:
    """Fill lines with a text. Only an item of a list ("- ") is indented. See ``fitted``."""
    text = " ".join(text.split())
    return _wrapped(text, columns or width(), _indent(text, 0))


def _indent(line: str, more: int) -> int:
    """Return the indent of a line's continuation: after its start, or ``more`` than its own."""
    start = _START.match(line)
    return start.end() if start else len(line) - len(line.lstrip()) + more


def _wrapped(text: str, columns: int, indent: int = 0) -> str:
    if len(text) <= columns:
        return text
    hanging = " " * indent
    return textwrap.fill(
        text, columns, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]], columns: int | None = None) -> str:
    """Return rows in aligned columns below a header.

    Where they do not fit into ``columns`` characters (None: ``width()``), the texts of the widest
    columns are broken at blanks.
    """
    cells = [header, *rows]
    widths = _widths(cells, columns or width())
    head, *body = [_row(each, widths) for each in cells]
    printed = [*head, "-" * max(len(line) for each in (head, *body) for line in each)]
    return "\n".join([*printed, *(line for each in body for line in each)])


def _widths(cells: Sequence[Sequence[str]], columns: int) -> list[int]:
    """Return the width of each column, the widest of which are narrowed until a row fits."""
    by_column = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in by_column]
    words = [" ".join(column).split() for column in by_column]
    least = [max(map(len, each), default=0) for each in words]
    room = columns - len(_GAP) * (len(widths) - 1)
    while sum(widths) > room:
        left = [index for index, most in enumerate(widths) if most > least[index]]
        if not left:
            break
        widths[max(left, key=widths.__getitem__)] -= 1
    return widths


def _row(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Return the lines of a row."""
    broken = [_wrapped(cell, *place).split("\n") for cell, *place in zip(row, widths, strict=True)]
    padded = itertools.zip_longest(*broken, fillvalue="")
    return [_GAP.join(map(str.ljust, line, widths)).rstrip() for line in padded]


def in_bytes(number: float) -> str:
    """Return a number of bytes in words."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} bytes"


def in_seconds(number: float) -> str:
    """Return a duration in words: "0.4 s", "12 s", "3 minutes"."""
    if number >= 120:
        return f"{number / 60:.0f} minutes"
    return f"{number:.{0 if number >= 10 else 1}f} s"
