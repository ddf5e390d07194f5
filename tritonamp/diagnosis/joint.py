"""Combine the findings of several ranks about a skip into one."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tritonamp.diagnosis.repeats import Repeat, repeat_of_all
from tritonamp.diagnosis.replay import FaultReport
from tritonamp.diagnosis.skips import Cause, Explanation, ranks_in_words

_EVIDENCE = Cause.PARAMETERS, Cause.DIVERGENCE, Cause.DATA
"""Causes that a rank has evidence for. All other causes are inferred."""


class Finding(NamedTuple):
    """The result of running batches again."""

    report: str  # text
    faults: Sequence[FaultReport] = ()  # the fault to blame first; one for each faulty rank
    repeat: Repeat | None = None  # verdict on bits; None: bits were not compared, or not known

    @property
    def clears_code(self) -> bool:
        """Whether neither batch, model nor loss is to blame."""
        return not self.faults and self.repeat is not None and self.repeat.clears_code


def explanation_of_all(found: Mapping[int, Explanation]) -> Explanation:
    """Return one explanation of a skip for all ranks, from the one that each rank alone would give.

    If ranks at fault are known, only theirs count. An explanation with evidence wins.
    """
    at_fault = {rank for explanation in found.values() for rank in explanation.skip.at_fault}
    to_blame = [found[rank] for rank in found if rank in at_fault] or list(found.values())
    return min(to_blame, key=lambda explanation: explanation.cause not in _EVIDENCE)


def finding_of_all(found: Mapping[int, Finding]) -> Finding:
    """Return one report of the findings of all ranks, each in its own batches.

    It is the report of the first fault; silent faults come last. Each other fault follows in one
    line. Without any fault, the result has each different text once, unless bits of a rank differ.
    """
    faulty = sorted((f for f in found.values() if f.faults), key=lambda f: f.faults[0].silent)
    apart = [f for f in found.values() if f.clears_code]
    if not faulty:
        repeat = repeat_of_all({rank: finding.repeat for rank, finding in found.items()})
        if repeat is not None and repeat.clears_code:
            return Finding(repeat.words, (), repeat)
        return Finding("\n".join(_said_once(found)), (), repeat)
    first, *others = faulty
    lines = [f"  also:    {fault.heading}" for other in others for fault in other.faults]
    lines += [f"  also:    {finding.report}" for finding in apart]
    faults = [fault for finding in faulty for fault in finding.faults]
    return Finding("\n".join([first.report, *lines]), faults)


def _said_once(found: Mapping[int, Finding]) -> list[str]:
    by_text: dict[str, list[int]] = {}
    for rank, finding in found.items():
        by_text.setdefault(finding.report, []).append(rank)
    if len(by_text) == 1:
        return list(by_text)
    return [f"{ranks_in_words(ranks)}: {text}" for text, ranks in by_text.items()]
