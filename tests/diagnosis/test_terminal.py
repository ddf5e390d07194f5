"""Texts and tables fit the terminal, and lose no word."""

import pytest
import torch
from torch import nn

import tritonamp
from tritonamp.diagnosis.terminal import fitted, paragraph, table, width

TEXT = """\
step 1 skipped (1 of 1): forward fault: the loss itself was inf or NaN, and the batch was not.
1. body.0 (train.py:7), overflow: mul gives 9.6e+06, which is 147 times the largest float16
   -> forecast.policy, fp32_modules=('body.0',) (tried: the batch fits)
  code:    scores = self.q(x) @ self.k(x).mT * (self.width // self.heads) ** -0.5 + self.bias
  to do:   Let products have FP32 results: fp32_results=['attention'] (tried: the forward passes)
float16: 1 of 9 results overflow, and none of the values of the other results become zero"""
FITTED = """\
step 1 skipped (1 of 1): forward fault: the loss itself was
    inf or NaN, and the batch was not.
1. body.0 (train.py:7), overflow: mul gives 9.6e+06, which
   is 147 times the largest float16
   -> forecast.policy, fp32_modules=('body.0',) (tried: the
      batch fits)
  code:    scores = self.q(x) @ self.k(x).mT * (self.width // self.heads) ** -0.5 + self.bias
  to do:   Let products have FP32 results:
           fp32_results=['attention'] (tried: the forward
           passes)
float16: 1 of 9 results overflow, and none of the values of
    the other results become zero"""


def test_the_width_is_that_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert (width(), width(0)) == (80, 0)  # the tests have no terminal
    monkeypatch.setenv("COLUMNS", "60")
    assert (width(), width(0)) == (60, 60)
    monkeypatch.setenv("COLUMNS", "7")
    assert width() == 40


def test_lines_are_broken_at_blanks_and_indented_by_how_they_begin() -> None:
    assert fitted(TEXT, 60) == FITTED
    assert fitted(FITTED, 60) == FITTED
    assert fitted(TEXT, 0) == fitted(TEXT, 200) == TEXT


def test_a_word_longer_than_the_line_stays_whole() -> None:
    path = "/a/very/long/path/" * 4 + "train.py:7"
    assert fitted(f"at {path} it is", 60) == f"at\n    {path}\n    it is"


def test_a_paragraph_is_filled() -> None:
    assert paragraph("one two\nthree\nfour", 10) == "one two\nthree four"


def test_a_table_narrows_its_widest_columns() -> None:
    rows = [("Adam", "torch.optim and tritonamp.optim", "yes"), ("Lion", "tritonamp.optim", "no")]
    assert table(("optimizer", "from", "offload"), rows, 80) == (
        "optimizer  from                             offload\n"
        "---------------------------------------------------\n"
        "Adam       torch.optim and tritonamp.optim  yes\n"
        "Lion       tritonamp.optim                  no"
    )
    assert table(("optimizer", "from", "offload"), rows, 40) == (
        "optimizer  from                  offload\n"
        "----------------------------------------\n"
        "Adam       torch.optim and       yes\n"
        "           tritonamp.optim\n"
        "Lion       tritonamp.optim       no"
    )


def test_a_table_of_long_words_keeps_them() -> None:
    wide = "x" * 70
    assert table(("a", "b"), [(wide, "one two")], 60).splitlines()[2:] == [
        f"{wide}  one",
        " " * 72 + "two",
    ]


def test_explain_breaks_its_lines_in_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that reads the text, and every rank, has its sentences whole."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tritonamp.enable(model, optimizer, level="O2") as amp:
        amp.backward(model(torch.full((2, 4), 1e38)).square().mean())
        optimizer.step()
        text = amp.explain(replay=True)
        monkeypatch.setenv("COLUMNS", "60")
        broken = amp.explain(replay=True)
    assert max(map(len, text.splitlines())) > 120
    assert max(map(len, broken.splitlines())) <= 60
    assert broken.split() == text.split()
