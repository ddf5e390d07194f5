"""bench/first_gpu.sh: parts, time, failures, hangs and cuts; lines, summary, exit status."""

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "bench" / "first_gpu.sh"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture(scope="module")
def first() -> SimpleNamespace:
    """The modules, which pytest's ``pythonpath`` finds by name."""
    names = {"gpu": "first_gpu", "setup": "first_setup", "summary": "first_summary"}
    names |= {"jsonl": "jsonl", "commits": "commits"}
    return SimpleNamespace(
        **{short: importlib.import_module(name) for short, name in names.items()}
    )


@pytest.fixture
def machine(first: SimpleNamespace, tmp_path: Path) -> Any:
    """A GPU with 16 cores; its folder is there, and nothing is in it."""
    for name in ("out", "work"):
        (tmp_path / name).mkdir()
    return first.gpu.Machine(True, tmp_path / "out", tmp_path / "work", ROOT, 14)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def part(first: SimpleNamespace, name: str, code: str, share: float = 1.0) -> Any:
    return first.gpu.Part(name, share, python(code), lambda folder, log: [])


# The parts


def test_the_most_wanted_come_first(machine: Any) -> None:
    parts = {part.name: part for part in machine.parts([])}
    assert list(parts) == [
        "kernels, training", "speed", "first rows", "telling rows", "tests", "other rows",
    ]  # fmt: skip
    together, tests = parts["kernels, training"].command, parts["tests"].command
    assert " ".join(together).endswith(
        f"--selftest kernel training --jobs 14 --lines {machine.folder}/selftest.jsonl"
    )
    assert "--cuda" in tests and tests[-1] == str(machine.folder / "tests.jsonl")
    assert "--tiers 1" in " ".join(parts["first rows"].command)
    assert sum(part.share for part in parts.values()) <= 360


def test_mended_tests_run_before_everything_else(machine: Any) -> None:
    first, second, *_ = machine.parts(["tests/step", "-k", "clip or norm"])
    assert first.command[-3:] == ["tests/step", "-k", "clip or norm"]
    assert str(machine.folder / "mended.jsonl") in first.command
    assert second.name == "kernels, training"


def test_without_a_gpu_the_same_parts_are_dry(machine: Any) -> None:
    dry = machine._replace(gpu=False)
    assert [part.name for part in dry.parts([])] == [part.name for part in machine.parts([])]
    commands = {part.name: " ".join(part.command) for part in dry.parts([])}
    assert "--fake-cuda" in commands["tests"] and "--cuda" not in commands["tests"].split()
    assert all("--toy" in text for name, text in commands.items() if "rows" in name)


def test_tools(machine: Any) -> None:
    parts = {part.name: " ".join(part.command) for part in machine.tools()}
    assert list(parts) == ["memcheck", "racecheck", "synccheck", "ncu"]
    assert "sanitize.py racecheck --jobs 14" in parts["racecheck"]
    assert parts["ncu"].startswith("ncu ") and "--selftest speed --jobs 0" in parts["ncu"]
    assert sum(part.share for part in machine.tools()) == 150


# Their time


def test_what_a_part_leaves_of_its_time_is_there_for_the_others(
    first: SimpleNamespace, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, given = [0.0], []

    def ended(command: Any, tree: Any, log: Path, seconds: float, environment: Any) -> int:
        log.touch()
        given.append(seconds)
        now[0] += 10.0 if len(given) == 1 else seconds
        return 0

    monkeypatch.setattr(first.gpu.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(first.setup, "ended", ended)
    run = first.gpu.Run(machine, 100 + first.gpu.AT_THE_END)
    run.run_all([part(first, name, "", share) for name, share in (("a", 2), ("b", 1), ("c", 2))])
    assert given == pytest.approx([40.0, 30.0, 60.0])


def test_a_command_is_told_its_seconds(
    first: SimpleNamespace, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def ended(command: list[str], tree: Any, log: Path, *rest: Any) -> int:
        log.touch()
        told.extend(command)
        return 0

    monkeypatch.setattr(first.setup, "ended", ended)
    first.gpu.Run(machine, 50).run_part(machine.rows("first rows", 1, 1), 20.0)
    assert told[-2:] == ["--seconds", "16.0"]  # it ends before it is interrupted


CHILD = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("begun", flush=True)
subprocess.run([sys.executable, "-c", "import time; time.sleep(60)", "MARK"])
"""


def runs(mark: str) -> bool:
    """Return whether a process has that among its arguments."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended since
            if mark.encode() in path.read_bytes().split(b"\0"):
                return True
    return False


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_a_part_that_hangs_ends_with_all_that_it_has_started(
    first: SimpleNamespace, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first.setup, "KILLED_AFTER", 0.5)
    mark = str(machine.work)
    hangs = part(first, "hangs", CHILD.replace("MARK", mark))
    monkeypatch.setattr(first.gpu, "LEAST", 1.0)
    run, began = first.gpu.Run(machine, 30), time.monotonic()
    run.run_part(hangs, 3.0)
    assert 2.5 < time.monotonic() - began < 4.5 and not run.failed
    (line,) = first.jsonl.read(machine.folder / "parts.jsonl")
    assert line["outcome"] == "cut off at 3 s"
    until = time.monotonic() + 5.0  # a killed process takes a moment
    while runs(mark) and time.monotonic() < until:
        time.sleep(0.05)
    assert not runs(mark)
    with tarfile.open(machine.folder / "logs.tar.gz") as archive:
        assert archive.extractfile("logs/hangs.log").read() == b"begun\n"  # type: ignore[union-attr]


INTERRUPTED = """
import time
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("it ends by itself")
"""


def test_a_part_without_time_gets_ctrl_c(
    first: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may write its results then. A blocked signal would never arrive."""
    monkeypatch.setattr(first.setup, "KILLED_AFTER", 10.0)
    log, began = tmp_path / "log", time.monotonic()
    status = first.setup.ended(python(INTERRUPTED), tmp_path, log, 16.0, dict(os.environ))
    assert status is None and log.read_text() == "it ends by itself\n"
    assert time.monotonic() - began < 14.0


STOPPED = """
import importlib, os, signal, subprocess, sys, time
from pathlib import Path
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
first_gpu = importlib.import_module("first_gpu")
at_once = AT_ONCE

class Started(subprocess.Popen):
    def __init__(self, command, **options):
        super().__init__(command, **options)
        if MARK in command and at_once:
            os.kill(os.getpid(), at_once)  # the caller has no name for the process yet

def parts(machine, only):
    hangs = "import time; print('begun', flush=True); time.sleep(60)"
    return [first_gpu.Part("hangs", 1, [sys.executable, "-c", hangs, MARK], lambda *given: [])]

first_gpu.Machine.parts = parts
subprocess.Popen = Started
sys.exit(first_gpu.main(["--seconds", "50", OUT]))
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize("at_once", [False, True], ids=["while it runs", "as a part starts"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_run_that_is_stopped_leaves_its_files_and_no_process(
    tmp_path: Path, number: signal.Signals, at_once: bool
) -> None:
    mark, out = f"mark of {tmp_path}", tmp_path / "out"
    code = STOPPED.replace("MARK", repr(mark)).replace("OUT", repr(str(out)))
    code = code.replace("AT_ONCE", str(int(number) if at_once else 0))
    with subprocess.Popen(python(code), cwd=ROOT / "bench", stdout=subprocess.DEVNULL) as process:
        while not at_once and not runs(mark):
            time.sleep(0.05)
            assert process.poll() is None
        if not at_once:
            process.send_signal(number)
        assert process.wait() == (130 if number is signal.SIGINT else 1)
    (line,) = map(json.loads, (out / "parts.jsonl").read_text().splitlines())
    assert (line["part"], line["outcome"]) == ("hangs", "stopped")
    assert "hangs: stopped" in (out / "summary.txt").read_text()
    assert (out / "logs.tar.gz").is_file()
    until = time.monotonic() + 5.0
    while runs(mark) and time.monotonic() < until:
        time.sleep(0.05)
    assert not runs(mark)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seconds", "0"], "invalid positive value: '0'"),
        (["--seconds", "nan"], "invalid positive value: 'nan'"),
        (["--only", "tests -k 'x"], "invalid split value"),
        (["--wheels", "no-such-folder"], "expected a folder of wheels, got --wheels no-such"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    first: SimpleNamespace, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        first.gpu.main(arguments)
    assert raised.value.code == 2 and said in capsys.readouterr().err


# What becomes of them


def test_a_part_that_fails_hides_no_other(first: SimpleNamespace, machine: Any) -> None:
    run = first.gpu.Run(machine, 60)
    run.run_all(
        [
            part(first, "good", "print('fine')"),
            part(first, "bad", "print('one'); raise SystemExit('it broke')"),
            first.gpu.Part("absent", 1, ["no-such-tool"], lambda folder, log: []),
            part(first, "last", "pass"),
        ]
    )
    assert run.failed
    said = (machine.folder / "summary.txt").read_text().splitlines()
    assert [line.partition(",")[0] for line in said if not line.startswith("  ")] == [
        "good: ok", "bad: FAILED with exit status 1", "absent: FAILED with exit status 127",
        "last: ok",
    ]  # fmt: skip
    assert "  it broke" in said and any("no-such-tool" in line for line in said)


def test_a_part_without_time_is_named(first: SimpleNamespace, machine: Any) -> None:
    run = first.gpu.Run(machine, 1.0)
    run.run_all([part(first, "late", "pass")])
    run.say_verdict()
    said = (machine.folder / "summary.txt").read_text().splitlines()
    assert said[0] == "late: no time left"
    assert said[1:] == ["NOT COMPLETE, for want of time: late", "nothing that ran has failed"]
    assert not run.failed


def test_a_summary_is_never_too_long(first: SimpleNamespace, machine: Any) -> None:
    run = first.gpu.Run(machine, 60)
    told = [f"line {i} " + 500 * "x" for i in range(200)]
    run.run_part(first.gpu.Part("long", 1, python(""), lambda folder, log: told), 20)
    run.run_part(part(first, "next", ""), 20)
    text = (machine.folder / "summary.txt").read_text()
    assert len(text) < 12_000 and "next: ok" in text


@pytest.mark.smoke
def test_failures_among_the_lines_fail_the_part(first: SimpleNamespace, machine: Any) -> None:
    checks = machine.folder / "selftest.jsonl"
    outcome = {"group": "kernel", "name": "sum", "status": "ok", "detail": "", "seconds": 2.0}
    first.jsonl.append(checks, outcome)
    first.jsonl.append(checks, outcome | {"name": "ema", "status": "not here"})
    first.jsonl.append(checks, outcome | {"name": "norm", "status": "cut off", "seconds": 9.0})
    assert first.summary.checks(machine.folder, "") == [
        "1 of 2 checks hold; slowest: kernel norm, 9 s",
        "cut off kernel norm: ",
    ]
    first.jsonl.append(checks, outcome | {"name": "norm"})  # by a second run into the folder
    assert first.summary.checks(machine.folder, "")[0].startswith("2 of 2 checks hold")
    first.jsonl.append(checks, outcome | {"group": "speed", "name": "copy", "status": "FAILED"})
    assert first.summary.speed(machine.folder, "") == ["FAILED speed copy: "]
    first.jsonl.append(checks, outcome | {"name": "lion", "status": "FAILED", "detail": "3 ulps"})
    run = first.gpu.Run(machine, 60)
    run.run_part(first.gpu.Part("kernels", 1, python(""), first.summary.checks), 20)
    assert run.failed
    assert "  FAILED kernel lion: 3 ulps" in (machine.folder / "summary.txt").read_text()


# What the summary says


def test_rows_of_a_case_stand_in_a_line(first: SimpleNamespace, machine: Any) -> None:
    row = {"case": "GPT-2", "group": "training step", "tier": 1, "clock": "events"}
    row |= {"fraction_of_copy": None, "peak_bytes": 3 << 29}
    assert first.summary._row(row | {"peer": "fp32", "us": 1.0, "clock": "host"}) == "fp32: ran"
    file = machine.folder / "rows.jsonl"
    first.jsonl.append(file, row | {"peer": "fp32", "us": 212_345.0})
    cut = {"case": "GPT-2", "tier": 1, "peer": "tritonamp O2", "reason": "its process ended"}
    first.jsonl.append(file, cut)
    first.jsonl.append(file, row | {"case": "another", "tier": 2, "peer": "fp32", "us": 1.0})
    assert first.summary.rows_of(1)(machine.folder, "") == [
        "GPT-2: fp32 212 ms 1.5 GiB; tritonamp O2: none",
        "FAILED: tritonamp O2, 1 times: its process ended",
    ]
    # measured after all, by a later process
    first.jsonl.append(file, row | {"peer": "tritonamp O2", "us": 91_000.0})
    (line,) = first.summary.rows_of(1)(machine.folder, "")
    assert line.endswith("tritonamp O2 91 ms 1.5 GiB")
    # peers may fail
    first.jsonl.append(file, cut | {"peer": "Liger-Kernel", "reason": "it needs a driver"})
    *_, absent = first.summary.rows_of(1)(machine.folder, "")
    assert absent == "not measured: Liger-Kernel, 1 times: it needs a driver"
    # the time was up
    late = {"peer": "tritonamp O1", "reason": first.jsonl.OUT_OF_TIME}
    first.jsonl.append(file, cut | late)
    assert "FAILED" not in "".join(first.summary.rows_of(1)(machine.folder, ""))
    # a process that has measured nothing has no case
    first.jsonl.append(file, {"peer": "tritonamp", "tier": 1, "reason": "exit status 1"})
    assert "FAILED: tritonamp, 1 times: exit status 1" in first.summary.rows_of(1)(
        machine.folder, ""
    )


def test_a_tier_without_rows_says_so(first: SimpleNamespace, machine: Any) -> None:
    assert first.summary.rows_of(1)(machine.folder, "") == ["no row was measured"]


def test_tests_are_counted_and_failures_named(first: SimpleNamespace, machine: Any) -> None:
    for name, status in [("a", "passed"), ("b", "failed"), ("c", "skipped"), ("d", "passed")]:
        line = {"test": name, "status": status, "seconds": 0.1, "detail": "why\n  not"}
        first.jsonl.append(machine.folder / "tests.jsonl", line)
    assert first.summary.tests_of("tests.jsonl")(machine.folder, "") == [
        "2 passed, 1 failed, 1 skipped",
        "FAILED b: why not",
    ]
    assert first.summary.text(machine.folder).endswith("FAILED b: why not")


def test_what_compute_sanitizer_finds_fails_its_part(first: SimpleNamespace) -> None:
    log = "========= ERROR SUMMARY: 0 errors\n" * 3
    assert first.summary.sanitizer(Path(), log) == ["ERROR SUMMARY: 0 errors (3 times)"]
    found = first.summary.sanitizer(
        Path(), log + "========= Invalid __global__ read of size 4 bytes\n"
        "========= ERROR SUMMARY: 1 error\n"
    )  # fmt: skip
    assert [line.startswith("FAILED ") for line in found] == [False, True, True]


def test_a_torn_last_line_is_left_out(first: SimpleNamespace, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    first.jsonl.append(file, {"a": 1})
    with file.open("a") as torn:
        torn.write('{"a": 2, "b')
    assert first.jsonl.read(file) == [{"a": 1}]
    first.jsonl.append(file, {"c": 3})  # by a process that goes on
    assert first.jsonl.read(file) == [{"a": 1}, {"c": 3}]
    assert first.jsonl.read(tmp_path / "absent") == []


# The machine


def test_a_wheel_that_cannot_be_installed_is_named(first: SimpleNamespace, tmp_path: Path) -> None:
    wheels, work = tmp_path / "wheels", tmp_path / "work"
    wheels.mkdir()
    (wheels / "broken-1-py3-none-any.whl").write_text("no archive")
    with zipfile.ZipFile(wheels / "expecttest_like-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("expecttest_like.py", "")
        info = "expecttest_like-1.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: expecttest-like\nVersion: 1"
        )
        tags = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any"
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")
    (problem,) = first.setup.install(wheels, work)
    assert problem.startswith("broken-1-py3-none-any.whl: ")
    assert (work / "tests" / "expecttest_like.py").is_file()


@pytest.fixture
def no_commit(first: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is as it was, after the test; the commit is "abc"."""
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("TRITONAMP_COMMIT", "abc")


@pytest.mark.usefixtures("no_commit")
def test_a_copy_can_be_imported_without_pip(first: SimpleNamespace, tmp_path: Path) -> None:
    tree = first.setup.importable_copy(tmp_path)
    code = "import tritonamp.kernels as k; print(k.__file__)"
    done = subprocess.run(python(code), cwd=tree, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tree / "tritonamp" / "kernels" / "__init__.py")
    assert (os.environ["PYTHONPATH"], os.environ["TRITONAMP_COMMIT"]) == (str(tree), "abc")
    assert not (tree / ".git").exists()


@pytest.mark.usefixtures("no_commit")
def test_the_copy_runs_where_python_finds_another_tree(
    first: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, asked = first.setup, []

    def facts(tree: Path) -> dict[str, str]:
        asked.append(tree)
        if "broken" in tree.parts[-1] or len(asked) > 9:
            raise subprocess.CalledProcessError(1, "python", stderr="no kernels")
        return {"run": ""}

    def found(path: Path) -> None:
        monkeypatch.setattr(
            setup.importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(path))
        )

    monkeypatch.setattr(setup, "facts", facts)
    monkeypatch.setattr(setup, "importable_copy", lambda work: work / "tree")
    found(ROOT / "tritonamp" / "__init__.py")
    assert setup.facts_and_tree(tmp_path) == ({"run": ""}, ROOT)
    found(tmp_path / "tritonamp" / "__init__.py")
    assert setup.facts_and_tree(tmp_path) == ({"run": ""}, tmp_path / "tree")
    # this tree, without the kernels, as with PYTHONPATH=.
    monkeypatch.setattr(setup, "ROOT", tmp_path / "broken")
    found(tmp_path / "broken" / "tritonamp" / "__init__.py")
    assert setup.facts_and_tree(tmp_path) == ({"run": ""}, tmp_path / "tree")
    assert asked == [ROOT, tmp_path / "tree", tmp_path / "broken", tmp_path / "tree"]


def test_a_question_without_an_answer_ends(
    first: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first.setup, "LIMIT", 0.2)
    with pytest.raises(subprocess.CalledProcessError) as raised:
        first.setup.run(python("import time; time.sleep(60)"), tmp_path)
    assert raised.value.stderr == "no answer within 0.2 s"


def test_the_commit_of_a_tree_without_git(
    first: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commits = first.commits
    monkeypatch.setenv("TRITONAMP_COMMIT", "said")
    assert commits.commit() == "said"
    monkeypatch.delenv("TRITONAMP_COMMIT")
    monkeypatch.setattr(commits, "__file__", str(tmp_path / "commits.py"))
    monkeypatch.setattr(commits, "ROOT", tmp_path)
    archived = tmp_path / "archived.txt"
    archived.write_text("1234abc\n")  # as ``git archive`` writes it
    assert commits.commit() == "1234abc"
    archived.write_text("$Format:%h$\n")
    assert commits.commit() == "unknown"


@pytest.mark.parametrize("is_file", [True, False])
def test_a_folder_that_cannot_be_used_is_told_at_once(tmp_path: Path, is_file: bool) -> None:
    out = tmp_path / "out"
    if is_file:
        out.write_text("a file")
    else:
        out.mkdir()
        (out / "parts.jsonl").touch()
    done = dry_run(out, 30)
    why = "cannot be written" if is_file else "has the results of another run"
    assert done.returncode == 2 and why in done.stderr


def test_each_run_has_a_folder_of_its_own(
    first: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first.gpu, "ROOT", tmp_path)
    results = tmp_path / "bench" / "results"
    for name in ("h100-2026-01-01", "h100-2026-01-01-2", "h100-2026-01-01-3"):
        assert first.gpu.new_folder("h100-2026-01-01") == results / name
        (results / name).mkdir(parents=True)


# All of it

PLANTED = """
import importlib.abc, importlib.util, os, sys, time

class Planted(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "tritonamp.commands.selftest.kernels":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            real, check = module.checks, sys.modules["tritonamp.commands.selftest.check"]

            def spoil():
                check._fault_of = lambda device: "an illegal memory access"
                return check.Found("fine")

            def checks(device, backend):
                yield check.Check("spoils", spoil)
                yield check.Check("dies", os.abort)
                yield from real(device, backend)
                if "HANGS" in os.environ:
                    yield check.Check("hangs", lambda: time.sleep(600))

            module.checks = checks

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Planted())
"""


def dry_run(folder: Path, seconds: float, *options: str, **variables: str) -> Any:
    command = [str(SCRIPT), "--seconds", str(seconds), *options, str(folder)]
    environment = os.environ | {"PYTHON": sys.executable} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In new processes the selftest has a check that spoils its process, and one that dies."""
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    paths = str(tmp_path), os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("TRITON_INTERPRET", "0")


@pytest.mark.long
@pytest.mark.usefixtures("planted")
def test_a_fatal_check_hides_no_other(first: SimpleNamespace, machine: Any) -> None:
    dry = machine._replace(gpu=False, processes=2)
    run = first.gpu.Run(dry, 300)
    run.run_part(dry.parts([])[0], 300)
    checks = first.jsonl.read(machine.folder / "selftest.jsonl")
    failed = {line["name"]: line["detail"] for line in checks if line["status"] == "FAILED"}
    assert set(failed) == {"spoils", "dies"} and run.failed
    assert failed["dies"] == "its process ended with signal 6: Fatal Python error: Aborted"
    assert failed["spoils"].startswith("an illegal memory access; the GPU's context is gone")
    assert sum(line["status"] == "ok" for line in checks) > 40
    text = (machine.folder / "summary.txt").read_text()
    assert text.startswith("kernels, training: FAILED") and "FAILED kernel dies: " in text


@pytest.mark.long
@pytest.mark.usefixtures("planted")
def test_a_dry_run_ends_in_its_limit_whatever_fails_inside(tmp_path: Path) -> None:
    (tmp_path / "broken-1-py3-none-any.whl").write_text("no archive")
    began, out = time.monotonic(), tmp_path / "out"
    done = dry_run(out, 60, "--wheels", str(tmp_path), HANGS="1")
    assert time.monotonic() - began < 60 + 5  # to start and end processes
    assert done.returncode == 1, done.stderr
    assert "no GPU: a dry run, which measures nothing" in done.stdout
    assert "not installed: broken-1-py3-none-any.whl" in done.stdout
    assert (out / "summary.txt").read_text() == done.stdout
    parts = [json.loads(line)["part"] for line in (out / "parts.jsonl").read_text().splitlines()]
    assert len(parts) == 6 and (out / "logs.tar.gz").is_file()
