"""Advice that is followed to the letter: each planted fault is named, and its remedy works.

The table has the op, the place, the cause and the remedy that are right, whether or not the
library finds them. A remedy is applied as the text has it. Then the batch passes, or training
reaches FP32's loss.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from diagnosis.planted.case import Planted
from diagnosis.planted.following import Setup
from diagnosis.planted.judging import mistakes
from diagnosis.planted.running import OF_THE_SCALE, Run, is_finite_in_fp32, report_of
from diagnosis.planted.table import PLANTED

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0:UserWarning")

KNOWN = {
    "gate of large values": "a recognised formula rounds its result, and that cast is named",
    "deviation of one sample": "no edit of std helps, and that there is one sample is not said",
    "log-determinant of 0": "the sign, of the same shape, is taken for the logarithm's exact value",
}
"""Faults for which the report is wrong, and why."""
BY_FUNCTION = "amp.explain(replay=lambda"


def params(cases: Sequence[Planted], known: dict[str, str], one_in: int = 6) -> list[Any]:
    """Return cases for ``parametrize``, of which a plain run takes one in ``one_in``."""
    return [
        pytest.param(
            case,
            id=case.name,
            marks=[pytest.mark.more] * bool(i % one_in)
            + [pytest.mark.xfail(reason=known[name]) for name in [case.name] if name in known],
        )
        for i, case in enumerate(cases)
    ]


@pytest.mark.parametrize("case", params(PLANTED, KNOWN))
def test_planted_fault(case: Planted) -> None:
    assert mistakes(case) == []


def test_score() -> None:
    """At least 95 % are right, of at least 83."""
    names = {case.name for case in PLANTED}
    assert len(names) == len(PLANTED) >= 83
    assert names >= KNOWN.keys()
    assert 1 - len(KNOWN) / len(PLANTED) >= 0.95


NOT_AT_O1 = {
    "bilinear": "its arithmetic is FP32 at O1",
    "weight beyond 65504": "it overflows where autocast rounds it, so it is another kind of fault",
    "gradient explodes in a loop": "it takes seconds",
}
O1 = [c for c in PLANTED if c.level == "O2" and c.replay and c.name not in NOT_AT_O1]


@pytest.mark.parametrize("case", params(O1, KNOWN, one_in=20))
def test_planted_fault_at_o1(case: Planted) -> None:
    assert mistakes(replace(case, level="O1")) == []


FORWARD = [c for c in PLANTED if c.cause == "forward fault" and c.module is not None]


@pytest.mark.parametrize("case", params(FORWARD, {}, one_in=8))
def test_what_fp32_cures_is_healed(case: Planted) -> None:
    """A module is healed at its second fault, if and only if the batch is finite in FP32."""
    healing = replace(case, fields={**case.fields, "on_nonfinite": "heal"})
    is_cured = is_finite_in_fp32(case)
    with Run(Setup(healing)) as run:
        causes = run.causes_until_a_step(30 if is_cured else 4)
        healed = run.amp.stats()["healed"]
    assert causes[:2] == ["forward fault"] * 2
    if is_cured:
        assert healed
        assert set(causes[2:-1]) <= set(OF_THE_SCALE)
        assert causes[-1] == ""
    else:
        assert not healed


OUTSIDE = [c for c in PLANTED if c.kind and (c.module is None or c.phase == "backward")]


@pytest.mark.parametrize("on_nonfinite", ["skip", "explain"])
@pytest.mark.parametrize("case", params(OUTSIDE, {}, one_in=8))
def test_the_log_leads_to_the_op(case: Planted, on_nonfinite: str) -> None:
    """Faults in the loss or the backward: the log has the report, or the call that has it."""
    fields = {**case.fields, "on_nonfinite": on_nonfinite}
    report = report_of(Setup(replace(case, fields=fields, replay=False, steps=3)))
    assert report.kind or report.cause in ("", "scale overflow") or BY_FUNCTION in report.text
