"""The parts of first_gpu.sh: what each runs, for how long, and what the summary says of it."""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import first_summary
import lines

ROOT = Path(__file__).resolve().parents[1]
SECONDS, TOOLS_SECONDS = 360.0, 150.0
KILLED_AFTER = 3.0  # seconds after Ctrl-C
AT_THE_END = 2.0  # seconds for the last summary
LEAST = 3.0  # seconds for which a part is started
SUMMARY = 11_000  # characters: a lent machine may hand back 12,000
FOR_TESTS = "expecttest", "hypothesis", "pytest"  # other wheels are peers: some of them warn
PEERS_FROM = "gpu_peers"  # folder of wheels that only measurements see
MOST_PROCESSES = 14
DRY_TESTS = "tests/gpuless/test_waits.py"
SANITIZERS = "memcheck", "racecheck", "synccheck"


class Machine(NamedTuple):
    """What the parts run on.

    Attributes:
        gpu: its name; "" where there is none.
        folder: of the results.
        work: of links, wheels and logs.
        processes: that run side by side.
        only: arguments of pytest, for the tests that run first.
    """

    gpu: str
    folder: Path
    work: Path
    processes: int
    only: str

    def python(self, *arguments: str) -> list[str]:
        return [sys.executable, *arguments]

    def selftest(self, *arguments: str) -> list[str]:
        to = str(self.folder / lines.CHECKS)
        return self.python("-m", "tritonamp", "doctor", "--selftest", *arguments, "--lines", to)

    def rows(self, tier: int, seconds: float) -> list[str]:
        return self.python(
            "bench/run.py", "--tiers", str(tier), "--seconds", f"{seconds - 1:.1f}",
            "--folder", str(self.folder), *["--toy"] * (not self.gpu),
        )  # fmt: skip

    def tests(self, *arguments: str) -> list[str]:
        on = ["--cuda"] if self.gpu else ["--fake-cuda"]
        return self.python(
            "-m", "pytest", "-v", "--tb=short", "-rfE", "-p", "no:cacheprovider",
            "--continue-on-collection-errors", "-n", str(self.processes), *on,
            "--lines", str(self.folder / lines.TESTS), *arguments,
        )  # fmt: skip


class Part(NamedTuple):
    """A part of a run.

    Attributes:
        name: of its log, and in the summary.
        share: of the time, in seconds of a run of ``SECONDS``.
        command: from the machine and the part's seconds.
        summary: what the summary says of its lines, from the folder and the log.
    """

    name: str
    share: float
    command: Callable[[Machine, float], list[str]]
    summary: Callable[[Path, str], list[str]] = lambda folder, log: []


def parts(machine: Machine) -> list[Part]:
    """Return the parts, the most wanted first."""
    processes = str(machine.processes)
    found = [
        Part("kernels, training, waits", 70, lambda m, s: m.selftest(
            "kernel", "training", "waits", "--jobs", processes), first_summary.checks),
        Part("speed", 25, lambda m, s: m.selftest("speed", "--jobs", "1"), first_summary.speed),
        Part("first rows", 105, lambda m, s: m.rows(1, s), first_summary.rows_of(1)),
        Part("telling rows", 40, lambda m, s: m.rows(2, s), first_summary.rows_of(2)),
        Part("tests", 95, lambda m, s: m.tests(*[DRY_TESTS] * (not m.gpu)), first_summary.tests),
        Part("other rows", 10, lambda m, s: m.rows(3, s), first_summary.rows_of(3)),
    ]  # fmt: skip
    if machine.only:
        only = machine.tests(*shlex.split(machine.only))
        found.insert(0, Part("mended tests", 60, lambda m, s: only, first_summary.tests))
    return found


def tools(machine: Machine) -> list[Part]:
    """Return the parts of ``--tools``."""
    seconds = 60, 30, 20
    found = [
        Part(tool, share, lambda m, s, tool=tool: m.python(
            "bench/sanitize.py", tool, "--jobs", str(m.processes)), first_summary.sanitizer)
        for tool, share in zip(SANITIZERS, seconds, strict=True)
    ]  # fmt: skip
    # the second launch of each kernel, as large as it is timed
    kernels = "::regex:^(softmax|norm|cross_entropy|cast|grad_stats|adam|sgd|lion):2"
    sections = "SpeedOfLight", "MemoryWorkloadAnalysis", "Occupancy", "LaunchStats"
    options = [word for section in sections for word in ("--section", section)]
    return [*found, Part("ncu", 40, lambda m, s: [
        "ncu", "--clock-control", "none", "--kernel-id", kernels, *options,
        *m.python("-m", "tritonamp", "doctor", "--selftest", "speed", "--jobs", "0"),
    ], first_summary.ncu)]  # fmt: skip


class Run:
    """Runs the parts one after the other, and keeps what they leave.

    Attributes:
        failed: whether a part failed.
    """

    def __init__(self, machine: Machine, seconds: float) -> None:
        self.machine, self.failed = machine, False
        self._begin, self._end = time.monotonic(), time.monotonic() + seconds - AT_THE_END
        self._said: list[str] = []
        self._logs = machine.work / "logs"
        self._logs.mkdir()

    def say(self, text: str) -> None:
        print(text, flush=True)
        self._said.append(text)
        (self.machine.folder / "summary.txt").write_text("\n".join(self._said) + "\n")

    def left(self) -> float:
        return self._end - time.monotonic()

    def run_all(self, waiting: list[Part]) -> None:
        """Run the parts, each for its share of the time that those before it have left."""
        while waiting:
            seconds = self.left() * waiting[0].share / sum(part.share for part in waiting)
            self.run_part(waiting.pop(0), seconds)

    def run_part(self, part: Part, seconds: float) -> None:
        if seconds < LEAST:
            self._done(part, "no time left", 0.0, False)
            return
        begin = time.monotonic()
        log = self._logs / f"{part.name.replace(', ', '-').replace(' ', '-')}.log"
        status = ended(part.command(self.machine, seconds), log, seconds, self._environment(part))
        taken = time.monotonic() - begin
        text = log.read_text(errors="replace")
        told = part.summary(self.machine.folder, text)
        wrong = any(line.startswith(first_summary.WRONG) for line in told)
        if status is None:
            self._done(part, f"cut off at {seconds:.0f} s", taken, wrong)
        elif status == 0 and not wrong:
            self._done(part, f"ok, {taken:.0f} s", taken, False)
        else:
            self._done(part, f"FAILED with exit status {status}, {taken:.0f} s", taken, True)
            if not told:
                told = text.splitlines()[-3:]
        for line in told:
            if sum(map(len, self._said)) + len(line) < SUMMARY:
                self.say("  " + line[:220])

    def _done(self, part: Part, outcome: str, seconds: float, failed: bool) -> None:
        self.failed |= failed
        self.say(f"{part.name}: {outcome}")
        line = {"part": part.name, "outcome": outcome, "seconds": round(seconds, 1)}
        lines.append(self.machine.folder / lines.PARTS, line)
        pack(self._logs, self.machine.folder / "logs.tar.gz")

    def _environment(self, part: Part) -> dict[str, str]:
        paths = [str(self.machine.work / "tests"), os.environ.get("PYTHONPATH", "")]
        if "rows" in part.name:
            paths.insert(0, str(self.machine.work / PEERS_FROM))
        found = {"OMP_NUM_THREADS": "1"} | os.environ
        found |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
        found["PATH"] += os.pathsep + "/usr/local/cuda/bin"
        if part.name in SANITIZERS:  # so that each tensor has bounds of its own
            found["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        return found


def ended(
    command: Sequence[str], log: Path, seconds: float, environment: dict[str, str]
) -> int | None:
    """Run a command with all that it starts; return its exit status, None where it was cut off."""
    with log.open("w") as file:
        try:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                cwd=ROOT, env=environment, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            print(error, file=file)
            return 127
        try:
            return process.wait(max(seconds - KILLED_AFTER, 0.0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILLED_AFTER)
            return None
        finally:  # also where this process is stopped itself
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def pack(folder: Path, path: Path) -> None:
    """Write the archive of a folder, so that there is a whole one at every moment."""
    new = path.with_name(path.name + ".new")
    with tarfile.open(new, "w:gz") as archive:
        archive.add(folder, "logs")
    new.replace(path)


def link(folder: Path) -> None:
    """Make this tree importable from the folder, as an installation of it would be."""
    package = folder / "tritonamp"
    package.mkdir(parents=True)
    for path in (ROOT / "tritonamp").iterdir():
        (package / path.name).symlink_to(path)
    (package / "kernels").symlink_to(ROOT / "kernels")


def finds_this_tree() -> bool:
    """Return whether Python finds the package of this tree, and no other."""
    code = "import tritonamp.kernels as found; print(found.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tempfile.gettempdir(), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    path = done.stdout.strip()
    return bool(path) and Path(path).resolve() == ROOT / "kernels" / "__init__.py"


def install(wheels: Path, work: Path) -> Iterator[str]:
    """Install the wheels, each by itself; yield what pip says of those that it cannot install."""
    for wheel in sorted(wheels.glob("*.whl")):
        target = work / ("tests" if wheel.name.startswith(FOR_TESTS) else PEERS_FROM)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        command += ["--no-compile", "--no-cache-dir", "--target", str(target), str(wheel)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            yield f"{wheel.name}: {(done.stderr.strip().splitlines() or ['?'])[-1][:200]}"


def facts() -> dict[str, str]:
    """Return what torch says of this machine; it is asked in another process."""
    code = (
        "import json, provenance, torch; gpu = torch.cuda.is_available();"
        "print(json.dumps(provenance.machine(torch.device('cuda' if gpu else 'cpu')) | "
        "{'gpu': torch.cuda.get_device_name() if gpu else ''}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "bench",
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"torch cannot be asked for the GPU:\n{done.stderr[-2000:]}")
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/first_gpu.sh", description=__doc__)
    parser.add_argument("--seconds", type=float, help="for all of it (360, with --tools 150)")
    parser.add_argument("--only", default="", help="arguments of pytest: tests that run first")
    parser.add_argument("--tools", action="store_true", help="compute-sanitizer and ncu, instead")
    parser.add_argument("--wheels", type=Path, help="folder of packages that are absent here")
    parser.add_argument("folder", type=Path, nargs="?", help="of the results")
    args = parser.parse_args(arguments)
    seconds = args.seconds or (TOOLS_SECONDS if args.tools else SECONDS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through each ``finally``
    with tempfile.TemporaryDirectory() as work:
        return run_in(Path(work), args, seconds)


def run_in(work: Path, args: argparse.Namespace, seconds: float) -> int:
    begin = time.monotonic()
    if not finds_this_tree():
        link(work / "links")
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(work / "links"), os.environ.get("PYTHONPATH")])
        )
    about = facts()
    folder = args.folder or (
        ROOT / "bench" / "results" / f"{about['gpu']}-{time.strftime('%Y-%m-%d')}"
        if about["gpu"]
        else Path(tempfile.mkdtemp())
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"{folder} cannot be written: {error}", file=sys.stderr)
        return 2
    cores = len(os.sched_getaffinity(0))
    processes = min(cores, MOST_PROCESSES)
    machine = Machine(about["gpu"], folder.resolve(), work, processes, args.only)
    run = Run(machine, seconds - (time.monotonic() - begin))
    run.say(first_summary.head(about, cores))
    if args.wheels:
        for problem in install(args.wheels, work):
            run.failed = True
            run.say(f"not installed: {problem}")
    run.run_all(tools(machine) if args.tools else parts(machine))
    run.say(f"all of it is in {folder}, after {time.monotonic() - begin:.0f} s")
    return int(run.failed)


if __name__ == "__main__":
    sys.exit(main())
