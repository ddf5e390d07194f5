"""--cuda on a small project of its own, whose torch is a stand-in."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import every_test
import pytest
from small_project import run_pytest

CONFTEST = """
import sys
import types

pytest_plugins = ["lines", "on_a_gpu"]

class Cuda:
    is_broken = False

    def is_initialized():
        return True

    def synchronize():
        if Cuda.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

sys.modules["torch"] = types.SimpleNamespace(cuda=Cuda)
"""
TESTS = """
import ctypes
import sys
import time

import pytest

@pytest.fixture
def slow_to_end():
    yield
    time.sleep(50)

def test_before():
    pass

def test_breaks_it():
    sys.modules["torch"].cuda.is_broken = True

def test_fails_and_breaks_it():
    sys.modules["torch"].cuda.is_broken = True
    assert 1 == 2

def test_hangs():
    ctypes.PyDLL(None).sleep(50)  # with the GIL

def test_fails_and_hangs(slow_to_end):
    assert 1 == 2

def test_later():
    assert not sys.modules["torch"].cuda.is_broken
"""
IN_ORDER = """
import time

import pytest

@pytest.mark.parametrize("number", range(240))
def test(number):
    with open("begun", "a") as file:
        file.write(f"{number}\\n")
    time.sleep(0.005)
"""
GONE = "RuntimeError: the CUDA context is gone after this test: CUDA error: an illegal memory"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Run pytest on files that use on_a_gpu.py, and return its exit status and what it prints."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)

    def run(*arguments: str) -> tuple[int, str]:
        done = run_pytest(tmp_path, "-rA", "-pxdist", "--lines=lines", *arguments)
        return done.returncode, done.stdout

    return run


def outcomes(shown: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for outcome, test in re.findall(r"^(PASSED|FAILED|ERROR) test_some.py::(\w+)", shown, re.M):
        found.setdefault(test.removeprefix("test_"), set()).add(outcome)
    return found


def lines(folder: Path) -> dict[str, str]:
    """Return name and status of each test that has a line: one, whatever was reported of it."""
    found = [json.loads(line) for line in (folder / "lines").read_text().splitlines()]
    status = {line["test"].partition("::test_")[2]: line["status"] for line in found}
    assert len(status) == len(found)
    return status


@pytest.mark.smoke
def test_a_process_whose_context_is_gone_is_replaced(
    run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    _, shown = run("-n1", "--cuda", "-k", "before or breaks or later")
    assert outcomes(shown) == {
        "before": {"PASSED"},
        "breaks_it": {"PASSED", "ERROR", "FAILED"},  # "worker crashed" is a failure
        "fails_and_breaks_it": {"FAILED", "ERROR"},
        "later": {"PASSED"},
    }
    assert len(re.findall(f"^E +{GONE}", shown, re.M)) == 2
    assert shown.count("replacing crashed worker") == 2
    assert lines(tmp_path) == {
        "before": "passed",
        "breaks_it": "error",
        "fails_and_breaks_it": "failed",
        "later": "passed",
    }


def test_without_other_processes_the_run_ends(run: Callable[..., tuple[int, str]]) -> None:
    status, shown = run("-n0", "--cuda")
    assert status == 1
    assert outcomes(shown) == {"before": {"PASSED"}, "breaks_it": {"PASSED", "ERROR"}}
    assert re.search("Exit: .*test_breaks_it has broken the CUDA context of this process", shown)


def test_a_process_that_hangs_is_replaced(
    run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    _, shown = run("-n1", "--cuda", "--limit=1", "-k", "before or hangs or later")
    assert outcomes(shown) == {
        "before": {"PASSED"},
        "hangs": {"FAILED"},
        "fails_and_hangs": {"FAILED"},
        "later": {"PASSED"},
    }
    assert shown.count("Timeout (0:00:01)!") == 2
    assert "in test_hangs" in shown and "in slow_to_end" in shown  # where it was
    assert lines(tmp_path) == {
        "before": "passed",
        "hangs": "failed",
        "fails_and_hangs": "failed",
        "later": "passed",
    }


def test_tests_begin_in_their_order(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    """A run that is cut has done the first ones, however many processes there are."""
    (tmp_path / "test_some.py").write_text(IN_ORDER)
    run("-n2", "--cuda")
    begun = list(map(int, (tmp_path / "begun").read_text().split()))
    assert len(begun) == 240
    assert all(abs(place - number) <= 60 for place, number in enumerate(begun))


def test_what_only_a_gpu_shows_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = ["device"], ["tmp_path"], ["cuda", "device"], ["on_this_machine"], ["device", "gpu"]
    items = [mock.Mock(fixturenames=names) for names in taken]
    config, dropped = mock.Mock(), []
    config.option.fake_cuda = None
    config.hook.pytest_deselected = lambda items: dropped.extend(items)
    monkeypatch.setattr(every_test, "HAS_GPU", True)
    every_test.pytest_collection_modifyitems(config, items)
    assert [taken.index(item.fixturenames) for item in items] == [4, 2, 0, 3]
    assert [item.fixturenames for item in dropped] == [["tmp_path"]]


def test_nothing_of_this_without_the_option(run: Callable[..., tuple[int, str]]) -> None:
    _, shown = run("-n0", "--limit=0.01", "-k", "before or test_breaks")
    assert outcomes(shown) == {"before": {"PASSED"}, "breaks_it": {"PASSED"}}
