"""Measures everything on this machine's GPU, and writes it to bench/results/.

    python bench/run.py            # ten minutes
    python bench/run.py --quick    # two minutes, the most telling rows
    python bench/run.py --toy --folder /tmp/x    # toy sizes on the CPU, to try the script itself

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
from typing import Any, NamedTuple

import provenance
import torch
from case import Case
from matrix import all_cases
from peers import PEERS, missing
from timing import Stopwatch, Timing

RESULTS = Path(__file__).parent / "results"
MINUTES, QUICK_MINUTES = 10.0, 2.0
SECONDS, QUICK_SECONDS = 0.2, 0.1  # of samples for each row
START = 10.0  # seconds for a process until its clock starts: imports, a context on the GPU
RESERVE = 20.0  # and of the whole for one that is in the middle of a row when its time is up
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
                yield {"case": case.name, "peer": peer, "reason": provenance.reason_of(error)}
            else:
                yield row_of(case, peer, timing, stopwatch.copy_bandwidth)


def row_of(case: Case, peer: str, timing: Timing, copy_bandwidth: float) -> Row:
    """Return what one peer did on one case.

    Rates count the bytes that have to move, not those that the peer moves.
    """
    rate = case.elements * case.bytes / timing.us * 1e6 if case.bytes else None
    return {
        "group": case.group, "case": case.name, "peer": peer,
        "dtype": case.dtype, "shape": case.shape,
        "quick": case.quick, "elements": case.elements, "bytes_per_element": case.bytes,
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
    found = []
    for r in rows:
        others = {peer: us for peer, us in times[r["case"]].items() if peer != r["peer"]}
        found.append(r | {"ratio": {peer: us / r["us"] for peer, us in others.items()}} | machine)
    return found


class Plan(NamedTuple):
    """What is measured.

    Attributes:
        quick: the most telling rows alone.
        toy: on the CPU, at sizes at which it measures nothing.
    """

    quick: bool = False
    toy: bool = False

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.toy else "cuda")

    def cases(self) -> list[Case]:
        return [case for case in all_cases(self.toy) if case.quick or not self.quick]

    def stopwatch(self) -> Stopwatch:
        seconds = QUICK_SECONDS if self.quick else SECONDS
        return Stopwatch(self.device, *((1e-3, 1 << 16) if self.toy else (seconds,)))

    def options(self) -> list[str]:
        return ["--quick"] * self.quick + ["--toy"] * self.toy


def measure_to_file(process: str, plan: Plan, seconds: float, path: Path) -> None:
    """Measure in this process, and append a line for each row: it survives a crash.

    The seconds are for the rows: they begin when everything is imported, and a copy was timed.
    """
    stopwatch = plan.stopwatch()
    until = time.time() + seconds
    with path.open("a") as lines:
        for found in measure(process, plan.cases(), stopwatch, until):
            outcome = found.get("reason") or f"{found['us']:.1f} us"
            print(f"{found['case']}: {found['peer']} {outcome}", flush=True)
            print(json.dumps(found), file=lines, flush=True)


def rows_by_process(plan: Plan) -> dict[str, int]:
    """Return how many rows each process has to measure, of the peers that are installed."""
    counts: dict[str, int] = {}
    for peer in PEERS:
        if not missing(peer):
            rows = sum(peer in case.peers for case in plan.cases())
            counts[PEERS[peer].process] = counts.get(PEERS[peer].process, 0) + rows
    return {process: rows for process, rows in counts.items() if rows}


def run_processes(minutes: float, plan: Plan) -> tuple[list[Row], list[Row]]:
    """Rows, and what was not measured.

    A process gets its part of what is left by its number of rows; what one does not need is there
    for the next.
    """
    absent = [{"peer": peer, "reason": reason} for peer in PEERS if (reason := missing(peer))]
    waiting, end = rows_by_process(plan), time.time() + 60 * minutes
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for process in list(waiting):
            left = end - time.time() - RESERVE - START * len(waiting)
            seconds = left * waiting[process] / sum(waiting.values())
            del waiting[process]
            if seconds <= 0:
                absent.append({"peer": process, "reason": "out of time"})
                continue
            path = Path(folder) / f"{process}.jsonl"
            stopped = _run_process(process, plan, seconds, path)
            found += map(json.loads, path.read_text().splitlines()) if path.exists() else []
            if stopped:
                reason = f"its process ended early: {stopped}"
                absent.append({"peer": process, "reason": reason})
    return [f for f in found if "us" in f], absent + [f for f in found if "us" not in f]


def _run_process(process: str, plan: Plan, seconds: float, path: Path) -> str | None:
    """Measure in a process of its own; return why that ended before it was done, or None."""
    command = [sys.executable, __file__, "--process", process, "--seconds", str(seconds)]
    command += ["--lines", str(path), *plan.options()]
    try:
        code = subprocess.run(command, timeout=START + seconds + RESERVE, check=False).returncode
    except subprocess.TimeoutExpired:
        return "out of time"
    return f"exit status {code}" if code else None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measures everything on this machine's GPU.")
    parser.add_argument("--quick", action="store_true", help="two minutes, the most telling rows")
    parser.add_argument(
        "--toy", action="store_true", help="toy sizes on the CPU: tries the script, needs --folder"
    )
    parser.add_argument(
        "--minutes", type=float, help=f"default: {MINUTES:g}, with --quick {QUICK_MINUTES:g}"
    )
    parser.add_argument("--folder", type=Path, help="for the result (default: bench/results)")
    parser.add_argument(
        "--process", choices={peer.process for peer in PEERS.values()}, help=argparse.SUPPRESS
    )
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    plan = Plan(args.quick, args.toy)
    if args.process:
        measure_to_file(args.process, plan, args.seconds, args.lines)
        return 0
    if plan.toy and args.folder is None:
        parser.error("expected --folder with --toy: bench/results/ is for measurements")
    if not plan.toy and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2

    machine = provenance.machine(plan.device)
    start = time.time()
    rows, absent = run_processes(args.minutes or (QUICK_MINUTES if plan.quick else MINUTES), plan)
    stem = provenance.slug(f"{machine['device']}-torch{machine['torch']}-triton{machine['triton']}")
    path = (args.folder or RESULTS) / f"{stem}{'-quick' if plan.quick else ''}.json"
    head = {
        "command": " ".join(["python bench/run.py", *plan.options()]),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.time() - start),
    }
    found = {"rows": with_ratios(rows, machine), "not_measured": absent}
    provenance.write_record(path, machine | head | found)
    print(path)
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
