"""The commit of this tree."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VARIABLE = "TRITONAMP_COMMIT"


def commit() -> str:
    """Return the commit, from ``TRITONAMP_COMMIT``, ``git archive`` or Git.

    Git's answer ends in "-dirty" if tracked files are modified. The first two serve trees without a
    .git; "unknown" if none knows.
    """
    if os.environ.get(VARIABLE):
        return os.environ[VARIABLE]
    archived = Path(__file__).with_name("archived.txt").read_text().strip()
    if not archived.startswith("$"):
        return archived
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
