"""The picture of a history holds its numbers."""

import math
import sys
from pathlib import Path

import pytest
import torch
from helpers import Net, take_step

import tritonamp
from tritonamp.diagnosis.causes import Cause
from tritonamp.diagnosis.plot import picture
from tritonamp.diagnosis.records import StepRecord

HISTORY = [
    StepRecord(1, "scale overflow", 65536.0, None),
    StepRecord(2, None, 32768.0, 2.5),
    StepRecord(3, "data", 32768.0, None),
    StepRecord(4, "scale overflow", 32768.0, None),
    StepRecord(6, None, 16384.0, 0.5),  # of 5 nothing was read
]


def test_the_panels_hold_the_numbers() -> None:
    scale, norm, skips = picture(HISTORY).axes
    assert list(scale.lines[0].get_xdata()) == [1, 2, 3, 4, 6]
    assert list(scale.lines[0].get_ydata()) == [65536.0, 32768.0, 32768.0, 32768.0, 16384.0]
    drawn = dict(zip(norm.lines[0].get_xdata(), norm.lines[0].get_ydata(), strict=True))
    assert {step: y for step, y in drawn.items() if not math.isnan(y)} == {2: 2.5, 6: 0.5}
    found = {line.get_label(): list(line.get_xdata()) for line in skips.lines}
    assert found == {"data": [3], "scale overflow": [1, 4]}
    assert [label.get_text() for label in skips.get_yticklabels()] == [
        "data (1)",
        "scale overflow (2)",
    ]
    assert skips.get_ylabel() == "3 of 5 skipped"


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_has_a_row(cause: Cause) -> None:
    _, _, skips = picture([StepRecord(1, cause.value, 1.0, None)]).axes
    assert [line.get_label() for line in skips.lines] == [cause.value]


@pytest.mark.parametrize("norm", [0.0, math.inf])
def test_norms_that_no_logarithm_takes(norm: float, tmp_path: Path) -> None:
    picture([StepRecord(1, None, 1.0, norm)]).savefig(tmp_path / "history.png")


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.SVG", b"<?xml")])
def test_a_run_is_drawn(name: str, start: bytes, tmp_path: Path, device: torch.device) -> None:
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    amp = tritonamp.enable(model, optimizer, level="O2")
    with pytest.raises(RuntimeError, match=r"expected a step in amp\.history, got none"):
        amp.plot(tmp_path / name)
    for factor in (1.0, math.inf, 1.0):
        take_step(amp, optimizer, (model(torch.ones(2, 6, device=device)) * factor).sum())
    path = amp.plot(str(tmp_path / name))
    assert path == tmp_path / name
    assert path.read_bytes().startswith(start)
    with pytest.raises(ValueError, match=r"ends in \.png, \.svg .* got 'history'"):
        amp.plot("history")
    amp.disable()


def test_without_matplotlib_the_error_says_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "tritonamp\[demo\]"'):
        picture(HISTORY)
