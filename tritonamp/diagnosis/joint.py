"""What ranks have found about a skip, each for itself, as one finding of all."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import nn

from tritonamp.diagnosis.replay import FaultReport
from tritonamp.diagnosis.skips import Cause, Explanation, ranks_in_words

_EVIDENCE = Cause.PARAMETERS, Cause.DIVERGENCE, Cause.DATA
"""Causes that a rank has seen; all others are what is left."""


class Ranks(Protocol):
    """The ranks that train together. What they do together, all of them do at the same step."""

    @property
    def several(self) -> bool:
        """Whether there are others."""

    @property
    def may_be_missing(self) -> bool:
        """Whether others may have run out of batches, so that nothing can be done together."""

    def gather(self, value: Any) -> Mapping[int, Any]:
        """Return by rank what each has given; only one's own where no other can be asked."""

    def alone(self) -> AbstractContextManager[str]:
        """Have forwards wait for no other rank inside; gives "", or why that is impossible."""

    def full_state(self, model: nn.Module, keep: bool) -> dict[str, Any]:
        """Return the state of a model, of sharded tensors the whole; empty where not kept."""


class Finding(NamedTuple):
    """What came of running batches again."""

    report: str  # in words
    faults: Sequence[FaultReport] = ()  # the one to blame first; on several ranks one of each

    @property
    def fault(self) -> FaultReport | None:
        """The one to blame."""
        return self.faults[0] if self.faults else None


def explanation_of_all(found: Mapping[int, Explanation]) -> Explanation:
    """Return the explanation of a skip that all ranks give, of what each alone would give.

    It is that of a rank at fault, of one that has seen something before one that has not.
    """
    at_fault = {rank for explanation in found.values() for rank in explanation.skip.at_fault}
    to_blame = [found[rank] for rank in found if rank in at_fault] or list(found.values())
    return min(to_blame, key=lambda explanation: explanation.cause not in _EVIDENCE)


def finding_of_all(found: Mapping[int, Finding]) -> Finding:
    """Return the one report of what each rank has found in its own batches.

    The first fault comes first, one that is not silent before one that is. The others follow in a
    line each. Where there is none, each thing that is said is said once.
    """
    faulty = sorted((f for f in found.values() if f.faults), key=lambda f: f.faults[0].silent)
    if not faulty:
        return Finding("\n".join(_said_once(found)))
    first, *others = faulty
    lines = [f"  also:    {fault.heading}" for other in others for fault in other.faults]
    faults = [fault for finding in faulty for fault in finding.faults]
    return Finding("\n".join([first.report, *lines]), faults)


def _said_once(found: Mapping[int, Finding]) -> list[str]:
    by_text: dict[str, list[int]] = {}
    for rank, finding in found.items():
        by_text.setdefault(finding.report, []).append(rank)
    if len(by_text) == 1:
        return list(by_text)
    return [f"{ranks_in_words(ranks)}: {text}" for text, ranks in by_text.items()]
