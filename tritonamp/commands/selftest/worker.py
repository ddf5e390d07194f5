"""A process of the selftest: it runs each COUNT-th check, and prints a line of JSON for each.

    python -m tritonamp.commands.selftest.worker GROUPS PART COUNT FIRST

GROUPS are names, separated by commas. PART is the number of the first check of this process. FIRST
is the number of its checks to skip. Before a check it prints {"starts": number, "group": ...,
"name": ...}, and after the check the outcome. It ends after a check that has spoiled the GPU's
context. bench/sanitize.py starts it under compute-sanitizer.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import IO

from tritonamp.commands import selftest
from tritonamp.commands.selftest.check import outcome_of


def main(arguments: Sequence[str]) -> int:
    groups, part, count, first = arguments[0].split(","), *map(int, arguments[1:])
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # other output, such as a compiler's, would mix with the JSON
        return run_part(groups, part, count, first, out)


def run_part(groups: Sequence[str], part: int, count: int, first: int, out: IO[str]) -> int:
    """Run the checks and write their lines to ``out``; return the exit status."""
    device = selftest.first_device()
    backend = selftest.backend_on(device)
    mine = selftest.all_checks(groups, device, backend.name)[part::count]
    for number, (group, check) in list(enumerate(mine))[first:]:
        where = {"group": group, "name": check.name}
        print(json.dumps({"starts": number} | where), file=out, flush=True)
        outcome = where | outcome_of(check, device)
        print(json.dumps(outcome), file=out, flush=True)
        if "spoiled" in outcome:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
