"""The log of numbers that a device might have noted, read one by one or with gaps."""

import logging
import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tritonamp.diagnosis import log
from tritonamp.diagnosis.clipping import ClippedGradients
from tritonamp.diagnosis.log import StepLog
from tritonamp.diagnosis.metrics import metrics
from tritonamp.diagnosis.observer import StepObserver
from tritonamp.diagnosis.scaled_gradients import ScaledGradients
from tritonamp.diagnosis.skips import Writer
from tritonamp.diagnosis.unseen_writes import UnseenWrites
from tritonamp.kernels._decision import (
    AMAX,
    CLEAN,
    COUNTS,
    FAULT,
    NORM,
    OVERFLOW,
    RECORD,
    SCALE,
    SKIPPED,
    SKIPPED_SCALE,
    VETO,
)
from tritonamp.kernels._loss_scale import ScaleRule
from tritonamp.step.decision_log import DecisionLog
from tritonamp.step.outcome import Outcome

RULE = ScaleRule(2.0, 0.5, 2000, 1, 2.0**-24, 2.0**24)


class Names(NamedTuple):
    """Names in a model, for a log."""

    parameters: Callable[[], Mapping[Tensor, str]]
    tensors: Callable[[], Mapping[Tensor, str]] = dict
    writers: Callable[[], Mapping[str, Writer]] = dict


def unclipped() -> ClippedGradients:
    return ClippedGradients(dict, ScaledGradients(list, list, list))


class Noted:
    """A log of one parameter, and the decisions that the device notes for it."""

    def __init__(
        self, log_skips: bool = False, tensors: Mapping[Tensor, str] | None = None
    ) -> None:
        self.param = nn.Parameter(torch.ones(1))
        names = Names(lambda: {self.param: "p"}, lambda: tensors or {})
        self.decisions = DecisionLog(names.parameters)
        self.log = StepLog(self.decisions, names, torch.float16, log_skips)
        self.decisions.observer = StepObserver(self.log, UnseenWrites(dict), unclipped())
        self.params = [[self.param]]
        place = self.decisions.device_record.place
        self.numbers = place(self.params, torch.device("cpu"), ()).numbers

    def decide(
        self,
        *outcomes: int,
        rule: ScaleRule = RULE,
        amax: float = math.inf,
        scale: float = 1024.0,
        read: bool = True,
    ) -> None:
        """Note decisions; with ``read`` the log reads after the last one."""
        for outcome in outcomes:
            self.numbers[outcome] += 1
            self.numbers[SCALE] = scale
            if outcome == CLEAN:
                self.numbers[NORM], self.numbers[AMAX] = 3.0, 2.0
            else:
                self.numbers[SKIPPED], self.numbers[SKIPPED_SCALE] = outcome, scale
                self.numbers[RECORD] = amax
        if read:
            self.decisions.note(Outcome(rule), looked=True)
            self.log.collect(wait=True)

    @property
    def last(self) -> str:
        found = self.log.explanation()
        return "" if found is None else found.text


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        re.split("[:)]", r.message)[0] + ")" for r in caplog.records if r.levelname == "WARNING"
    ]


def test_faults_are_said_at_powers_of_two_and_a_long_run_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    noted = Noted(log_skips=True)
    with caplog.at_level(logging.INFO, "tritonamp"):
        for _ in range(17):
            noted.decide(FAULT)
    assert warned(caplog) == [
        "step 1 skipped (1 of 1)",
        "step 2 skipped (2 of 2)",
        "step 4 skipped (4 of 4)",
        "step 8 skipped (8 of 8, the last 8 in a row)",
        "step 16 skipped (16 of 16)",
    ]
    assert len(caplog.records) == 17
    first, *others = caplog.messages
    assert "the loss itself was inf" in first and "amp.explain(replay=" in first
    assert others[0] == "step 2 skipped (2 of 2): forward fault, as in step 1 (loss scale 1024)"
    assert all("forward fault, as in step 1 (loss scale 1024)" in text for text in others)


def test_overflows_are_said_where_eight_come_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    noted = Noted(log_skips=True)
    with caplog.at_level(logging.INFO, "tritonamp"):
        for outcomes in ([OVERFLOW] * 7, [CLEAN], [OVERFLOW] * 9, [CLEAN], [OVERFLOW] * 8):
            for outcome in outcomes:
                noted.decide(outcome)
    assert warned(caplog) == [
        "step 1 skipped (1 of 1)",  # and no other that the scale needs
        "step 16 skipped (15 of 16, the last 8 in a row)",
        "step 26 skipped (24 of 26, the last 8 in a row)",
    ]


def test_a_row_ends_with_a_step_or_another_skip(caplog: pytest.LogCaptureFixture) -> None:
    noted = Noted(log_skips=True)
    with caplog.at_level(logging.INFO, "tritonamp"):
        for outcome in (OVERFLOW, OVERFLOW, CLEAN, OVERFLOW, FAULT, OVERFLOW, OVERFLOW, OVERFLOW):
            noted.decide(outcome)
    assert "overflow 3 in a row, at loss scale 1024." in caplog.messages[-1]
    assert not any("in a row" in text for text in caplog.messages[:-1])
    noted.log.history.load(noted.log.history.counts)
    noted.decide(OVERFLOW)
    assert "single skips of this kind" in noted.last


def test_a_text_comes_once_while_it_repeats(caplog: pytest.LogCaptureFixture) -> None:
    noted = Noted(log_skips=True)
    with caplog.at_level(logging.INFO, "tritonamp"):
        for _ in range(9):
            noted.decide(OVERFLOW)
    assert [("as in step" in text) for text in caplog.messages] == [
        *(False, True, False, True, True, True, True),  # the third says that it is one of many
        *(False, True),  # a WARNING does not refer to an INFO
    ]
    assert (
        caplog.messages[3]
        == "step 4 skipped (4 of 4): scale overflow, as in step 3 (loss scale 1024)"
    )
    assert "overflow 9 in a row" in noted.last
    noted.decide(CLEAN)
    with caplog.at_level(logging.INFO, "tritonamp"):
        noted.decide(OVERFLOW)
    assert "as in step" not in caplog.messages[-1]


def test_a_new_cause_is_a_warning_whatever_came_before(caplog: pytest.LogCaptureFixture) -> None:
    noted = Noted(log_skips=True)
    with caplog.at_level(logging.WARNING, "tritonamp"):
        for outcome in (OVERFLOW, OVERFLOW, FAULT):
            noted.decide(outcome)
    first, second = caplog.messages
    assert first.startswith("step 1 skipped (1 of 1): scale overflow: ")
    assert "forward fault: the loss itself" in second


@pytest.mark.parametrize(("tells_first", "of_rank"), [(True, 0), (True, 1), (False, 0)])
def test_the_first_skip_of_a_kind_is_shown(
    tells_first: bool,
    of_rank: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log, "rank", lambda: of_rank)
    noted = Noted(log_skips=True)
    noted.log.tells_first = tells_first
    with caplog.at_level(logging.INFO, "tritonamp"):
        for outcome in (OVERFLOW, CLEAN, VETO, CLEAN, OVERFLOW, CLEAN, VETO):
            noted.decide(outcome)
    ending = (
        " Later skips of this kind are INFO lines: logging.basicConfig(); "
        "logging.getLogger('tritonamp').setLevel('INFO') shows them, 'ERROR' hides all warnings."
    )
    shown = tells_first and of_rank == 0
    assert [text.endswith(ending) for text in caplog.messages] == [shown, shown, False, False]
    assert warned(caplog) == ["step 1 skipped (1 of 1)", "step 3 skipped (2 of 3)"] * shown
    normal = ["That is normal in the first steps." in text for text in caplog.messages]
    assert normal == [shown, False, False, False]


@pytest.mark.parametrize("gap", [(CLEAN, OVERFLOW), (OVERFLOW, OVERFLOW)], ids=str)
def test_a_run_with_a_gap_is_no_run(gap: tuple[int, ...], caplog: pytest.LogCaptureFixture) -> None:
    noted = Noted(log_skips=True)
    with caplog.at_level(logging.INFO, "tritonamp"):
        for outcomes in (*[(OVERFLOW,)] * 7, gap, *[(OVERFLOW,)] * 6):
            noted.decide(*outcomes)
        assert warned(caplog) == ["step 1 skipped (1 of 1)"]
        noted.decide(OVERFLOW)
    assert len(warned(caplog)) == 2


def test_a_state_that_is_loaded_ends_a_run(caplog: pytest.LogCaptureFixture) -> None:
    noted = Noted(log_skips=True)
    counts = {**dict.fromkeys(COUNTS, 0), "clean": 4, "scale_overflows": 2, "forward_faults": 1}
    with caplog.at_level(logging.INFO, "tritonamp"):
        for _ in range(7):
            noted.decide(OVERFLOW)
        noted.log.load_counts(counts, (5.0, 6.0))
        assert noted.decisions.counts() == counts and noted.decisions.last_good() == (5.0, 6.0)
        noted.decide(OVERFLOW)
    assert warned(caplog) == ["step 1 skipped (1 of 1)"]
    assert caplog.messages[-1].startswith("step 8 skipped (4 of 8): scale overflow: ")
    assert noted.log.history.records[-1].step == 8


def test_steps_and_skips_are_kept_one_by_one() -> None:
    noted = Noted()
    noted.decide(CLEAN, scale=4.0)
    noted.decide(OVERFLOW, scale=8.0)
    noted.decide(rule=RULE)  # nothing new, as where nothing was decided
    one, two = noted.log.history.records
    assert one == (1, None, 4.0, 3.0, (), "", None)
    assert two == (2, "scale overflow", 8.0, None, ("p",), noted.last, None)
    assert noted.log.last.skip.scale == 8.0
    assert noted.decisions.last_good() == (3.0, 2.0)
    assert noted.log.stats() == {
        "steps": 1,
        "skipped": 1,
        "scale_overflows": 1,
        "forward_faults": 0,
        "outliers": 0,
        "vetoes": 0,
        "huge_gradients": 0,
        "last_skip_reason": "scale overflow",
        "grad_norm": 3.0,
    }


@pytest.mark.parametrize(
    ("before", "unread", "begins"),
    [
        ([CLEAN], [CLEAN, OVERFLOW], "step <= 3 skipped (1 of 3): scale overflow"),
        ([CLEAN], [OVERFLOW], "step 2 skipped (1 of 2): scale overflow"),
        ([FAULT], [FAULT, CLEAN], "step <= 3 skipped (2 of 3): forward fault"),
        ([FAULT], [CLEAN], "step 1 skipped (1 of 1): forward fault"),
    ],
)
def test_what_a_replayed_graph_has_left(before: list[int], unread: list[int], begins: str) -> None:
    noted = Noted()
    noted.decide(*before)
    noted.decide(*unread, read=False)
    assert noted.last.startswith(begins)
    reason = begins.partition(": ")[2]
    assert noted.log.stats()["last_skip_reason"] == reason


def test_a_gap_with_clean_steps_in_it_is_told() -> None:
    noted = Noted()
    noted.decide(CLEAN, FAULT)
    assert noted.last.startswith("step <= 2 skipped (1 of 2): forward fault: ")
    noted.decide(FAULT, FAULT)
    assert noted.last.startswith("step 4 skipped (3 of 4): forward fault: ")


def test_before_any_decision_nothing_was_skipped() -> None:
    noted = Noted()
    assert noted.log.explanation() is None
    noted.decide(CLEAN)
    assert noted.log.explanation() is None
    assert noted.log.stats()["last_skip_reason"] is None


@pytest.mark.parametrize(
    ("rule", "scale", "text"),
    [
        (RULE, 1024.0, "The scale was lowered"),
        (RULE._replace(min_scale=1024.0), 1024.0, "The scale is at its minimum"),
        (RULE._replace(min_scale=1024.0, max_scale=1024.0), 1024.0, "The scale is fixed"),
        (RULE._replace(max_scale=1024.0), 1024.0, "The scale was lowered"),
    ],
)
def test_the_rule_of_the_scale_is_looked_at(rule: ScaleRule, scale: float, text: str) -> None:
    noted = Noted()
    noted.decide(OVERFLOW, rule=rule, scale=scale)
    assert text in noted.last


def test_the_magnitude_of_the_last_good_step_tells_a_nan() -> None:
    """Sudden where it was 2 at scale 8, not where it was 2 * 512."""
    noted = Noted()
    noted.decide(CLEAN)
    noted.numbers[NORM] = 1e6
    noted.decide(OVERFLOW, amax=math.nan, scale=8.0)
    assert noted.log.history.records[-1].cause == "backward fault"
    noted.numbers[AMAX] = 2.0 * 512
    noted.decide(OVERFLOW, amax=math.nan, scale=8.0)
    assert noted.log.history.records[-1].cause == "scale overflow"


def test_since_when_parameters_are_bad() -> None:
    weight = nn.Parameter(torch.tensor([math.nan]))
    noted = Noted(tensors={weight: "w"})
    noted.decide(CLEAN)
    for seen in ("at step 2", "since step 2", "since step 2"):
        noted.decide(FAULT)
        assert f"seen {seen}: w" in noted.last
    noted.decide(CLEAN)
    noted.decide(FAULT)
    assert "seen at step 6: w" in noted.last
    with torch.no_grad():
        weight.fill_(1.0)
    noted.decide(FAULT)
    with torch.no_grad():
        weight.fill_(math.nan)
    noted.decide(FAULT)
    assert "seen at step 8: w" in noted.last


def test_numbers_stay_where_they_are_until_the_ranks_are_others() -> None:
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    place = DecisionLog(lambda: {first: "first", second: "second"}).device_record.place
    cpu = torch.device("cpu")
    numbers = place([[first]], cpu, [4, 6]).numbers
    assert place([[first], [second]], cpu, [4, 6]).numbers is numbers
    numbers[RECORD:] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert place([[first]], cpu, [5, 7]).numbers[RECORD:].tolist() == [0.0, 0.0, 3.0, 4.0]


# For loggers


def test_metrics_are_empty_before_the_first_decision() -> None:
    assert metrics(Noted().log) == {}


def test_metrics_are_the_latest_numbers() -> None:
    noted = Noted()
    noted.decide(OVERFLOW, scale=2048.0)
    assert metrics(noted.log) == {
        "amp/scale": 2048.0,
        "amp/skipped": 1.0,
        "amp/skipped_scale_overflow": 1.0,
    }
    noted.decide(CLEAN)
    noted.decide(FAULT, scale=512.0)
    noted.decide(FAULT, scale=256.0)
    assert metrics(noted.log) == {
        "amp/scale": 256.0,
        "amp/skipped": 3.0,
        "amp/grad_norm": 3.0,
        "amp/skipped_scale_overflow": 1.0,
        "amp/skipped_forward_fault": 2.0,
    }
    assert {type(number) for number in metrics(noted.log).values()} == {float}


def test_metrics_count_skips_that_were_not_read_and_those_before_a_resume() -> None:
    noted = Noted()
    noted.log.load_counts({"clean": 5, "scale_overflows": 2, "forward_faults": 1}, (0.0, 0.0))
    noted.decide(OVERFLOW, OVERFLOW, CLEAN)
    found = metrics(noted.log)
    assert found["amp/skipped"] == 5.0
    assert found["amp/skipped_scale_overflow"] == 1.0  # its cause was looked for once


def test_metrics_take_what_has_arrived_and_leave_the_rest() -> None:
    noted, filled = Noted(), mock.Mock()
    noted.decide(CLEAN)
    noted.decide(CLEAN, scale=4096.0, read=False)
    noted.decisions.note(Outcome(RULE))
    started = noted.decisions.device_record._readback._started
    buffer, attached = started[0]
    started[0] = buffer._replace(filled=filled), attached
    filled.query.return_value = False
    assert metrics(noted.log)["amp/scale"] == 1024.0
    filled.query.return_value = True
    assert metrics(noted.log)["amp/scale"] == 4096.0
    filled.synchronize.assert_not_called()
