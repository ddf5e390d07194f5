"""Trials of remedies: which runs pass, and the words for those that only move a fault."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from runs import Training
from torch import Tensor, nn

import tritonamp
from tritonamp.commands.error_pages import find, sections
from tritonamp.diagnosis.replay.search import find_fault


class Block(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def training(function: Callable[[Tensor], Tensor], **fields: Any) -> Training:
    return Training(
        lambda: nn.Sequential(nn.Linear(6, 8), Block(function), nn.Linear(8, 3)), **fields
    )


def to_do(text: str) -> str:
    return text.rpartition("to do:")[2].partition("\n")[0].strip()


def two_logarithms(h: Tensor) -> Tensor:
    zeros = h * 0
    first = zeros.log()
    second = zeros.log()
    return first + second


def test_an_edit_that_moves_the_fault_names_the_next_one() -> None:
    with training(two_logarithms) as run:
        text = run.amp.explain(replay=run.loss)
    line = two_logarithms.__code__.co_firstlineno + 3
    assert to_do(text) == (
        "Clamp the argument: log(x.clamp(min=1e-06)) (tried: it helps here; domain error follows "
        f"in 1, op log at {__file__}:{line})."
    )
    assert "clamp the argument" not in text.partition("in vain:")[2]


def with_slope(slope: float) -> Callable[[Tensor], Tensor]:
    """Return a function whose gradient is ``slope`` times that of its value."""
    return lambda h: h.detach() + slope * (h - h.detach())


def test_a_scale_that_is_hardly_left_is_no_cure() -> None:
    """From 2^8 up a scale is a matter of time; below, remedies are tried, too."""
    for slope, tries in ((1.0, False), (2.0**12, True)):
        with training(with_slope(slope), scaler=tritonamp.GradScaler("cpu", 2.0**24)) as run:
            run.step()
            text = run.amp.explain(replay=run.loss)
            fault = find_fault(run.model, run.loss, scale=2.0**24)
        assert fault is not None and fault.kind == "scale_too_high"
        assert fault.fits is not None and (1.0 <= fault.fits < 2.0**8) is tries
        assert ("Or: " in to_do(text)) is tries, text


def masked(h: Tensor) -> Tensor:
    mask = torch.zeros(8, dtype=torch.bool)
    mask[0] = True
    return h.masked_fill(mask, float("-inf")).softmax(-1).log() * 1.0


def test_a_masked_probability_is_no_rounded_one() -> None:
    with training(masked, fuse_ops=False) as run:
        fault = find_fault(run.model, run.loss)
    assert fault is not None and fault.kind != "softmax_zero"


@pytest.mark.parametrize(
    ("bad", "said", "advice"),
    [
        ([1], "sample(s) 1 of", "Drop or repair samples 1 of dim 0"),
        ([0, 1, 2, 3], "all 4 sample(s) of", "Repair it before the model"),
    ],
)
def test_samples_are_named_unless_all_are_bad(bad: list[int], said: str, advice: str) -> None:
    with Training() as run:
        x = torch.randn(4, run.x.shape[1])
        x[bad, 0] = float("nan")
        run.step(x)
        text = run.amp.explain(replay=True)
    assert said in text
    assert to_do(text).startswith(advice)
    assert to_do(text).endswith("(tried: with zeros in their place the forward passes).")


def test_a_batch_that_stays_bad_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    with Training(on_nonfinite="explain") as run, caplog.at_level(logging.INFO, "tritonamp"):
        x = torch.full_like(run.x, float("inf"))
        for _ in range(5):
            run.step(x)
    first, *later = [text for text in caplog.messages if text.startswith("step ")]
    assert "inf or NaN in all" in first
    assert [text.partition(", as in ")[2][:6] for text in later] == ["step 1"] * 4


def test_an_exact_result_is_that_of_the_same_position() -> None:
    """The sign of a determinant has the shape of its logarithm, and is finite."""
    with Training(lambda: nn.Linear(6, 6)) as run:

        def loss() -> Tensor:
            output = run.model(run.x).float()
            return -torch.logdet((output.mT @ output) * 0)

        fault = find_fault(run.model, loss)
    assert fault is not None and fault.event.exact == float("inf")
    assert fault.kind == "unknown" and "slogdet" in fault.op


def test_where_nothing_helps_the_report_says_so() -> None:
    """A divisor of the difference of equal numbers: no edit of the division helps."""
    with training(lambda h: 1e3 * h / (h - h)) as run:
        text = run.amp.explain(replay=run.loss)
    assert to_do(text) == "No remedy that was tried helps: look where its inputs come from."
    in_vain = text.partition("in vain:")[2]
    assert "torch.where(d == 0, 0.001, d)" in in_vain and "fp32_modules=['1']" in in_vain
    assert "(Not tried" not in text


def test_a_line_of_the_log_opens_one_section() -> None:
    """All lines about a skip begin alike, with the words of the first section."""
    pages = sections()
    line = "step 17 skipped (3 of 17): forward fault: the loss itself was inf or NaN"
    assert [page.title.partition(":")[0] for page in find(line, pages)] == ["forward fault"]
    (first,) = find("step 17 skipped (3 of 17): something else", pages)
    assert first.title == "step 17 skipped (3 of 17): scale overflow"
