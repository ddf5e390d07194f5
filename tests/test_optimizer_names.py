"""Names of optimizers come from one table: messages are made from it, and pages agree with it."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import tritonamp
from tritonamp.kernels._optimizers import FUSED, IN_PARTS, OPTIMIZERS, in_words, keeping
from tritonamp.policy import STATES
from tritonamp.step.rules import rule_of

ROOT = Path(__file__).resolve().parents[1]
SMALL = keeping(*STATES)
SETS = {"fused": set(FUSED), "in parts": set(IN_PARTS), '"8bit"': set(SMALL)}
PAGES = {
    "README.md": ["fused"],
    "tritonamp/README.md": ["fused", "fused", "fused", "in parts", "in parts"],
    "tritonamp/checkpoint/README.md": ["in parts"],
    "tritonamp/diagnosis/README.md": ["fused"],
    "tritonamp/step/README.md": ['"8bit"'],
    "tritonamp/policy.py": ['"8bit"', "in parts"],
}


def lists_in(page: str) -> list[set[str]]:
    """The optimizers of each list of three or more names."""
    text = (ROOT / page).read_text()
    name = rf"\[?`?(?:optim\.)?\b(?:{'|'.join(FUSED)})\b(?:'s)?`?(?:\]\([^)]*\))?"
    found = re.findall(rf"{name}(?:(?:,\s+|\s+and\s+|\s+or\s+){name}){{2,}}", text)
    return [set(re.findall(rf"\b(?:{'|'.join(FUSED)})\b", each)) for each in found]


@pytest.mark.parametrize("page", PAGES)
def test_pages_list_the_optimizers_of_the_table(page: str) -> None:
    assert [x for x in lists_in(page) if len(x) > 1] == [SETS[kind] for kind in PAGES[page]]


def test_all_pages_are_compared() -> None:
    pages = {p.relative_to(ROOT) for p in (ROOT / "tritonamp").rglob("*.md")} | {Path("README.md")}
    assert {str(p) for p in pages if lists_in(str(p))} == {p for p in PAGES if p.endswith(".md")}


def test_the_table_is_what_there_is() -> None:
    assert set(tritonamp.optim.__all__) == set(FUSED)
    param = nn.Parameter(torch.zeros(2, 2))
    for name, known in OPTIMIZERS.items():
        assert hasattr(torch.optim, name) is known.in_torch
        if name in FUSED:
            optimizer = getattr(tritonamp.optim, name)([param], lr=0.1)
            rule = rule_of(optimizer)
            assert rule is not None
            assert (rule.states, rule.offloads) == (known.states, known.in_parts)
            assert rule.states == STATES[: len(rule.states)]
        elif known.in_torch:
            assert rule_of(getattr(torch.optim, name)([param], lr=0.1)) is None


def small_state() -> None:
    model = nn.Linear(2, 2)
    tritonamp.enable(model, torch.optim.Adagrad(model.parameters()), level="O2", state="8bit")


def offload() -> None:
    model = nn.Linear(2, 2)
    tritonamp.enable(model, torch.optim.Adagrad(model.parameters()), level="O2", offload="state")


def unscale() -> None:
    param = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    scaler = tritonamp.GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    scaler.unscale_(torch.optim.Adagrad([param]))


TEXTS: dict[Callable[[], None], str] = {
    small_state: "tritonamp.optim.Adam, AdamW and Lion, and torch's Adam and AdamW, keep "
    '"fp32", "bf16" and "8bit"; SGD "fp32" and "bf16"',
    offload: "expected an optimizer that steps in parts, Adam, AdamW, SGD or Lion (torch's, or of "
    "tritonamp.optim), got a Adagrad",
    unscale: "tritonamp.optim.AdamW (Adam, SGD, Lion) instead of this optimizer keeps them",
}


@pytest.mark.parametrize("refused", TEXTS, ids=lambda function: function.__name__)
def test_messages_name_them(refused: Callable[[], None]) -> None:
    with pytest.raises(ValueError, match=re.escape(TEXTS[refused])):
        refused()


def test_in_words() -> None:
    assert [in_words(["a", "b", "c"][:n]) for n in (1, 2, 3)] == ["a", "a and b", "a, b and c"]
    assert in_words(["a", "b"], "or") == "a or b"
