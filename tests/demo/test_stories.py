"""Each story at reduced size: what it tells must be what happened."""

import importlib
import logging

import pytest
import torch

from tritonamp import demo
from tritonamp.__main__ import main
from tritonamp.demo.measured import Setting
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
    assert stock.stats["skipped"] >= 35 and stock.score < fp32.score / 2
    assert stock.stats["scale"] == 2.0 ** (16 - stock.stats["skipped"])
    assert explained.stats["skipped"] >= 35 and explained.stats["scale"] >= 2.0**14
    assert healed.stats["skipped"] <= 6 and healed.stats["scale"] >= 2.0**12
    assert all(len(run.losses) == 40 for run in story.runs.values())
    # 898 test images: three standard deviations of the difference of two such accuracies are below
    # 6 points
    assert fp32.score > 75 and abs(healed.score - fp32.score) < 6
    report, cure = story.words[1:]
    # on a GPU no rule of ours stands above matmul: what it is made of is seen
    op = "matmul" if device.type == "cpu" else "bmm"
    assert f"attention, op {op}" in report and "scores = q @ k.mT" in report
    assert "('attention',)" in cure


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
def test_command_prints_the_story(capsys, caplog):
    caplog.set_level(logging.INFO, logger="tritonamp")
    threads = torch.get_num_threads()
    try:
        assert main(["demo", "--story", "bad-batches", "--steps", "4", "--device", "cpu"]) == 0
    finally:
        torch.set_num_threads(threads)
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if " %  " in line]
    assert rows == ["torch.amp", "tritonamp"]
    assert not caplog.records  # the story tells of its skips itself


def test_the_command_offers_every_story(capsys):
    assert tuple(STORIES) == demo.STORIES
    with pytest.raises(SystemExit):
        main(["demo", "--story", "atention"])
    assert "invalid choice: 'atention'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [["--level", "O2"], ["--dtype", "bfloat16"], ["--output", "curves.png"]],
    ids=lambda option: option[0],
)
def test_options_that_a_story_ignores_are_refused(option):
    with pytest.raises(SystemExit, match=f"drop {option[0]}"):
        main(["demo", "--story", "bad-batches", *option])
