"""--lines FILE, on a small project of its own."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from small_project import run_pytest

TESTS = """
import os
import time

import pytest

@pytest.fixture
def broken():
    raise ValueError("no such thing")

@pytest.fixture
def leaves_something():
    yield
    raise OSError("it is left")

def test_passes():
    time.sleep(0.2)

def test_fails():
    assert 1 == 2, "one is not two" + "." * 400

def test_has_no_fixture(broken):
    pass

def test_leaves_something(leaves_something):
    pass

def test_skips():
    pytest.skip("there is no GPU")

@pytest.mark.skip(reason="never")
def test_is_skipped():
    pass

@pytest.mark.xfail(reason="not yet")
def test_is_expected_to_fail():
    raise ValueError
"""
DIES = """
def test_dies():
    time.sleep(1)
    os._exit(1)
"""
LINES = {
    "test_passes": ("passed", ""),
    "test_fails": ("failed", "test_some.py:20: AssertionError: one is not two.."),
    "test_has_no_fixture": ("error", "test_some.py:9: ValueError: no such thing"),
    "test_leaves_something": ("error", "test_some.py:14: OSError: it is left"),
    "test_skips": ("skipped", "there is no GPU"),
    "test_is_skipped": ("skipped", "never"),
    "test_is_expected_to_fail": ("skipped", "not yet"),
}
DEAD = {"test_dies": ("failed", "worker 'gw0' crashed while running 'test_some.py::test_dies'")}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., list[dict[str, object]]]:
    """Run pytest on files that use lines.py, and return the lines."""
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["lines"]\n')

    def run(*arguments: str) -> list[dict[str, object]]:
        file = tmp_path / "results" / "tests.jsonl"
        run_pytest(tmp_path, f"--lines={file}", *arguments)
        return list(map(json.loads, file.read_text().splitlines()))

    return run


@pytest.mark.parametrize(
    ("arguments", "more_tests", "more_lines"),
    [((), "", {}), (("-pxdist", "-n1"), DIES, DEAD)],
    ids=["one process", "a worker that dies"],
)
def test_each_test_has_a_line(
    run: Callable[..., list[dict[str, object]]],
    tmp_path: Path,
    arguments: tuple[str, ...],
    more_tests: str,
    more_lines: dict[str, tuple[str, str]],
) -> None:
    (tmp_path / "test_some.py").write_text(TESTS + more_tests)
    lines = run(*arguments)
    expected = LINES | more_lines
    assert [line["test"] for line in lines] == [f"test_some.py::{name}" for name in expected]
    for line, (status, detail) in zip(lines, expected.values(), strict=True):
        assert list(line) == ["test", "status", "seconds", "detail"]
        assert line["status"] == status
        assert str(line["detail"]).startswith(detail) and len(str(line["detail"])) <= 300
        assert (line["detail"] == "") == (status == "passed")
    assert 0.2 <= lines[0]["seconds"] < 60
    if more_lines:
        assert 0.2 <= lines[-1]["seconds"] < 60


@pytest.mark.smoke
def test_runs_add_to_a_file(run: Callable[..., list[dict[str, object]]], tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    run("-k", "passes")
    assert [line["status"] for line in run("-k", "test_skips")] == ["passed", "skipped"]


def test_a_file_that_cannot_be_imported_has_a_line(
    run: Callable[..., list[dict[str, object]]], tmp_path: Path
) -> None:
    (tmp_path / "test_some.py").write_text("import no_such_module")
    (line,) = run()
    assert (line["test"], line["status"]) == ("test_some.py", "error")
    assert "no_such_module" in str(line["detail"])


def test_a_line_is_there_before_the_next_test_ends(
    run: Callable[..., list[dict[str, object]]], tmp_path: Path
) -> None:
    dies_later = TESTS + DIES.replace("dies", "zzz")  # the only process: nothing is written later
    (tmp_path / "test_some.py").write_text(dies_later)
    assert [line["test"].partition("::")[2] for line in run()] == list(LINES)
