"""``counts.py --peers``: a process for each peer, and the file of all rows that the pages show."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import provenance
from peers import missing

RESULT = Path(__file__).parent / "results" / "counts-peers.json"
NAMES = "tritonamp", "Liger-Kernel", "FlagGems", "compile", "optimi"
NOT_COUNTED = {
    "apex": "CUDA kernels, which the emulator does not run",
    "Transformer Engine": "CUDA kernels, which the emulator does not run",
}
PINNED = "torch", "triton", "liger-kernel", "flag-gems", "torch-optimi"

Row = dict[str, Any]


def count_peers(only: str) -> Row:
    """Count the cases of every peer whose package is installed.

    Returns:
        the record: "rows" of counts, "errors" against FP64, "not_counted" with reasons, versions.
    """
    start = time.time()
    rows: list[Row] = []
    absent = [{"peer": peer, "reason": reason} for peer, reason in NOT_COUNTED.items()]
    for peer in NAMES:
        if reason := missing(peer):
            absent.append({"peer": peer, "reason": reason})
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.jsonl"
            script = Path(__file__).with_name("peer_counts.py")
            command = [sys.executable, str(script), peer, str(path), "--only", only]
            code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
            rows += map(json.loads, path.read_text().splitlines()) if path.exists() else []
        if code:
            absent.append({"peer": peer, "reason": f"its process ended early: exit status {code}"})
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": "python bench/counts.py --peers --snapshot",
        "seconds": round(time.time() - start),
        "commit": provenance.commit(),
        "versions": provenance.versions(PINNED),
        "rows": [row for row in rows if "bytes" in row],
        "errors": [row for row in rows if "forward" in row],
        "not_counted": absent + [row for row in rows if "reason" in row],
    }


def lines_of(found: Row) -> Iterator[str]:
    for row in found["rows"]:
        low, estimate, high = row["roofline"]["H100"]
        yield (
            f"{row['case']:44} {row['peer']:13} {row['bytes']:7.2f} B {row['asked']:7.2f} B asked "
            f"{row['instructions']:7.2f} instructions {row['sectors_load']:5.2f} sectors a load "
            f"{row['sectors_store']:5.2f} a store {row['launches']:3} launches, estimate on H100 "
            f"{estimate:.2f} ({low:.2f} to {high:.2f}) ns a thousand, by {row['limit']}"
        )
    for row in found["errors"]:
        errors = "; ".join(
            f"{scale}: {100 * of['zeroed']:.2f} % zeroed, error {of['error']:.1e}"
            for scale, of in row.items()
            if scale.startswith("scale")
        )
        yield f"{row['case']:44} {row['peer']:13} error {row['forward']:.1e}; {errors}"
    for row in found["not_counted"]:
        yield f"{row.get('case', ''):44} {row['peer']:13} not counted: {row['reason']}"


def main(only: str, as_json: bool, snapshot: bool) -> int:
    found = count_peers(only)
    if snapshot:
        # without what each launch did: that is for ``--json``
        rows = [
            {key: value for key, value in row.items() if key != "kernels"} for row in found["rows"]
        ]
        provenance.write_record(RESULT, found | {"rows": rows})
    elif as_json:
        for kind in ("rows", "errors", "not_counted"):
            print(*map(json.dumps, found[kind]), sep="\n")
    else:
        print(*lines_of(found), sep="\n")
    return 0 if found["rows"] else 1
