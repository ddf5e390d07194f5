"""Runs the selftest's kernels under a tool of compute-sanitizer, in parallel processes.

python bench/sanitize.py memcheck --jobs 8
"""

import argparse
import sys
from typing import Any

from tritonamp.commands.selftest import processes

FOUND = 9  # exit status of a process in which the tool has found something
LIMIT = 600.0  # seconds for one check: the tools slow kernels down a hundred times


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Runs the selftest's kernels under a tool.")
    parser.add_argument("tool", choices=["memcheck", "racecheck", "synccheck", "initcheck"])
    parser.add_argument("--jobs", type=int, default=8)
    args = parser.parse_args(arguments)
    outcomes: list[dict[str, Any]] = []
    under = ["compute-sanitizer", "--tool", args.tool, "--error-exitcode", str(FOUND)]
    workers = processes.Workers(outcomes.append, [*under, *processes.WORKER], LIMIT)
    workers.run(["kernel"], args.jobs)
    failed = [outcome for outcome in outcomes if outcome["status"] == "FAILED"]
    print(f"{len(outcomes)} checks", *failed, sep="\n")
    return 1 if failed or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
