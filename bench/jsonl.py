"""Files of results that grow by a line of JSON at a time, so that a cut loses nothing."""

import json
from pathlib import Path
from typing import Any

ROWS, CHECKS, TESTS, PARTS = "rows.jsonl", "selftest.jsonl", "tests.jsonl", "parts.jsonl"
"""The files of a run: measurements, checks of the selftest, tests, parts of first_gpu.sh."""

Line = dict[str, Any]


def append(path: Path, line: Line) -> None:
    """Add a line; it is on its way to the disk when this returns.

    The folder is made where it is absent.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        print(json.dumps(line), file=file)


def read(path: Path) -> list[Line]:
    """Return the lines of a file, none where it is absent.

    A last line that is not whole is left out.
    """
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
