"""What each command prints fits a narrow, a usual and a wide terminal, and uses the wide one."""

import contextlib
from pathlib import Path

import pytest
import torch

from tritonamp.__main__ import main

SCRIPT = """import torch


def train(model, loader, optimizer, scaler):
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def main(loader):
    scaler = torch.amp.GradScaler("cuda")
    model = torch.nn.Linear(2, 2).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    train(model, loader, optimizer, scaler)
"""
FACTORY = """from torch import nn, ones


class Squares(nn.Module):
    def forward(self, x):
        return x * x


def make():
    return nn.Sequential(nn.Linear(8, 8), Squares(), nn.LayerNorm(8)), (3e4 * ones(2, 8),)
"""
COMMANDS = {
    "doctor": ["doctor"],
    "selftest": ["doctor", "--selftest", "training"],
    "no selftest": ["doctor", "--selftest", "speed"],
    "check": ["check", "wide.py:make", "--policy", "policy.json"],
    "diff": ["check", "wide.py:make", "--diff"],
    "explain": ["explain", "expected scalar type Half but found Float"],
    "section": ["explain", "Loss is nan, stopping training"],
    "all sections": ["explain"],
    "not found": ["explain", "KeyError: 'weights.pt'"],
    "migrate": ["migrate", "train.py"],
    "no file": ["check", "nothing.py:make"],
    "no result": ["check", "wide.py:Squares"],
}
WHOLE = "code: ", "+ ", "- "  # lines of code, in reports and in the list of migrate


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tritonamp.kernels.device.INTERPRETED", False)
    monkeypatch.setattr("tritonamp.commands.selftest.training.STEPS", 2)
    monkeypatch.setattr("tritonamp.commands.selftest.training.LAST", 1)
    few = [("O0", torch.float16), ("O2", torch.bfloat16)]
    monkeypatch.setattr("tritonamp.commands.selftest.training.LEVELS", few)
    monkeypatch.setattr("tritonamp.commands.doctor.TRIALS", few)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    Path("wide.py").write_text(FACTORY)


def texts(printed: str) -> list[str]:
    """Return the printed lines without code."""
    found, is_code = [], False
    for line in printed.splitlines():
        if line.startswith("```"):
            is_code = not is_code
        elif not is_code and not line.strip().startswith(WHOLE):
            found.append(line)
    return found


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", COMMANDS)
def test_lines_fit(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    longest = {}
    for columns in (60, 80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        with contextlib.suppress(SystemExit):  # an error
            main(COMMANDS[name])
        lines = texts("".join(capsys.readouterr()))
        # a path that is longer than a line stands alone in it
        fitting = [line for line in lines if len(line) <= columns]
        assert [line for line in lines if line not in fitting and len(line.split()) > 1] == []
        longest[columns] = max(map(len, fitting))
    if longest[80] > 75:  # more than 80 columns are used where they are there
        assert longest[120] > 80
