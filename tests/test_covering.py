"""What runs without --full: the sample itself, and pytest on a small project of its own."""

import argparse
import itertools
import re
import time
from collections.abc import Callable
from pathlib import Path

import budget
import pytest
import torch
from covering import SLOW, SMOKE, TOOLS, covering, file_marks, more, one_in, turn_of
from small_project import run_pytest


@pytest.mark.parametrize("sizes", [(1,), (5,), (2, 3), (4, 4), (3, 1, 5), (2, 2, 2, 2)], ids=str)
def test_of_all_combinations_as_many_as_the_longest_parameter_has_values(
    sizes: tuple[int, ...],
) -> None:
    cases = [list(enumerate(case)) for case in itertools.product(*map(range, sizes))]
    chosen = covering(cases)
    assert len(chosen) == max(sizes)
    assert {value for i in chosen for value in cases[i]} == {v for case in cases for v in case}


def test_of_some_combinations_every_value() -> None:
    cases = ["ab", "bc", "cd", "da", "e"]
    assert covering(cases) == [0, 2, 4]  # in their order, the first of equals
    assert covering([]) == []


TESTS = """
import pytest

@pytest.fixture(params=["x", "y"])
def fixture(request):
    return request.param

@pytest.mark.parametrize("a", [0, 1, 2])
@pytest.mark.parametrize(("b", "c"), [(0, "-"), (1, "-"), (1, "-"), (1, "+")])
def test_rows(fixture, a, b, c):
    pass

def test_plain():
    pass

@pytest.mark.crash
def test_slow():
    pass
"""
SLOW_FILE = """
import pytest

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.ranks]

def test_slow_too():
    pass
"""
TOOL = """
import pytest

@pytest.mark.smoke
@pytest.mark.parametrize("a", [0, 1])
@pytest.mark.parametrize("b", [0, 1])
def test_smoke(a, b):
    pass

def test_more():
    pass
"""
BUSY = """
import subprocess
import sys
import time

import pytest

def use_cpu(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

def test_starts_a_process():
    loop = "import time\\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", loop], check=True)

def test_waits():
    time.sleep(0.4)

def test_works():
    use_cpu(0.4)

@pytest.mark.long
def test_is_slow():
    use_cpu(0.4)

@pytest.mark.long
@pytest.mark.smoke
def test_runs_all_the_same():
    use_cpu(0.4)
"""

TOO_LONG = ["test_starts_a_process", "test_works", "test_runs_all_the_same"]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Run pytest on files that use covering.py, and return what it prints."""
    (tmp_path / "test_rows.py").write_text(TESTS)
    (tmp_path / "test_file.py").write_text(SLOW_FILE)
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "test_smoke.py").write_text(TOOL)
    (tmp_path / "tool" / "test_more.py").write_text("def test(): pass")
    (tmp_path / "conftest.py").write_text(
        "import budget, covering\n"
        "budget.SECONDS, budget.IN_PROCESSES, budget.LOOP = 0.2, 0.3, 1.0\n"
        'covering.TOOLS = ["tool"]\n'
        'pytest_plugins = ["covering", "budget", "on_a_gpu"]\n'
    )

    def run(*arguments: str) -> str:
        return run_pytest(tmp_path, "-p", "xdist", *arguments).stdout

    return run


MORE_RUNS = [
    ("-n0", "a covering sample, without slow tests", 7),
    ("-p no:xdist -p no:cacheprovider", "a covering sample, without slow tests", 7),
    ("-n0 --tools", "a covering sample, without slow tests", 9),
    ("-n2 tool", "a covering sample, without slow tests", 4),
    ("-n0 --slow", "a covering sample, with slow tests", 11),
    ("-n2 --slow --dist load", "a covering sample, with slow tests", 11),
    ("-n0 --full", "cases: all\n", 33),
    ("-n2 --rest --dist load", "those that are not in the covering sample", 26),
    ("-n2 --full --turn 1/1", "part 1 of 1 of all\n", 33),
    ("-n0 -k plain", "all of what is named", 1),
    ("-n0 -m ranks", "all of what is named", 1),
    ("-n0 -m tools", "all of what is named", 6),
    ("-n0 tool/test_smoke.py", "all of what is named", 5),
    ("test_rows.py::test_slow", "all of what is named", 1),
    ("test_rows.py::test_rows[x-1--0-0]", "all of what is named", 1),
]


@pytest.mark.parametrize(
    ("arguments", "header", "passed"),
    [
        ("-n2 --dist load", "a covering sample, without slow tests", 7),
        ("-n0 --rest", "those that are not in the covering sample", 26),
        ("-n0 test_rows.py", "all of what is named", 26),
        *more(MORE_RUNS),
    ],
)
def test_what_runs(run: Callable[..., str], arguments: str, header: str, passed: int) -> None:
    shown = run(*arguments.split())
    assert f"cases: {header.removeprefix('cases: ')}" in shown
    assert f" {passed} passed" in shown
    report = "7 of 31 cases, and none of 2 files marked as ranks, clients, crash"
    assert (report in shown) == (passed == 7)
    assert ("11 of 33 cases: --full runs all" in shown) == ("--slow" in arguments)


@pytest.mark.parametrize("which", [None, *more(["--rest", "--full", "-k rows"])])
def test_turns_run_every_case_once(run: Callable[..., str], which: str | None) -> None:
    def cases(*arguments: str) -> list[str]:
        shown = run("-v", "-n0", *(which or "").split(), *arguments)
        return re.findall("^(\\S+::.+) PASSED", shown, re.MULTILINE)

    turns = [cases("--turn", f"{k}/3") for k in (1, 2, 3)]
    assert sorted(itertools.chain(*turns)) == sorted(cases())
    assert all(turns)


@pytest.mark.parametrize("turn", ["0/2", "3/2", "1", "a/b", "-1/2", "1/2/3", ""])
def test_what_is_no_turn(turn: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected K/N with K from 1 to N"):
        turn_of(turn)


@pytest.mark.parametrize(
    ("arguments", "failed"),
    [
        ("", []),
        *more(
            [
                ("--full", TOO_LONG),
                ("--slow", []),
                ("--rest", []),  # all that is left out without is marked
                ("--full --budget 1", TOO_LONG[:1]),
                ("--budget 0.2", TOO_LONG),
                ("--budget 0.2 test_busy.py", TOO_LONG),
            ]
        ),
    ],
)
def test_what_takes_longer_is_told_to_be_marked(
    run: Callable[..., str], tmp_path: Path, arguments: str, failed: list[str]
) -> None:
    (tmp_path / "test_busy.py").write_text(BUSY)
    shown = run("-n0", *arguments.split())
    assert re.findall("^FAILED test_busy.py::(\\w+)", shown, re.MULTILINE) == failed
    assert shown.count("s are allowed: mark it slow (ranks, clients, ") == len(failed)


def test_a_gpu_takes_long_tests_and_compiled_ones(run: Callable[..., str], tmp_path: Path) -> None:
    long = "import pytest\n@pytest.mark.long\ndef test_long(): pass\n"
    (tmp_path / "test_long.py").write_text(long)
    compiled = SLOW_FILE.replace("pytest.mark.ranks", "pytest.mark.compiled")
    (tmp_path / "test_compiled.py").write_text(compiled)
    assert " 7 passed" in run("-n0")
    shown = run("-n0", "--cuda")
    assert " 9 passed" in shown
    assert "files marked as ranks, clients, crash, demo, static, more, tools:" in shown


def test_a_slow_machine_gets_more_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "LOOP", 1e-6)
    assert budget.slowness() > 100
    monkeypatch.setattr(budget, "LOOP", 1.0)
    assert budget.slowness() == 1


def test_a_minute_that_is_slow_gets_more_seconds(run: Callable[..., str], tmp_path: Path) -> None:
    """The machine is measured where a test took long, not where the run begins."""
    slow = "import budget\nbudget.slowness = lambda: 10.0\n"
    (tmp_path / "test_busy.py").write_text(BUSY)
    assert " 3 failed" in run("-n0", "--budget", "0.2", "test_busy.py")
    (tmp_path / "test_busy.py").write_text(slow + BUSY)
    assert " failed" not in run("-n0", "--budget", "0.2", "test_busy.py")


def test_waiting_threads_take_no_cpu_time() -> None:
    x = torch.ones(100_000)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x.exp()
        before = time.process_time()
        for _ in range(20):
            x.exp()  # in two threads, after which one waits for more
            time.sleep(0.003)
        taken = time.process_time() - before
    finally:
        torch.set_num_threads(threads)
    assert taken < 0.02, "of 0.06 s a thread spins"


def test_one_named_test_runs_in_this_process(run: Callable[..., str]) -> None:
    assert "workers" not in run("test_rows.py::test_plain")
    assert "workers" not in run("-s", "-k", "plain")
    assert "workers" in run("-k", "plain")


def test_slow_files_are_told_by_their_text(tmp_path: Path) -> None:
    path = tmp_path / "test_file.py"
    path.write_text(SLOW_FILE)
    assert file_marks(path) == {"ranks"}
    path.write_text("import pytest\n\n@pytest.mark.ranks\ndef test(): pass\n")
    assert file_marks(path) == set()
    found = {mark for path in Path(__file__).parent.rglob("test_*.py") for mark in file_marks(path)}
    assert found <= SLOW.keys()


def test_one_case_in_three_is_in_a_plain_run() -> None:
    cases = one_in(3, "abcdefg")
    plain = [case for case in cases if isinstance(case, str)]
    assert plain == ["a", "d", "g"]
    assert [case.values for case in cases if case not in plain] == [("b",), ("c",), ("e",), ("f",)]


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_has_a_smoke_test(tool: str) -> None:
    path = Path(__file__).resolve().parents[1] / tool
    files = [path] if path.is_file() else path.rglob("test_*.py")
    assert any(f"mark.{SMOKE}" in file.read_text() for file in files)
