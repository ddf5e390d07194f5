"""The selftest in processes: checks that fail, hang, die or spoil the GPU.

Most of these processes are scripts that speak as ``worker.py`` does, and import no torch.
"""

import json
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from tritonamp.__main__ import main
from tritonamp.commands import selftest
from tritonamp.commands.selftest import check, worker
from tritonamp.commands.selftest.processes import Workers

WORKER = """
import json, os, sys, time
groups, part, count, first = sys.argv[1], *map(int, sys.argv[2:])
mine = PLAN[part::count]
for number, what in list(enumerate(mine))[first:]:
    where = {"group": groups, "name": what}
    print(json.dumps({"starts": number} | where), flush=True)
    if what.startswith("dies"):
        os.abort()
    if what.startswith("exits"):
        sys.exit("it has had enough")
    if what.startswith("hangs"):
        open(__file__ + ".hangs", "w").close()
        time.sleep(60)
    print("a line of a compiler's", flush=True)
    print(json.dumps(where | {"status": "ok", "detail": "", "seconds": 0.0}
        | ({"status": "FAILED", "spoiled": True} if what.startswith("spoils") else {})), flush=True)
    if what.startswith("spoils"):
        sys.exit(1)
    if what.startswith("is killed afterwards"):
        os.kill(os.getpid(), 9)
"""


@pytest.fixture
def workers(tmp_path: Path):
    """Runs these checks in so many processes; returns the outcomes by name."""

    def run(plan: list[str], count: int, limit: float = 30.0) -> dict[str, dict[str, Any]]:
        script = tmp_path / "worker.py"
        script.write_text(f"PLAN = {plan}\n{WORKER}")
        found: list[dict[str, Any]] = []
        Workers(found.append, [sys.executable, str(script)], limit).run(["kernel"], count)
        assert len(found) == len({outcome["name"] for outcome in found})
        return {outcome["name"]: outcome for outcome in found}

    return run


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("fatal", ["dies", "exits", "spoils", "hangs"])
def test_behind_a_fatal_check_a_new_process_goes_on(workers, fatal: str, count: int) -> None:
    plan = ["a", "b", fatal, "c", f"{fatal} again", "d"]
    found = workers(plan, count, 3.0 if fatal == "hangs" else 30.0)
    assert set(found) == set(plan)
    failed = {name for name, outcome in found.items() if outcome["status"] == "FAILED"}
    assert failed == {fatal, f"{fatal} again"}
    said = found[fatal]["detail"]
    assert (
        said
        == {
            "dies": f"its process ended with signal {signal.SIGABRT}: without a word",
            "exits": "its process ended with exit status 1: it has had enough",
            "spoils": "",
            "hangs": "no answer within 3 s",
        }[fatal]
    )


def test_processes_run_side_by_side(workers) -> None:
    began = time.monotonic()
    found = workers(["hangs 1", "hangs 2", "hangs 3"], 3, 2.0)
    assert time.monotonic() - began < 5.5
    assert all(outcome["status"] == "FAILED" for outcome in found.values())


def test_a_process_that_dies_between_two_checks_loses_none(workers) -> None:
    found = workers(["a", "is killed afterwards", "b", "c"], 1)
    assert list(found) == ["a", "is killed afterwards", "b", "c"]
    assert all(outcome["status"] == "ok" for outcome in found.values())


def test_a_process_that_cannot_start_is_a_failure(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    script = tmp_path / "worker.py"
    script.write_text("import no_such_module")
    Workers(found.append, [sys.executable, str(script)]).run(["kernel"], 2)
    assert [outcome["status"] for outcome in found] == ["FAILED"] * 2
    assert "ModuleNotFoundError: No module named 'no_such_module'" in found[0]["detail"]


def test_ctrl_c_leaves_what_is_known(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(f"PLAN = ['a', 'b', 'hangs', 'c']\n{WORKER}")
    program = (
        "import json, sys\nfrom tritonamp.commands.selftest.processes import Workers\n"
        "tell = lambda outcome: print(json.dumps(outcome), flush=True)\n"
        f"Workers(tell, [sys.executable, {str(script)!r}]).run(['kernel'], 1)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        known = [json.loads(process.stdout.readline()) for _ in range(2)]
        while not Path(f"{script}.hangs").exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        (cut,) = map(json.loads, process.stdout.read().splitlines())
        assert "KeyboardInterrupt" in process.stderr.read().decode()
    assert [outcome["name"] for outcome in known] == ["a", "b"]
    assert (cut["name"], cut["status"]) == ("hangs", "cut off")


# The worker


def checks_of(outcome: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the selftest be checks that record that they ran, and let the device fail after "b"."""

    def run(name: str) -> check.Found:
        outcome["ran"] = [*outcome.get("ran", []), name]
        return check.Found(name)

    def checks(device: torch.device, backend: str) -> list[check.Check]:
        return [check.Check(name, lambda name=name: run(name)) for name in "abcd"]

    monkeypatch.setitem(selftest.GROUPS, "kernel", checks)
    fault = "AcceleratorError: an illegal memory access"
    monkeypatch.setattr(
        check, "_fault_of", lambda device: fault if outcome["ran"][-1] == "b" else None
    )


def test_a_worker_ends_at_the_check_that_spoils_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    checks_of(seen, monkeypatch)
    out = StringIO()
    assert worker.run_part(["kernel"], 0, 1, 0, out) == 1
    starts, a, starts_b, b = map(json.loads, out.getvalue().splitlines())
    assert (starts["starts"], starts_b["starts"]) == (0, 1)
    assert (a["name"], a["status"], "spoiled" in a) == ("a", "ok", False)
    assert (b["name"], b["status"], b["spoiled"]) == ("b", "FAILED", True)
    assert b["detail"].startswith("AcceleratorError: an illegal memory access; the GPU's context")
    out = StringIO()
    assert worker.run_part(["kernel"], 0, 1, 2, out) == 0
    assert seen["ran"] == ["a", "b", "c", "d"]


def test_in_this_process_the_selftest_ends_there(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    checks_of(seen, monkeypatch)
    found = selftest.run(torch.device("cpu"), ["kernel"])
    assert seen["ran"] == ["a", "b"] and found["failed"] == 1


def test_a_wait_for_the_device_raises_what_a_kernel_has_done(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    outcome = check.outcome_of(check.Check("x", lambda: check.Found("fine")), cuda)
    assert outcome["status"] == "FAILED" and outcome["spoiled"]
    assert "illegal memory access" in outcome["detail"]


# All of it


@pytest.mark.long
def test_processes_find_what_one_process_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # as users have it: eager twins
    lines = tmp_path / "lines.jsonl"
    arguments = ["doctor", "--selftest", "training", "--json", "--jobs", "2"]
    assert main([*arguments, "--lines", str(lines)]) == 0
    found = json.loads(capsys.readouterr().out)["checks"]
    names = [check.name for check in selftest.GROUPS["training"](torch.device("cpu"), "eager")]
    assert [outcome["name"] for outcome in found] == names
    told = [json.loads(line) for line in lines.read_text().splitlines()]
    assert sorted(told, key=lambda outcome: names.index(outcome["name"])) == found


def test_lines_go_into_a_folder_that_was_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks_of({"ran": ["a"]}, monkeypatch)
    lines = tmp_path / "new" / "lines.jsonl"
    assert main(["doctor", "--selftest", "kernel", "--jobs", "0", "--lines", str(lines)]) == 1
    assert [json.loads(line)["name"] for line in lines.read_text().splitlines()] == ["a", "b"]


def test_outcomes_of_processes_are_shown_in_the_order_of_the_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks_of({"ran": ["a"]}, monkeypatch)

    def run(workers: Workers, groups: list[str], count: int) -> None:
        for name in "cadb":
            workers._report({"group": "kernel", "name": name, "status": "ok", "seconds": 0.0})

    monkeypatch.setattr(Workers, "run", run)
    found = selftest.run(torch.device("cpu"), ["kernel"], jobs=2)
    assert [outcome["name"] for outcome in found["checks"]] == ["a", "b", "c", "d"]


def test_there_are_no_more_processes_than_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    checks_of({"ran": ["a"]}, monkeypatch)
    started: list[int] = []
    monkeypatch.setattr(Workers, "run", lambda workers, groups, count: started.append(count))
    selftest.run(torch.device("cpu"), ["kernel", "speed"], jobs=100)
    assert started == [4, 1]


def test_a_file_that_cannot_be_written_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--selftest", "--lines", str(tmp_path)])
    assert "cannot be written" in capsys.readouterr().err


def test_fewer_than_no_processes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--selftest", "--jobs", "-1"])
    assert "expected --jobs of at least 0, got -1" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--jobs", "2"], ["--jobs", "0"], ["--lines", "x"]])
def test_options_of_the_selftest_need_it(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["doctor", *option])
    assert raised.value.code == 2
    assert f"expected --selftest with {option[0]}" in capsys.readouterr().err
