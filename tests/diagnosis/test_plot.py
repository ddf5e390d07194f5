"""The picture of a history holds its numbers."""

import dataclasses
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Net, take_step

import tritonamp
from tritonamp.diagnosis.causes import Cause
from tritonamp.diagnosis.plot import picture, title
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


def marks(axes: Any) -> dict[str, list[int]]:
    """Return the steps of the marks at the edges of a panel, by marker and edge."""
    edges = [line for line in axes.lines if line.get_marker() in tuple("^xv")]
    return {line.get_marker(): list(line.get_xdata()) for line in edges}


def test_losses_that_are_known_have_a_panel() -> None:
    history = [
        StepRecord(1, None, 2.0, 1.0, loss=3.0),
        StepRecord(2, "forward fault", 2.0, None),  # its loss was inf or NaN
        StepRecord(3, "scale overflow", 2.0, None, loss=2.0),
        StepRecord(4, None, 1.0, 1.0),  # of this one the loss is not known
    ]
    loss, scale, norm, _ = picture(history).axes
    drawn = list(loss.lines[0].get_ydata())
    assert (drawn[0], drawn[2]) == (3.0, 2.0) and math.isnan(drawn[1]) and math.isnan(drawn[3])
    assert marks(loss) == {"x": [2]}
    assert loss.get_title(loc="left") == "\N{MULTIPLICATION SIGN} inf or NaN"
    assert marks(scale) == marks(norm) == {}
    assert len(picture([StepRecord(2, "data", 2.0, None)]).axes) == 3


def test_a_few_losses_of_another_size_have_a_logarithmic_axis() -> None:
    for losses, scale in (((1.0, 0.001), "log"), ((1.0, 0.5), "linear"), ((1.0, -9.0), "linear")):
        history = [StepRecord(n, None, 1.0, 1.0, loss=loss) for n, loss in enumerate(losses, 1)]
        assert picture(history).axes[0].get_yscale() == scale


def test_norms_off_the_axis_are_marked_in_words() -> None:
    norms = (1.0, math.inf, math.nan, 0.0)
    _, norm, _ = picture([StepRecord(n, None, 1.0, value) for n, value in enumerate(norms)]).axes
    assert marks(norm) == {"^": [1], "x": [2], "v": [3]}
    words = [word.split()[1] for word in norm.get_title(loc="left").split("   ")]
    assert words == ["inf", "NaN", "0"]


def test_rows_of_skips_name_the_module() -> None:
    deep = "encoder.layers.11.attention.self.query.weight"
    history = [
        StepRecord(1, "scale overflow", 2.0, None, ("first.weight", "blocks.1.head.weight")),
        StepRecord(2, "backward fault", 1.0, None, (deep,)),
    ]
    *_, skips = picture(history).axes
    first, second = [label.get_text() for label in skips.get_yticklabels()]
    assert first == "scale overflow (1)\nin blocks.1.head"
    assert second == "backward fault (1)\nin ...s.11.attention.self.query"


def test_titles() -> None:
    assert title([Net(), torch.nn.ReLU()], tritonamp.O2) == "Net + ReLU: O2, float16"
    half = dataclasses.replace(tritonamp.O1, dtype=torch.bfloat16, fp32_modules=("head",))
    assert title([torch.compile(Net())], half) == "Net: O1, bfloat16"
    assert title([Net()], tritonamp.O0) == "Net: O0, float32"
    of_none = dataclasses.replace(tritonamp.O3, op_policy=True)
    assert title([Net()], of_none) == "Net: float16"


def test_the_title_is_that_of_the_run(tmp_path: Path) -> None:
    """Losses with scales of their own take turns: a line between their points would hide them."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with tritonamp.enable(model, optimizer, level="O2") as amp:
        for loss_id in (0, 1):
            amp.backward(model(torch.ones(2, 6)).sum(), loss_id=loss_id)
            optimizer.step()
            optimizer.zero_grad()
        text = amp.plot(tmp_path / "run.svg").read_text()
    assert "<!-- Net: O2, float16, steps 1 to 2 -->" in text and "<!-- loss -->" in text
    history = [StepRecord(n, None, 1.0, 1.0, loss=1.0) for n in (1, 2)]
    for in_turn, style in ((True, "None"), (False, "-")):
        *curves, _ = picture(history, in_turn=in_turn).axes
        assert {panel.lines[0].get_linestyle() for panel in curves} == {style}


def test_no_text_lies_on_another_or_outside() -> None:
    """Each cause once, deep names, a long class name: texts stay within the picture, apart."""
    name = "a.very.deep.name.of.a.module.within.modules.weight"
    history = [StepRecord(n, c.value, 2.0**-n, None, (name,)) for n, c in enumerate(Cause)]
    figure = picture([*history, StepRecord(30, None, 1.0, math.inf, loss=1.0)], (), 9 * "LongName ")
    figure.draw_without_rendering()
    texts = [*figure.texts, *figure.axes[-1].get_yticklabels(), figure._suptitle]
    boxes = [text.get_window_extent() for text in texts]
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
    rows = boxes[-1 - len(Cause) : -1]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(rows, 2))


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
    with pytest.raises(ImportError, match=r'pip install matplotlib, or .* "tritonamp\[demo\]"'):
        picture(HISTORY)
