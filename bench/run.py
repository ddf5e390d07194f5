"""Measures everything on this machine's GPU, and writes it to bench/results/.

    python bench/run.py            # ten minutes
    python bench/run.py --quick    # two minutes, the most telling rows

The file is <gpu>-torch<version>-triton<version>.json; its name ends in -quick for those. Peers that
may get in one another's way run in processes of their own. What does not fit in the time, fails, or
is not installed is listed in the file under "not_measured", with the reason. Without a GPU nothing
is measured or written.
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import provenance
import torch
from case import Case
from matrix import all_cases
from peers import PEERS, missing
from timing import Stopwatch, Timing

RESULTS = Path(__file__).parent / "results"
MINUTES, QUICK_MINUTES = 10.0, 2.0
SECONDS, QUICK_SECONDS = 0.2, 0.1  # of samples for each row
# seconds of the whole for a process that is in the middle of something when its time is up
RESERVE = 30.0
NO_GPU = "no GPU here, so nothing is measured: `pytest bench` runs every case at toy size"

Row = dict[str, Any]


def measure(
    process: str, cases: Iterable[Case], stopwatch: Stopwatch, until: float
) -> Iterator[Row]:
    """Rows of the peers of one process, and what could not be measured, until that time."""
    for case in sorted(cases, key=lambda case: not case.quick):
        for peer in (peer for peer in case.peers if PEERS[peer].process == process):
            if time.time() > until:
                yield {"case": case.name, "peer": peer, "reason": "out of time"}
                continue
            try:
                torch.manual_seed(0)
                timing = stopwatch.measure(
                    functools.partial(case.peers[peer], stopwatch.device), case.graph
                )
            except Exception as error:  # a peer can fail in any way; the others go on
                yield {"case": case.name, "peer": peer, "reason": _one_line(error)}
            else:
                yield row(case, peer, timing, stopwatch.copy_bandwidth)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def row(case: Case, peer: str, timing: Timing, copy_bandwidth: float) -> Row:
    """Return what one peer did on one case.

    Rates count the bytes that have to move, not those that the peer moves.
    """
    rate = case.elements * case.bytes / timing.us * 1e6 if case.bytes else None
    return {
        "group": case.group, "case": case.name, "peer": peer,
        "dtype": case.dtype, "shape": case.shape,
        "headline": case.quick, "elements": case.elements, "bytes_per_element": case.bytes,
        "path_bytes_per_element": case.path_bytes.get(peer), "us": timing.us,
        "gb_per_s": rate and rate / 1e9, "copy_gb_per_s": copy_bandwidth / 1e9,
        "fraction_of_copy": rate and rate / copy_bandwidth, "host_us": timing.host_us,
        "peak_bytes": timing.peak_bytes, "clock": timing.clock, "samples": timing.samples,
    }  # fmt: skip


def with_ratios(rows: list[Row], machine: Row) -> list[Row]:
    """Add "ratio", by peer of the same case how many times longer it takes, and the machine."""
    times: dict[str, dict[str, float]] = {}
    for r in rows:
        times.setdefault(r["case"], {})[r["peer"]] = r["us"]
    return [
        r
        | {
            "ratio": {
                peer: us / r["us"] for peer, us in times[r["case"]].items() if peer != r["peer"]
            }
        }
        | machine
        for r in rows
    ]


def child(process: str, quick: bool, until: float, path: Path) -> None:
    """Measure in this process, and append a line for each row: it survives a crash."""
    stopwatch = Stopwatch(torch.device("cuda"), QUICK_SECONDS if quick else SECONDS)
    with path.open("a") as lines:
        for found in measure(
            process, [c for c in all_cases() if c.quick or not quick], stopwatch, until
        ):
            outcome = found.get("reason") or f"{found['us']:.1f} us"
            print(f"{found['case']}: {found['peer']} {outcome}")
            print(json.dumps(found), file=lines, flush=True)


def run(minutes: float, quick: bool) -> tuple[list[Row], list[Row]]:
    """Rows, and what was not measured."""
    absent = [{"peer": peer, "reason": reason} for peer in PEERS if (reason := missing(peer))]
    present = [PEERS[peer].process for peer in PEERS if not missing(peer)]
    processes, end = list(dict.fromkeys(present)), time.time() + 60 * minutes - RESERVE
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for i, process in enumerate(processes):
            left = end - time.time()
            if left <= 0:
                absent.append({"peer": process, "reason": "out of time"})
                continue
            until = time.time() + left / (len(processes) - i)
            path = Path(folder) / f"{process}.jsonl"
            command = [
                sys.executable,
                __file__,
                "--process",
                process,
                "--until",
                str(until),
                "--lines",
                str(path),
            ]
            try:
                code = subprocess.run(
                    command + ["--quick"] * quick,
                    timeout=until - time.time() + RESERVE - 5,
                    check=False,
                ).returncode
                stopped = f"exit status {code}" if code else None
            except subprocess.TimeoutExpired:
                stopped = "out of time"
            found += map(json.loads, path.read_text().splitlines()) if path.exists() else []
            absent += (
                [{"peer": process, "reason": f"its process ended early: {stopped}"}]
                if stopped
                else []
            )
    return [f for f in found if "us" in f], absent + [f for f in found if "us" not in f]


def write(path: Path, record: Row) -> None:
    """JSON with a line for each row, so that a diff of two files can be read."""
    lists = {key: value for key, value in record.items() if isinstance(value, list)}
    head = json.dumps({key: value for key, value in record.items() if key not in lists}, indent=1)[
        :-2
    ]
    body = [
        f' "{key}": [\n' + ",\n".join(map(json.dumps, value)) + "\n ]"
        for key, value in lists.items()
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text(",\n".join([head, *body]) + "\n}\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measures everything on this machine's GPU.")
    parser.add_argument("--quick", action="store_true", help="two minutes, the most telling rows")
    parser.add_argument(
        "--minutes", type=float, help=f"default: {MINUTES:g}, with --quick {QUICK_MINUTES:g}"
    )
    parser.add_argument(
        "--process", choices={peer.process for peer in PEERS.values()}, help=argparse.SUPPRESS
    )
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    if args.process:
        child(args.process, args.quick, args.until, args.lines)
        return 0

    machine = provenance.machine(torch.device("cuda"))
    start = time.time()
    rows, absent = run(args.minutes or (QUICK_MINUTES if args.quick else MINUTES), args.quick)
    stem = provenance.slug(f"{machine['device']}-torch{machine['torch']}-triton{machine['triton']}")
    path = RESULTS / f"{stem}{'-quick' if args.quick else ''}.json"
    head = {
        "command": "python bench/run.py" + " --quick" * args.quick,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.time() - start),
    }
    write(path, machine | head | {"rows": with_ratios(rows, machine), "not_measured": absent})
    print(path)
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
