"""The parts of first_gpu.sh: command, share of the time and summary of each."""

import argparse
import importlib.util
import itertools
import math
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import first_setup
import first_summary
import jsonl
from commits import ROOT

SECONDS, TOOLS_SECONDS = 360.0, 150.0
AT_THE_END = 2.0  # seconds for the last summary
LEAST = 8.0  # seconds for which a part is started: imports, and what ``ended`` keeps
SUMMARY = 11_000  # characters: a lent machine may hand back 12,000
MOST_PROCESSES = 14
DRY_TESTS = "tests/gpuless/test_waits.py"
NCU = (
    "softmax", "norm", "group_norm", "cross_entropy", "sum", "cast",
    "grad_stats", "adam", "sgd", "lion", "muon", "ema", "ranges",
)  # fmt: skip
SANITIZERS = {"memcheck": 60, "racecheck": 30, "synccheck": 20}  # tools, and their shares


class Part(NamedTuple):
    """A part of a run.

    Attributes:
        name: name of the part, in the summary and of its log.
        share: seconds of the part in a run of ``SECONDS`` or ``TOOLS_SECONDS``.
        command: command line.
        summary: maker of the summary's lines.
        takes_seconds: whether the command has an option ``--seconds``.
        variables: further environment variables.
        wheels: folder of ``work`` whose packages the part sees.
    """

    name: str
    share: float
    command: list[str]
    summary: first_summary.Summary
    takes_seconds: bool = False
    variables: Mapping[str, str] = {}
    wheels: str = "tests"


class Machine(NamedTuple):
    """What the parts run on.

    Attributes:
        gpu: whether this machine has a GPU.
        folder: folder of the results.
        work: temporary folder, for wheels and logs.
        tree: working directory of the parts.
        processes: number of parallel processes.
    """

    gpu: bool
    folder: Path
    work: Path
    tree: Path
    processes: int

    def selftest(self, *arguments: str) -> list[str]:
        to = str(self.folder / jsonl.CHECKS)
        command = [sys.executable, "-m", "tritonamp", "doctor", "--selftest", *arguments]
        return [*command, "--lines", to]

    def rows(self, name: str, share: float, tier: int) -> Part:
        toy = [] if self.gpu else ["--toy"]
        command = [sys.executable, "bench/run.py", "--tiers", str(tier), *toy]
        command += ["--folder", str(self.folder)]
        summary = first_summary.rows_of(tier)
        return Part(name, share, command, summary, takes_seconds=True, wheels="peers")

    def tests(self, name: str, share: float, file: str, arguments: list[str]) -> Part:
        command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-rfE"]
        command += ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
        command += ["-n", str(self.processes)] * (importlib.util.find_spec("xdist") is not None)
        command += ["--cuda" if self.gpu else "--fake-cuda"]
        command += ["--lines", str(self.folder / file), *arguments]
        return Part(name, share, command, first_summary.tests_of(file))

    def parts(self, only: list[str]) -> list[Part]:
        """Return the parts, the most wanted first.

        Args:
            only: arguments of pytest, for tests that run before everything else.
        """
        together = self.selftest("kernel", "training", "--jobs", str(self.processes))
        alone = self.selftest("speed", "--jobs", "1")
        first = [self.tests("mended tests", 60, jsonl.MENDED, only)] if only else []
        return [
            *first,
            Part("kernels, training", 70, together, first_summary.checks),
            Part("speed", 25, alone, first_summary.speed),
            self.rows("first rows", 105, 1),
            self.rows("telling rows", 40, 2),
            self.tests("tests", 95, jsonl.TESTS, [] if self.gpu else [DRY_TESTS]),
            self.rows("other rows", 10, 3),
        ]

    def tools(self) -> list[Part]:
        """Return the parts of ``--tools``."""
        script, jobs = [sys.executable, "bench/sanitize.py"], str(self.processes)
        found = []
        bounds = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # each tensor has some of its own
        for tool, share in SANITIZERS.items():
            command = [*script, tool, "--jobs", jobs]
            found.append(Part(tool, share, command, first_summary.sanitizer, variables=bounds))
        # the second launch of each kernel, as large as it is timed
        kernels = f"::regex:^({'|'.join(NCU)}):2"
        command = ["ncu", "--clock-control", "none", "--kernel-id", kernels]
        for section in ("SpeedOfLight", "MemoryWorkloadAnalysis", "Occupancy", "LaunchStats"):
            command += ["--section", section]
        command += [sys.executable, "-m", "tritonamp", "doctor", "--selftest", "speed"]
        return [*found, Part("ncu", 40, [*command, "--jobs", "0"], first_summary.ncu)]


class Run:
    """Runs the parts one after the other, and keeps their files.

    Attributes:
        failed: whether a part failed.
        cut: names of the parts that were cut off, or did not start.
        started: number of parts that have started.
    """

    def __init__(self, machine: Machine, seconds: float) -> None:
        self.machine, self.failed, self.cut, self.started = machine, False, list[str](), 0
        self._begin, self._end = time.monotonic(), time.monotonic() + seconds - AT_THE_END
        self._said: list[str] = []
        self._logs = machine.work / "logs"
        self._logs.mkdir()

    def say(self, text: str) -> None:
        print(text, flush=True)
        self._said.append(text)
        (self.machine.folder / "summary.txt").write_text("\n".join(self._said) + "\n")

    def say_verdict(self) -> None:
        if self.cut:
            self.say(f"NOT COMPLETE, for want of time: {'; '.join(self.cut)}")
        if not self.failed:
            self.say("nothing that ran has failed")

    def left(self) -> float:
        return self._end - time.monotonic()

    def run_all(self, waiting: list[Part]) -> None:
        """Run the parts, each for its share of the remaining time."""
        while waiting:
            seconds = self.left() * waiting[0].share / sum(part.share for part in waiting)
            self.run_part(waiting.pop(0), seconds)

    def run_part(self, part: Part, seconds: float) -> None:
        if seconds < LEAST:
            self.cut.append(part.name)
            self._done(part, "no time left", 0.0)
            return
        self.started += 1
        begin = time.monotonic()
        log = self._logs / f"{part.name.replace(', ', '-').replace(' ', '-')}.log"
        limit = seconds - first_setup.KILLED_AFTER - 1  # it ends by itself
        timed = ["--seconds", f"{limit:.1f}"] if part.takes_seconds else []
        command, environment = [*part.command, *timed], self._environment(part)
        try:
            status = first_setup.ended(command, self.machine.tree, log, seconds, environment)
        except BaseException:  # this process is stopped
            self.cut.append(part.name)
            self._done(part, "stopped", time.monotonic() - begin)
            raise
        finally:
            first_setup.pack(self._logs, self.machine.folder / "logs.tar.gz")
        taken = time.monotonic() - begin
        text = log.read_text(errors="replace")
        told = part.summary(self.machine.folder, text)
        wrong = any(line.startswith(first_summary.WRONG) for line in told)
        self.failed |= wrong or bool(status)
        if status is None:
            self.cut.append(part.name)
            self._done(part, f"cut off at {seconds:.0f} s", taken)
        elif wrong or status:
            how = f" with exit status {status}" if status else ""
            self._done(part, f"FAILED{how}, {taken:.0f} s", taken)
            if not wrong:
                told = [*told, *text.splitlines()[-3:]]
        else:
            self._done(part, f"ok, {taken:.0f} s", taken)
        for line in told:
            if sum(map(len, self._said)) + len(line) < SUMMARY:
                self.say("  " + line[:220])

    def _done(self, part: Part, outcome: str, seconds: float) -> None:
        self.say(f"{part.name}: {outcome}")
        line = {"part": part.name, "outcome": outcome, "seconds": round(seconds, 1)}
        jsonl.append(self.machine.folder / jsonl.PARTS, line)

    def _environment(self, part: Part) -> dict[str, str]:
        paths = str(self.machine.work / part.wheels), os.environ.get("PYTHONPATH", "")
        found = {"OMP_NUM_THREADS": "1"} | os.environ | part.variables
        found |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
        found["PATH"] += os.pathsep + "/usr/local/cuda/bin"
        return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/first_gpu.sh", description=__doc__)
    parser.add_argument(
        "--seconds", type=positive, help="time limit of the whole run (360, with --tools 150)"
    )
    parser.add_argument(
        "--only", type=shlex.split, default=[], help="arguments of pytest: tests that run first"
    )
    parser.add_argument("--tools", action="store_true", help="compute-sanitizer and ncu, instead")
    parser.add_argument("--wheels", type=Path, help="folder of packages that are absent here")
    parser.add_argument("folder", type=Path, nargs="?", help="folder for the results")
    args = parser.parse_args(arguments)
    if args.wheels and not list(args.wheels.glob("*.whl")):
        parser.error(f"expected a folder of wheels, got --wheels {args.wheels}")
    seconds = args.seconds or (TOOLS_SECONDS if args.tools else SECONDS)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda *_: sys.exit(1))  # through each ``finally``
    # a script's "&" has it ignored, and the parts would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as work:
        try:
            return run_in(Path(work), args, seconds)
        except KeyboardInterrupt:
            return 130  # as a shell says it


def positive(text: str) -> float:
    """Return a number of seconds.

    Raises:
        ValueError: the number is not above 0, or not finite.
    """
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise ValueError("expected seconds above 0")
    return seconds


def new_folder(run: str) -> Path:
    """Return a new folder in bench/results, or without a GPU a temporary one."""
    if not run:
        return Path(tempfile.mkdtemp())
    names = (run if number == 1 else f"{run}-{number}" for number in itertools.count(1))
    paths = (ROOT / "bench" / "results" / name for name in names)
    return next(path for path in paths if not path.exists())


def run_in(work: Path, args: argparse.Namespace, seconds: float) -> int:
    begin = time.monotonic()
    about, tree = first_setup.facts_and_tree(work)
    folder = args.folder or new_folder(about["run"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"{folder} cannot be written: {error}", file=sys.stderr)
        return 2
    if (folder / jsonl.PARTS).exists():
        print(f"{folder} has the results of another run: name a new folder", file=sys.stderr)
        return 2
    cores = len(os.sched_getaffinity(0))
    processes = min(cores, MOST_PROCESSES)
    machine = Machine(bool(about["run"]), folder.resolve(), work, tree, processes)
    run = Run(machine, seconds - (time.monotonic() - begin))
    run.say(first_summary.head(about, cores))
    if args.wheels:
        for problem in first_setup.install(args.wheels, work):
            run.failed = True
            run.say(f"not installed: {problem}")
    parts = machine.tools() if args.tools else machine.parts(args.only)
    run.run_all(list(parts))
    run.say_verdict()
    run.say(f"all of it is in {folder}, after {time.monotonic() - begin:.0f} s")
    return int(run.failed or not run.started)


if __name__ == "__main__":
    sys.exit(main())
