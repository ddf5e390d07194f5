"""Files of results that grow by a line of JSON at a time, so that an interruption loses nothing."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

ROWS, CHECKS, TESTS, PARTS = "rows.jsonl", "selftest.jsonl", "tests.jsonl", "parts.jsonl"
"""The files of a run: measurements, checks of the selftest, tests, parts of first_gpu.sh."""
MENDED = "mended.jsonl"
"""The file of the tests of ``first_gpu.sh --only``."""
OUT_OF_TIME = "out of time"
"""The reason for a row that was not measured in time."""

Line = dict[str, Any]


def append(path: Path, line: Line) -> None:
    """Append a line and close the file. The folder is created if it is absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":  # a cut has left a part of a line
                file.write(b"\n")
        file.write(json.dumps(line).encode() + b"\n")


def read(path: Path) -> list[Line]:
    """Return the complete lines of a file, none if it is absent."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found
