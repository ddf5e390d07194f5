"""The loop of rl.md: the reward rises, ratios begin at 1, and a saved run goes on bit for bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_readme import blocks
from torch import nn

import tritonamp

pytest.importorskip("accelerate", reason="accelerate is not installed")  # of all tests here
pytestmark = pytest.mark.tools

PAGE = Path(tritonamp.__file__).parent / "integrations" / "rl.md"


BLOCKS = [block for block in blocks(PAGE) if not block.mark]


def run(block: Any, names: dict[str, Any]) -> None:
    exec(compile("\n" * (block.line - 1) + block.code, str(PAGE), "exec"), names)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names of the page, after its blocks have run, the last one (a sampler) excluded."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"torch": torch, "nn": nn, "tritonamp": tritonamp}
    for block in BLOCKS[:-1]:
        run(block, names)
    yield names
    if names["amp"]._enabled:
        names["amp"].disable()


def test_the_page_holds_what_it_says(page: dict[str, Any]) -> None:
    rewards, amp = page["rewards"], page["amp"]
    assert sum(rewards[-5:]) > 3 * sum(rewards[:5])
    assert max(page["distances"]) < 4e-3  # logits of up to 8, rounded to half
    stats = amp.stats()
    assert stats["steps"] + stats["skipped"] == 2 * len(rewards)
    assert stats["skipped"] <= 2  # of the scale looking for its level
    assert {p.dtype for p in page["model"].layers.parameters()} == {torch.float16, torch.float32}

    went_on = [p.detach().clone() for p in page["model"].parameters()]
    values = {name: page[name] for name in ("model", "optimizer", "amp")}
    tritonamp.load("rl.pt", random=tritonamp.RNGState(), **values)
    for _ in range(20):
        page["iterate"]()
    assert all(map(torch.equal, went_on, page["model"].parameters()))
    assert rewards[-20:] == rewards[-40:-20]


def test_a_sampler_of_its_own_has_the_same_bits(page: dict[str, Any]) -> None:
    assert "amp.changes(" in BLOCKS[-1].code
    run(BLOCKS[-1], page)  # the block compares
    assert len(page["rewards"]) == 43
