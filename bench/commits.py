"""Which commit a tree is of."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VARIABLE = "TRITONAMP_COMMIT"


def commit() -> str:
    """Return what the environment says, else what ``git archive`` wrote, else what Git says.

    "-dirty" follows where files that Git knows differ from the commit. The first two are for trees
    without a .git; where nothing is known it is "unknown".
    """
    if VARIABLE in os.environ:
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
