"""How far a command is: one line in a terminal, and nothing elsewhere."""

import io
import logging
import os
import struct
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tritonamp
from tritonamp.commands import progress
from tritonamp.commands.progress import Checks, Line, runs_shown, wrote


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    found = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=found, stdout=found))
    monkeypatch.setenv("COLUMNS", "60")
    return found


def test_a_text_replaces_the_one_before(terminal: Terminal) -> None:
    line = Line()
    line.show("a longer text")
    line.show("short")
    line.say("what stays")
    line.show("x" * 70)
    line.show("")
    assert terminal.getvalue() == (
        f"\ra longer text\rshort        \r     \rwhat stays\n\r{'x' * 59}\r{' ' * 59}\r"
    )


def test_a_line_fits_the_terminal_of_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl, pty, termios = map(pytest.importorskip, ("fcntl", "pty", "termios"))
    ours, theirs = pty.openpty()
    monkeypatch.delenv("COLUMNS", raising=False)
    with os.fdopen(theirs, "w") as stderr, os.fdopen(ours, "rb") as shown:
        fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
        monkeypatch.setattr(progress.sys, "stderr", stderr)
        Line().show("x" * 70)
        assert shown.read1() == b"\r" + b"x" * 39


def test_elsewhere_only_what_stays_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    line = Line()
    line.show("how far it is")
    line.say("how long it takes")
    assert capsys.readouterr().err == "how long it takes\n"


def checked() -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tritonamp.check(model, optimizer, (torch.ones(2, 8),), compare="O0")


def test_each_run_of_a_check_is_shown(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LONG", 0.0)
    with runs_shown(compares=True):
        checked()
    shown = terminal.getvalue()
    said = (
        "check: the first run took 0.",
        " and all of it takes about ",
        " that have to be tried add",
    )
    assert all(text in " ".join(shown.split()) for text in said)
    assert "\rcheck: run 1: the dry run, in FP32" in shown
    assert "in float16 (O2), 0." in shown and "steps under the policy, 0." in shown
    assert shown.endswith("\r")


def test_logs_are_as_before(caplog: pytest.LogCaptureFixture) -> None:
    """No backend of a copy, and no run of a check whose progress is shown."""
    logger = logging.getLogger("tritonamp.check")
    before = logger.level, logger.propagate, list(logger.handlers)
    with caplog.at_level(logging.INFO, "tritonamp"), runs_shown(compares=False):
        checked()
    assert not caplog.records
    assert before == (logger.level, logger.propagate, logger.handlers)
    with caplog.at_level(logging.INFO, "tritonamp"):
        model = nn.Linear(8, 4)
        tritonamp.enable(model, None).disable()
    assert [record.msg for record in caplog.records] == ["backend %s for %s: %s"]


def test_checks_are_counted(terminal: Terminal) -> None:
    checks = Checks("triton")
    checks.expect(2)
    checks.tell("kernel cast")
    assert "selftest: 2 checks, meant to take a minute on a GPU" in terminal.getvalue()
    assert terminal.getvalue().endswith("s left: kernel cast")
    assert "\rselftest: 1 of 2, about 0.0 s left: " in terminal.getvalue()
    checks.end()
    assert terminal.getvalue().endswith(" \r")


def test_a_written_file_has_its_size_and_its_time(tmp_path: Path) -> None:
    path = tmp_path / "range.png"
    path.write_bytes(os.urandom(2048))
    now = time.perf_counter()
    assert " ".join(wrote(path, now).split()) == f"wrote {path} (2 KiB)"
    assert " ".join(wrote(path, now - 1.5).split()) == f"wrote {path} (2 KiB, 1.5 s)"
