"""The loops of rl.md: rewards rise, ratios begin at 1, a saved run goes on bit for bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_page import GRPO, MODEL, PPO, RECEIVER, SAMPLER, run
from torch import nn

import tritonamp

pytestmark = pytest.mark.tools


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the page after its first block, the model."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"torch": torch, "nn": nn, "tritonamp": tritonamp}
    run(MODEL, names)
    return names


@pytest.fixture
def grpo(model: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The names of the page after GRPO."""
    run(GRPO, model)
    yield model
    if model["amp"]._enabled:
        model["amp"].disable()


def test_grpo(grpo: dict[str, Any]) -> None:
    rewards, amp = grpo["rewards"], grpo["amp"]
    assert sum(rewards[-5:]) > 3 * sum(rewards[:5])
    ratios = torch.stack([found.worst_ratio for found in grpo["mismatches"]])
    assert ratios.log().abs().max() < 4e-3  # logits of up to 8, rounded to half
    assert amp.metrics()["amp/mismatch_worst_ratio"] in ratios[-2:].tolist()
    stats = amp.stats()
    assert stats["steps"] + stats["skipped"] == 2 * len(rewards)
    assert stats["skipped"] <= 2  # of the scale looking for its level
    assert {p.dtype for p in grpo["model"].layers.parameters()} == {torch.float16, torch.float32}

    went_on = [p.detach().clone() for p in grpo["model"].parameters()]
    values = {name: grpo[name] for name in ("model", "optimizer", "amp")}
    tritonamp.load("rl.pt", random=tritonamp.RNGState(), **values)
    for _ in range(20):
        grpo["iterate"]()
    assert all(map(torch.equal, went_on, grpo["model"].parameters()))
    assert rewards[-20:] == rewards[-40:-20]


def test_a_sampler_of_its_own_has_the_same_bits(grpo: dict[str, Any]) -> None:
    run(RECEIVER, grpo)
    run(SAMPLER, grpo)  # the block compares
    assert len(grpo["rewards"]) == 43


def test_a_policy_that_is_far_from_its_sampler_takes_no_step(grpo: dict[str, Any]) -> None:
    """The veto of the page, with a sampler whose log-probabilities are off by 1."""
    amp, draw = grpo["amp"], grpo["draw"]

    def draw_off(model: nn.Module) -> Any:
        words, answers, drawn, *others = draw(model)
        return words, answers, drawn - 1, *others

    grpo["draw"] = draw_off
    before, steps = [p.detach().clone() for p in grpo["model"].parameters()], amp.stats()["steps"]
    scale = amp.stats()["scale"]
    grpo["iterate"]()
    assert grpo["mismatches"][-1].k3.item() == pytest.approx(torch.e - 2, rel=1e-2)
    assert amp.stats()["vetoes"] == 2 and amp.stats()["last_skip_reason"] == "veto"
    assert (amp.stats()["steps"], amp.stats()["scale"]) == (steps, scale)
    assert all(map(torch.equal, before, grpo["model"].parameters()))

    grpo["draw"] = draw
    grpo["iterate"]()
    assert grpo["mismatches"][-1].worst_ratio.log().abs() < 4e-3  # the ratios start at 1 again
    assert amp.stats()["steps"] == steps + 2


def test_ppo(model: dict[str, Any]) -> None:
    run(PPO, model)
    scores, stats = model["scores"], model["ppo"].stats()
    assert sum(scores[-5:]) > 3 * sum(scores[:5])
    assert stats["steps"] + stats["skipped"] == 4 * len(scores) and stats["skipped"] <= 2


@pytest.mark.smoke
def test_advantages(model: dict[str, Any]) -> None:
    """GAE by its definition: sums of discounted surprises."""
    run(PPO, model, before="torch.manual_seed")
    gains, values, decay = torch.rand(3, 8), torch.rand(3, 8), 0.9
    following = torch.cat([values[:, 1:], torch.zeros(3, 1)], 1)
    surprises = gains + following - values
    powers = decay ** (torch.arange(8) - torch.arange(8)[:, None]).clamp(min=0).float()
    expected = (powers.triu()[None] * surprises[:, None]).sum(2)
    torch.testing.assert_close(model["advantages_of"](gains, values, decay), expected)
