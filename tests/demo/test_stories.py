"""Each story at reduced size: what it tells must be what happened."""

import importlib
import logging
import math
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

from tritonamp import demo
from tritonamp.__main__ import main
from tritonamp.demo import picture, stories
from tritonamp.demo.measured import Run, Setting, Task
from tritonamp.demo.stories import BAD_BATCHES, STORIES, power, shown

pytestmark = pytest.mark.demo


@pytest.fixture(autouse=True)
def _quiet(caplog):
    importlib.import_module("sklearn.datasets")  # takes a second, which is no test's
    caplog.set_level(logging.ERROR, logger="tritonamp")


@pytest.fixture
def told(device):
    """(name, steps) -> the story."""
    return lambda name, steps: STORIES[name](Setting(device, seed=0, steps=steps))


def test_attention_is_named_and_healed(told, device):
    story = told("attention", 40)
    fp32, stock, explained, healed = story.runs.values()
    assert fp32.stats["skipped"] == 0
    assert stock.skips == explained.skips and 10 <= len(stock.skips) < 20
    assert [step for step, loss in enumerate(stock.losses, 1) if not math.isfinite(loss)] == (
        stock.skips
    )
    assert stock.stats["scale"] == stock.scales[-1][1] == 2.0 ** (16 - len(stock.skips))
    assert explained.stats["scale"] == explained.scales[-1][1] == 2.0**16
    assert healed.skips == stock.skips[:2] and healed.stats["scale"] == 2.0**16
    assert all(len(run.losses) == 40 for run in story.runs.values())
    # 898 test images: three standard deviations of the difference of two such accuracies are below
    # 6 points
    assert fp32.score > 75 and abs(healed.score - fp32.score) < 6
    report, cure = story.words[1:]
    # on a GPU no rule of ours stands above matmul: what it is made of is seen
    op = "matmul" if device.type == "cpu" else "bmm"
    assert f"attention, op {op}" in report and "scores = q @ k.mT" in report
    assert "('attention',)" in cure
    assert f"attention, op {op} at models.py:" in story.cause and "\n" not in story.cause


def test_the_operation_is_found_in_a_narrow_terminal(told, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    story = told("attention", 3)
    assert "attention, op" in story.cause and " at models.py:" in story.cause
    assert "\n" not in story.cause and len(story.cause) < 80
    assert stories._operation("No step was\nskipped.") == "No step was skipped."


@pytest.fixture
def drawable():
    """(losses, scales, skips) -> a run."""

    def run(losses, scales, skips):
        task = Task("digits", "digits", nn.Identity, None, 1, 1.0, 1)
        stats = {"skipped": len(skips), "scale": scales[-1][1]}
        return Run(task, "torch.amp", 12.5, losses, scales, skips, stats)

    return run


def test_a_loss_without_finite_values_is_marked(drawable):
    run = drawable([math.nan, math.inf, 2.0, 4.0], [(0, 1.0)], [1, 2])
    axes = Figure().subplots()
    picture._draw_loss(axes, run, color="black")
    curve, marks = axes.lines
    assert list(curve.get_ydata())[2:] == [2.0, 3.0]
    assert list(marks.get_xdata()) == [1, 2] and marks.get_transform() == (
        axes.get_xaxis_transform()
    )
    assert [text.get_text() for text in axes.texts] == [" inf or NaN"]


@pytest.mark.parametrize("losses", [[], [math.nan] * 3, [1.0, math.inf, 0.5]])
def test_any_run_can_be_drawn(losses, drawable, tmp_path):
    """A loss scale of 0, too."""
    run = drawable(losses, [(0, 2.0**16), (3, 0.0)], [2])
    path = tmp_path / "story.png"
    picture.save_picture("a fault", {"FP32": run, "torch.amp": run}, "a cause", path)
    with Image.open(path) as image:
        assert image.format == "PNG"


def test_the_committed_picture_is_that_of_the_command(tmp_path):
    """README shows it. Its size is that of a new one; its curves take a whole story."""
    committed = Path(demo.__file__).with_name("attention.png")
    assert committed.stat().st_size < 60_000
    page = committed.with_name("README.md").read_text()
    assert (
        "python -m tritonamp demo --story attention --output tritonamp/demo/attention.png" in page
    )
    assert "(attention.png)" in page
    options = ["--story", "attention", "--steps", "3", "--device", "cpu"]
    threads = torch.get_num_threads()
    try:
        assert main(["demo", *options, "--output", str(tmp_path / "new.png")]) == 0
    finally:
        torch.set_num_threads(threads)
    with Image.open(committed) as old, Image.open(tmp_path / "new.png") as new:
        assert old.size == new.size and old.width == 800
        assert new.convert("RGB").getpixel((0, 0)) == (255, 255, 255)


def test_bad_batches_wear_out_one_scale_only(told):
    stock, ours = told("bad-batches", 150).runs.values()
    assert stock.stats["skipped"] == ours.stats["skipped"] == BAD_BATCHES
    assert stock.stats["scale"] == 2.0 ** (16 - BAD_BATCHES)
    assert ours.stats["scale"] == 2.0**16
    assert ours.score > stock.score + 10


def test_bad_batches_say_which_sample(told):
    assert "sample(s) 63" in told("bad-batches", 3).words[1]


@pytest.mark.parametrize("name", STORIES)
def test_one_step_can_be_told(name, told):
    text = shown(told(name, 1))
    assert len(text.splitlines()) > 8
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith(" "))


def test_sides_start_alike(told):
    """Before anything goes wrong both sides are in the same place: equal seeds, equal weights,
    equal batches.
    """
    stock, ours = told("bad-batches", 1).runs.values()
    assert stock.score == pytest.approx(ours.score, abs=0.5)


@pytest.mark.parametrize(
    ("scale", "text"),
    [(65536.0, "2^16"), (2.0**-24, "2^-24"), (1.0, "1"), (0.0, "0"), (2.0**-149, "2^-149")],
)
def test_power_of_two(scale, text):
    assert power(scale) == text


@pytest.mark.smoke
def test_command_prints_the_story(capsys, caplog, tmp_path):
    caplog.set_level(logging.INFO, logger="tritonamp")
    threads = torch.get_num_threads()
    try:
        options = ["--story", "bad-batches", "--steps", "4", "--device", "cpu"]
        assert main(["demo", *options, "--output", str(tmp_path / "story.png")]) == 0
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert f"wrote {tmp_path / 'story.png'} (" in " ".join(printed.split())
    assert (tmp_path / "story.png").exists()
    rows = [line.split()[0] for line in printed.splitlines() if " %  " in line]
    assert rows == ["torch.amp", "tritonamp"]
    assert not caplog.records  # the story tells of its skips itself
    assert logging.getLogger("tritonamp").level == logging.INFO  # as before


def test_the_command_offers_every_story(capsys):
    assert tuple(STORIES) == demo.STORIES
    with pytest.raises(SystemExit):
        main(["demo", "--story", "atention"])
    assert "invalid choice: 'atention'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [["--level", "O2"], ["--dtype", "bfloat16"]],
    ids=lambda option: option[0],
)
def test_options_that_a_story_ignores_are_refused(option):
    with pytest.raises(SystemExit, match=f"drop {option[0]}"):
        main(["demo", "--story", "bad-batches", *option])
