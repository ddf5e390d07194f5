"""Each story at reduced size: what it tells must be what happened."""

import importlib
import logging
import re

import pytest
import torch

from tritonamp.__main__ import main
from tritonamp.demo.sides import Setting, power_of_two
from tritonamp.demo.stories import STORIES, shown
from tritonamp.demo.too_large import BAD_BATCHES

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
    fp32, stock, explained, healed = story.rows.values()
    assert stock["skipped"] >= 35 and stock["accuracy"] < fp32["accuracy"] / 2
    assert stock["loss scale"] == 2.0 ** (16 - stock["skipped"])
    assert explained["skipped"] >= 35 and explained["loss scale"] >= 2.0**14
    assert healed["skipped"] <= 6 and healed["loss scale"] >= 2.0**12
    # 898 test images: three standard deviations of the difference of two such accuracies are below
    # 6 points
    assert fp32["accuracy"] > 75 and abs(healed["accuracy"] - fp32["accuracy"]) < 6
    report, cure = story.words[1:]
    # on a GPU no rule of ours stands above matmul: what it is made of is seen
    op = "matmul" if device.type == "cpu" else "bmm"
    assert f"attention, op {op}" in report and "scores = self.query(x)" in report
    assert "('attention',)" in cure


def test_bad_batches_wear_out_one_scale_only(told):
    stock, ours = told("bad-batches", 150).rows.values()
    assert stock["skipped"] == ours["skipped"] == BAD_BATCHES
    assert stock["loss scale"] == 2.0 ** (16 - BAD_BATCHES)
    assert ours["loss scale"] == 2.0**16
    assert ours["accuracy"] > stock["accuracy"] + 10


def test_bad_batches_say_which_sample(told):
    assert "sample(s) 63" in told("bad-batches", 3).words[1]


def test_updates_are_lost_without_masters(told):
    story = told("lost-updates", 60)
    before, stock, half, o3, o2 = story.rows.values()
    assert stock["weights not moved"] < 2
    assert half["weights not moved"] > 90 and o3["weights not moved"] > 90
    assert o2["accuracy"] == pytest.approx(stock["accuracy"], abs=0.5)
    assert stock["accuracy"] - before["accuracy"] > half["accuracy"] - before["accuracy"]
    counted_o3, counted_o2 = map(float, re.findall(r"\[([\d.]+)\]", story.words[-1]))
    assert counted_o3 > 0.9
    assert 0.5 < counted_o2 < counted_o3


def test_gradients_of_logits_vanish_before_the_scale(told):
    """Half rounds by up to 2**-11: an error below 0.05 %."""
    fp32, early, *torchs, stock, ours = told("logits", 1).rows.values()
    assert len(torchs) == hasattr(torch.nn.functional, "linear_cross_entropy")
    for row in (early, *torchs):
        assert 67 < row["zero gradients"] < 71 and 31 < row["error of gradients"] < 35
    assert fp32["zero gradients"] == stock["zero gradients"] == ours["zero gradients"] == 0
    assert fp32["error of gradients"] < 0.001
    assert 0.01 < ours["error of gradients"] < 0.05 and stock["error of gradients"] < 0.05


def test_gradients_vanish_without_a_scale(told):
    fp32, autocast, stock, unscaled, ours = told("vanishing", 60).rows.values()
    for without in (autocast, unscaled):
        assert without["zero gradients"] > 50
        assert without["error of the picture"] > 1.5 * fp32["error of the picture"]
    for scaled in (stock, ours):
        assert scaled["zero gradients"] == pytest.approx(fp32["zero gradients"], abs=1)
        assert scaled["error of the picture"] == pytest.approx(
            fp32["error of the picture"], rel=0.02
        )


def test_masked_loss_is_nan_in_half_only(told):
    story = told("masked", 20)
    stock, half, ours = story.rows.values()
    assert stock["NaN losses"] == half["NaN losses"] == half["skipped"] == 20
    # a scale of 2^16 is inf in half, and two batches have nothing hidden
    assert stock["skipped"] == 3
    assert half["loss scale"] == 2.0**16
    assert ours["NaN losses"] == 2
    assert ours["error on hidden pixels"] < 0.7 * stock["error on hidden pixels"]
    report = story.words[2]
    assert "op sum" in report and "return (loss * mask).sum() / mask.sum()" in report


@pytest.mark.parametrize("name", STORIES)
def test_one_step_can_be_told(name, told):
    text = shown(told(name, 1))
    assert len(text.splitlines()) > 8
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith(" "))


def test_sides_start_alike(told):
    """Before anything goes wrong both sides are in the same place: equal seeds, equal weights,
    equal batches.
    """
    stock, ours = told("bad-batches", 1).rows.values()
    assert stock["accuracy"] == pytest.approx(ours["accuracy"], abs=0.5)


@pytest.mark.parametrize(
    ("scale", "text"),
    [(65536.0, "2^16"), (2.0**-24, "2^-24"), (1.0, "1"), (0.0, "0"), (2.0**-149, "2^-149")],
)
def test_power_of_two(scale, text):
    assert power_of_two(scale) == text


@pytest.mark.smoke
def test_command_prints_the_story(capsys, caplog):
    caplog.set_level(logging.INFO, logger="tritonamp")
    threads = torch.get_num_threads()
    try:
        assert (
            main(["demo", "--story", "bad-batches", "--steps", "4", "--device", "cpu", "--quiet"])
            == 0
        )
    finally:
        torch.set_num_threads(threads)
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if " %  " in line]
    assert rows == ["torch.amp", "tritonamp"]
    assert not caplog.records  # the story tells of its skips itself
    assert logging.getLogger("tritonamp").level == logging.INFO


def test_list_has_every_story(capsys):
    assert main(["demo", "--story", "list"]) == 0
    printed = capsys.readouterr().out
    assert all(
        f"  {name} " in printed and story.__doc__ in printed for name, story in STORIES.items()
    )


def test_unknown_story_lists_those_there_are():
    with pytest.raises(
        SystemExit, match=r"--story atention: there is no such story(.|\n)*bad-batches"
    ):
        main(["demo", "--story", "atention"])


@pytest.mark.parametrize(
    "option",
    [["--level", "O2"], ["--dtype", "bfloat16"], ["--output", "curves.png"]],
    ids=lambda option: option[0],
)
def test_options_that_a_story_ignores_are_refused(option):
    with pytest.raises(SystemExit, match=f"drop {option[0]}"):
        main(["demo", "--story", "masked", *option])
