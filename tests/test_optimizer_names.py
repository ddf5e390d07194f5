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
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("tritonamp", "kernels")
    for path in [ROOT / "README.md", *(ROOT / folder).rglob("*.*")]
    if path.suffix in (".md", ".py") and path.name != "optimizers.md"
)


def lists_in(text: str) -> list[str]:
    """Lists of three or more optimizers with a fused step."""
    name = rf"\[?`?(?:optim\.)?\b(?:{'|'.join(FUSED)})\b(?:'s)?`?(?:\]\([^)]*\))?"
    return re.findall(rf"{name}(?:(?:,\s+|\s+and\s+|\s+or\s+){name}){{2,}}", text)


def test_no_page_has_to_be_edited_for_another_optimizer() -> None:
    assert lists_in("Adam, AdamW, `SGD` and Lion") and lists_in(
        "Adam, optim.AdamW or [Muon](#muon)"
    )
    found = {page: lists_in((ROOT / page).read_text()) for page in PAGES}
    assert {page: lists for page, lists in found.items() if lists} == {}


def test_the_table_is_what_there_is() -> None:
    assert set(tritonamp.optim.__all__) == {name for name in FUSED if OPTIMIZERS[name].in_optim}
    param = nn.Parameter(torch.zeros(2, 2))
    for name, known in OPTIMIZERS.items():
        assert hasattr(torch.optim, name) is known.in_torch
        if name in FUSED:
            package = tritonamp.optim if known.in_optim else torch.optim
            rule = rule_of(getattr(package, name)([param], lr=0.1))
            assert rule is not None
            assert (rule.states, rule.offloads) == (known.states, known.in_parts)
            assert rule.states == STATES[: len(rule.states)]
        elif known.in_torch:
            assert rule_of(getattr(torch.optim, name)([param], lr=0.1)) is None


def test_no_page_has_to_be_edited_for_another_format_of_state() -> None:
    """Code asks the entry of a format what it needs, and never which format it is."""
    names = "|".join(STATES[1:])
    asked = re.compile(
        rf"""(?:[=!]=|\bin|\bcase) \W*["'](?:{names})["']|is (?:not )?torch\.uint8"""
    )
    assert asked.search('if state == "8bit"') and asked.search("x.dtype is not torch.uint8")
    sources = [page for page in PAGES if page.endswith(".py")]
    found = {page: asked.findall((ROOT / page).read_text()) for page in sources}
    assert {page: lines for page, lines in found.items() if lines} == {}


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
    small_state: "expected an optimizer whose step can keep such state, "
    f"{in_words(keeping('8bit'), 'or')}, got Adagrad, which can keep 'fp32'",
    offload: f"expected an optimizer that steps in parts, {in_words(IN_PARTS, 'or')} (torch's, or "
    "of tritonamp.optim), got Adagrad",
    unscale: "tritonamp.optim.AdamW (Adam, SGD, Lion) instead of this optimizer keeps them",
}


@pytest.mark.parametrize("refused", TEXTS, ids=lambda function: function.__name__)
def test_messages_name_them(refused: Callable[[], None]) -> None:
    with pytest.raises(ValueError, match=re.escape(TEXTS[refused])):
        refused()


def test_in_words() -> None:
    assert [in_words(["a", "b", "c"][:n]) for n in (1, 2, 3)] == ["a", "a and b", "a, b and c"]
    assert in_words(["a", "b"], "or") == "a or b"
