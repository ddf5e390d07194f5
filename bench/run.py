"""Measures everything on this machine's GPU, the most important rows first.

    python bench/run.py                              # ten minutes
    python bench/run.py --tiers 1 2 --seconds 150    # the most telling rows
    python bench/run.py --toy --folder /tmp/x        # toy sizes on the CPU: tries the script

Each row becomes a line of rows.jsonl in the folder (bench/results/<gpu>-<date>) as soon as it is
measured. Rows that this commit has already measured there are not measured again. Peers that might
disturb each other run in separate processes. The line of a failed row has the reason. If a row
kills its process, a new process continues with the next row. Without a GPU nothing is measured or
written.
"""

import argparse
import functools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonl
import provenance
import torch
from case import TIERS, Case
from commits import commit
from matrix import all_cases
from peers import PEERS, missing
from timing import Stopwatch, Timing

RESULTS = Path(__file__).parent / "results"
SECONDS = 600.0
SAMPLING = {1: 0.1, 2: 0.1, 3: 0.2}  # by tier, seconds of samples for each row
START = 7.0  # seconds for a process until its clock starts: imports, a context on the GPU
RESERVE = 5.0  # for a process that is in the middle of a row when its time is up
WORTH_IT = 3.0  # seconds of measuring for which a process is started
NO_GPU = "no GPU here, so nothing is measured: `pytest bench` runs every case at toy size"
CUT = "its process ended while it was measured"

Row = dict[str, Any]
Pair = tuple[Case, str]


class Plan(NamedTuple):
    """The rows to measure, and their file.

    Attributes:
        folder: folder of rows.jsonl.
        tiers: tiers of ``Case`` to measure.
        toy: whether to run on the CPU, at toy sizes.
        since: number of lines in the file before this call, whose failures are tried again.
    """

    folder: Path
    tiers: tuple[int, ...] = TIERS
    toy: bool = False
    since: int = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.toy else "cuda")

    @property
    def file(self) -> Path:
        return self.folder / jsonl.ROWS

    def waiting(self, process: str, tier: int) -> list[Pair]:
        """Return the rows that a process still has to measure."""
        known, here = set(), commit()
        for number, row in enumerate(jsonl.read(self.file)):
            if number >= self.since or ("us" in row and row["commit"] == here):
                known.add((row.get("case"), row["peer"]))
        return [
            (case, peer)
            for case in all_cases(self.toy)
            for peer in case.peers
            if case.tier == tier and PEERS[peer].process == process
            if not missing(peer) and (case.name, peer) not in known
        ]

    def stopwatch(self, tier: int) -> Stopwatch:
        return Stopwatch(self.device, *((1e-3, 1 << 16) if self.toy else (SAMPLING[tier],)))


def measure(pairs: list[Pair], stopwatch: Stopwatch, until: float) -> Iterator[Row]:
    """Yield two lines for each row: a reason in case the process dies, then the result."""
    for case, peer in pairs:
        if time.time() > until:
            return
        where = {"case": case.name, "peer": peer, "tier": case.tier}
        yield where | {"reason": CUT}
        try:
            torch.manual_seed(0)
            make = functools.partial(case.peers[peer], stopwatch.device)
            timing = stopwatch.measure(make, case.graph)
        except Exception as error:  # a peer can fail in any way; the others go on
            yield where | {"reason": provenance.reason_of(error)}
            if stopwatch.device.type == "cuda":
                torch.cuda.synchronize()  # raises where the context is gone: a new process goes on
        else:
            yield row_of(case, peer, timing, stopwatch.copy_bandwidth)


def row_of(case: Case, peer: str, timing: Timing, copy_bandwidth: float) -> Row:
    """Return the row of one peer on one case.

    Rates count the least bytes that the work has to move, not the bytes that the peer moves.
    """
    rate = case.elements * case.bytes / timing.us * 1e6 if case.bytes else None
    return {
        "group": case.group, "case": case.name, "peer": peer,
        "dtype": case.dtype, "shape": case.shape,
        "tier": case.tier, "elements": case.elements, "bytes_per_element": case.bytes,
        "path_bytes_per_element": case.path_bytes.get(peer), "us": timing.us,
        "gb_per_s": rate and rate / 1e9, "copy_gb_per_s": copy_bandwidth / 1e9,
        "fraction_of_copy": rate and rate / copy_bandwidth, "host_us": timing.host_us,
        "peak_bytes": timing.peak_bytes, "clock": timing.clock, "samples": timing.samples,
    }  # fmt: skip


def measure_here(process: str, tier: int, plan: Plan, seconds: float) -> None:
    """Measure in this process.

    The seconds are for the rows. They begin after the imports and the timing of a copy.
    """
    stopwatch = plan.stopwatch(tier)
    machine = provenance.machine(plan.device) | {"date": time.strftime("%Y-%m-%d")}
    pairs = plan.waiting(process, tier)
    for found in measure(pairs, stopwatch, time.time() + seconds):
        jsonl.append(plan.file, found | machine)
        if found.get("reason") != CUT:
            outcome = found.get("reason") or f"{found['us']:.1f} us"
            print(f"{found['case']}: {found['peer']} {outcome}", flush=True)


Start = Callable[[str, int, Plan, float], str | None]
"""Measures in a new process; returns the reason if the process ended early, else None."""


def start_process(process: str, tier: int, plan: Plan, seconds: float) -> str | None:
    command = [sys.executable, __file__, "--folder", str(plan.folder), *["--toy"] * plan.toy]
    command += ["--process", process, "--tiers", str(tier), "--seconds", str(seconds)]
    command += ["--since", str(plan.since)]
    try:
        code = subprocess.run(command, timeout=START + seconds + RESERVE, check=False).returncode
    except subprocess.TimeoutExpired:
        return jsonl.OUT_OF_TIME
    return f"exit status {code}" if code else None


def run_processes(seconds: float, plan: Plan, start: Start = start_process) -> None:
    """Measure tier by tier.

    Each process gets a share of the remaining time, by its number of rows; unused time goes to the
    next. "compile" is last, because it compiles most of the time. If there is too little time for
    all processes, the last ones do not run.
    """
    end = time.time() + seconds
    known = {row["peer"] for row in jsonl.read(plan.file) if "case" not in row}
    for peer in PEERS:
        if peer not in known and (reason := missing(peer)):
            jsonl.append(plan.file, {"peer": peer, "reason": reason})
    processes = dict.fromkeys(peer.process for peer in PEERS.values())
    order = sorted(processes, key=lambda process: process == "compile")
    for tier in plan.tiers:
        waiting = {process: len(plan.waiting(process, tier)) for process in order}
        waiting = {process: rows for process, rows in waiting.items() if rows}
        while waiting:
            process = next(iter(waiting))
            share = first_share(list(waiting.values()), end - time.time() - RESERVE)
            del waiting[process]
            if share >= WORTH_IT:
                _measure_all(process, tier, plan, time.time() + START + share, start)


def first_share(rows: list[int], left: float) -> float:
    """Return the first process's share of the seconds; ``rows`` are the processes' row counts."""
    for count in range(len(rows), 1, -1):
        share = (left - START * count) * rows[0] / sum(rows[:count])
        if share >= START:
            return share
    return left - START


def _measure_all(process: str, tier: int, plan: Plan, until: float, start: Start) -> None:
    """Measure until a time, in a new process after each row that kills its process."""
    waiting = len(plan.waiting(process, tier))
    while waiting and (seconds := until - START - time.time()) >= WORTH_IT:
        stopped = start(process, tier, plan, seconds)
        if stopped == jsonl.OUT_OF_TIME:
            _excuse_last_row(plan)
        if stopped in (None, jsonl.OUT_OF_TIME):
            return
        before, waiting = waiting, len(plan.waiting(process, tier))
        if waiting == before:  # it measured nothing
            reason = f"its process ended early: {stopped}"
            jsonl.append(plan.file, {"peer": process, "tier": tier, "reason": reason})
            return


def _excuse_last_row(plan: Plan) -> None:
    """Replace the reason of the row that was being measured when the time was up."""
    last = jsonl.read(plan.file)[-1:]
    if last and last[0].get("reason") == CUT:
        jsonl.append(plan.file, last[0] | {"reason": jsonl.OUT_OF_TIME})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measures everything on this machine's GPU.")
    parser.add_argument(
        "--tiers", type=int, nargs="+", choices=TIERS, default=TIERS,
        help="1: what people ask first; 2: the other rows of the tables; 3: the rest",
    )  # fmt: skip
    parser.add_argument("--since", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"default: {SECONDS:g}")
    parser.add_argument(
        "--toy", action="store_true", help="toy sizes on the CPU: tries the script, needs --folder"
    )
    parser.add_argument("--folder", type=Path, help="of rows.jsonl (bench/results/<gpu>-<date>)")
    parser.add_argument(
        "--process", choices={peer.process for peer in PEERS.values()}, help=argparse.SUPPRESS
    )
    args = parser.parse_args(arguments)
    if args.toy and args.folder is None:
        parser.error("expected --folder with --toy: bench/results/ is for measurements")
    if not args.toy and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    folder = args.folder or RESULTS / provenance.run_name()
    plan = Plan(folder, tuple(args.tiers), args.toy, args.since)
    if args.process:
        measure_here(args.process, args.tiers[0], plan, args.seconds)
        return 0
    plan = plan._replace(since=len(jsonl.read(plan.file)))
    run_processes(args.seconds, plan)
    print(plan.file)
    tried = [row for row in jsonl.read(plan.file)[plan.since :] if "tier" in row]
    return 1 if tried and not any("us" in row for row in tried) else 0


if __name__ == "__main__":
    sys.exit(main())
