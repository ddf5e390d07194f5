"""The score of one planted fault."""

import re

from diagnosis.planted.case import Planted
from diagnosis.planted.following import Setup, followed
from diagnosis.planted.report import Report
from diagnosis.planted.rewriting import Unknown
from diagnosis.planted.running import failure_of, is_finite_in_fp32, report_of

from tritonamp.diagnosis.replay.faults import NO_PRECISION_HELPS


def mistakes(case: Planted) -> list[str]:
    """Return the mistakes of a report about a fault, and of advice that was followed.

    Both the fault itself has to be there, and each piece of advice has to help by itself.
    """
    report = report_of(Setup(case))
    return [*wrong_words(case, report), *useless_advice(case, report)]


def wrong_words(case: Planted, report: Report) -> list[str]:
    """Return the wrong parts of a report: op, place, cause, kind."""
    found = {
        "cause": (report.cause, case.cause),
        "kind": (report.kind, case.kind or ""),
    }
    if case.op:
        found["op"] = report.op, case.op
        found["module"] = report.module, case.module
        found["phase"] = report.phase, case.phase
    wrong = [
        f"{name}: {got!r} instead of {right!r}"
        for name, (got, right) in found.items()
        if got not in (right if isinstance(right, tuple) else (right,))
    ]
    if case.line not in report.code:
        wrong.append(f"line: {report.code!r} instead of {case.line!r}")
    if not re.search(case.says, report.text):
        wrong.append(f"text: {case.says!r} is missing")
    if NO_PRECISION_HELPS[:19] in report.text and is_finite_in_fp32(case):
        wrong.append("FP32 does help")
    return wrong


def useless_advice(case: Planted, report: Report) -> list[str]:
    """Return the advice that is missing, that could not be followed, or did not help."""
    wrong = []
    if not re.search(case.remedy, report.advice):
        wrong.append(f"remedy: expected {case.remedy!r} in {report.advice!r}")
    setups = list(followed(case, report))
    if not setups and case.by != "nothing":
        wrong.append("remedy: there is no advice that can be followed")
    for setup in setups:
        try:
            failure = failure_of(setup)
        except Unknown as error:
            failure = str(error)
        if failure:
            wrong.append(f"{setup.advice!r} was followed: {failure}")
    return wrong
