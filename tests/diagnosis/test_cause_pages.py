"""A line of the log leads to the section of errors.md about its cause."""

import dataclasses

import pytest
import torch
from torch import nn

import tritonamp
from tritonamp.commands.error_pages import find, sections
from tritonamp.diagnosis.causes import find_cause
from tritonamp.diagnosis.divergence import Fp32Run, Growth
from tritonamp.diagnosis.replay.faults import FaultReport
from tritonamp.diagnosis.replay.verdicts import VERDICTS, Event
from tritonamp.diagnosis.skips import Cause, Explanation, Skip, Steps, Writer
from tritonamp.kernels._decision import FAULT, HUGE, OUTLIER, OVERFLOW, VETO
from tritonamp.watched.places import Place

INF = float("inf")
NANS = torch.full((2,), torch.nan)
GROWN = Growth(weights=20.0, usual_loss=1.0, largest=(0.1, 20.0))
SECTIONS = sections()
TITLES = {
    Cause.SCALE: "step 17 skipped",
    Cause.EXHAUSTED: "Current loss scale already at minimum",
}


@pytest.mark.parametrize("cause", Cause, ids=lambda cause: cause.value)
def test_each_cause_of_a_skip_is_found(cause: Cause) -> None:
    title = TITLES.get(cause, cause.value)
    assert [page.title.startswith(title) for page in find(cause.value, SECTIONS)] == [True]


SKIP = Skip(OVERFLOW, 40, True, 17, 40, 4.0, 2.0**-24, False, {"p": INF}, 0.0, 65504.0)
NAN_PARAMETER = {nn.Parameter(torch.tensor([torch.nan])): "p"}
HALF_STEP = Writer("NAdam", 1e-3, torch.float16, 1e-8, 1e-4)
LINES: dict[Cause, list[Explanation]] = {
    Cause.SCALE: [find_cause(SKIP, [], {})],
    Cause.BACKWARD: [find_cause(SKIP._replace(scale=1.0), [], {})],
    Cause.EXHAUSTED: [
        find_cause(SKIP._replace(lowest=4.0, fixed=fixed), [], {}) for fixed in (True, False)
    ],
    Cause.FORWARD: [find_cause(SKIP._replace(outcome=FAULT), [], {})],
    Cause.DATA: [
        find_cause(SKIP._replace(outcome=outcome, amax={"p": torch.nan}), [[("0", NANS)]], {})
        for outcome in (FAULT, OVERFLOW)
    ],
    Cause.PARAMETERS: [
        find_cause(SKIP._replace(outcome=FAULT, wrote=39), [], NAN_PARAMETER, Steps(writers))
        for writers in ({}, {"p": HALF_STEP}, {"p": HALF_STEP._replace(zero_eps=0.0)})
    ],
    Cause.DIVERGENCE: [
        find_cause(SKIP._replace(outcome=FAULT), [], {}, Steps(writers, lambda: GROWN, in_fp32))
        for writers in ({}, {"p": Writer("AdamW", 0.1, torch.float32, decay=50.0)})
        for in_fp32 in (None, lambda: Fp32Run(False))
    ],
    Cause.VETO: [find_cause(SKIP._replace(outcome=VETO), [], {})],
    Cause.HUGE: [find_cause(SKIP._replace(outcome=HUGE, amax={"p": 1e30}), [], {})],
    Cause.OUTLIER: [
        find_cause(SKIP._replace(outcome=OUTLIER, outlier=numbers), [], {})
        for numbers in ((9.0, 1.0, 2.0, 1.0, 1.0, 2.0, 6.0), (1.0, 1.0, 2.0, 9.0, 1.0, 2.0, 6.0))
    ],
}


@pytest.mark.parametrize("cause", Cause, ids=lambda cause: cause.value)
def test_a_line_of_the_log_leads_to_its_cause(cause: Cause) -> None:
    title = TITLES.get(cause, cause.value)
    for found in LINES[cause]:
        assert found.cause is cause
        line = found.line("the last 8 in a row", "rank 3") + found.hint
        for text in (line, found.short_line(found)):
            page, *_ = find(text, SECTIONS)
            assert page.title.startswith(title), (text, page.title)


BACKWARD = frozenset(
    """softmax_gradient small_divisor own_backward backward_nan scale_too_high
    gradient_overflow""".split()
)
HEADINGS = {"data": "data: ", "parameters": "bad parameters: "}
PHASES = [
    *((kind, "backward") for kind in sorted(BACKWARD)),
    *((kind, "backward") for kind in ("ctc_length", "parameters", "propagated")),
    *((kind, "forward") for kind in sorted(VERDICTS.keys() - BACKWARD)),
]


@pytest.mark.parametrize(("kind", "phase"), PHASES)
def test_the_heading_of_a_report_leads_to_its_section(kind: str, phase: str) -> None:
    place = Place("encoder.0", "Linear", "mm", "train.py", 11)
    report = FaultReport(kind, Event(place, phase, torch.float16, exact=1e6), names=("a",))
    (page,) = find(report.heading, SECTIONS)
    assert page.title.startswith(HEADINGS.get(kind, "overflow, forward"))
    (silent,) = find(dataclasses.replace(report, silent=True).heading, SECTIONS)
    assert silent is page


def test_what_a_replay_and_healing_say_leads_to_a_section(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].bias.fill_(6e4)
        model[1].weight.fill_(1e3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)

    def title(text: str) -> str:
        return find(text, SECTIONS)[0].title.partition(":")[0]

    with tritonamp.enable(model, optimizer, level="O1", on_nonfinite="heal") as amp:
        for replay in (lambda: model(torch.zeros(2, 4)) * 0, lambda: {}["x"]):
            assert title(amp.explain(replay=replay).partition("\n")[2]) == "not reproduced"
        for _ in range(2):
            amp.backward(model(torch.full((2, 4), 1e3)).square().mean())
            optimizer.step()
    assert title(caplog.messages[-1].splitlines()[-1]) == "Healed"
