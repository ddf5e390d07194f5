"""The findings of several ranks are combined into one."""

import dataclasses
import math
import pickle

import torch

from tritonamp.diagnosis.joint import Finding, explanation_of_all, finding_of_all
from tritonamp.diagnosis.replay.faults import FaultReport, Remedy
from tritonamp.diagnosis.replay.verdicts import Event
from tritonamp.diagnosis.skips import Cause, Explanation, Skip
from tritonamp.kernels._decision import FAULT, OVERFLOW
from tritonamp.watched.places import Place


def explanation(cause: Cause, by_rank: dict[int, float], outcome: int = FAULT) -> Explanation:
    skip = Skip(outcome, 3, True, 1, 3, 1.0, 1.0, False, {}, 0.0, 65504.0, by_rank)
    return Explanation(skip, cause, "because", ("a.weight",))


def fault(rank: int, silent: bool = False) -> FaultReport:
    place = Place("attention", "Attention", "matmul", "train.py", 11)
    event = Event(place, "forward", torch.float16, exact=1e6)
    return FaultReport("matmul_overflow", event, silent=silent, rank=rank, remedy=Remedy(("a",)))


def finding(rank: int, silent: bool = False) -> Finding:
    found = fault(rank, silent)
    return Finding(str(found), [found])


def test_a_rank_at_fault_explains_the_skip() -> None:
    by_rank = {4: 0.0, 6: math.inf, 7: math.inf}
    found = {rank: explanation(Cause.FORWARD, by_rank) for rank in by_rank}
    assert explanation_of_all(found) is found[6]
    found[4] = explanation(Cause.DATA, by_rank)
    assert explanation_of_all(found) is found[6]  # its own loss was good
    found[7] = explanation(Cause.PARAMETERS, by_rank)
    assert explanation_of_all(found) is found[7]


def test_of_an_overflow_the_rank_with_the_gradients_explains() -> None:
    by_rank = {0: 1.0, 1: math.nan}
    causes = {0: Cause.SCALE, 1: Cause.BACKWARD}
    found = {rank: explanation(causes[rank], by_rank, OVERFLOW) for rank in by_rank}
    assert explanation_of_all(found) is found[1]


def test_one_process_explains_by_itself() -> None:
    found = explanation(Cause.FORWARD, {})
    assert explanation_of_all({0: found}) is found


def test_what_ranks_give_to_one_another_can_be_pickled() -> None:
    for value in (explanation(Cause.DIVERGENCE, {0: 1.0}), finding(2)):
        assert pickle.loads(pickle.dumps(value)) == value


def test_the_first_fault_is_reported_and_the_others_named() -> None:
    found = {0: Finding("nothing"), 1: finding(1, silent=True), 2: finding(2), 3: finding(3)}
    joint = finding_of_all(found)
    place = "forward: attention, op matmul at train.py:11"
    assert [f.rank for f in joint.faults] == [2, 3, 1]
    assert joint.faults[0] == fault(2)
    assert joint.report.splitlines() == [
        *found[2].report.splitlines(),
        f"  also:    matmul overflow, {place}, on rank 3",
        f"  also:    silent matmul overflow, {place}, on rank 1",
    ]


def test_what_several_ranks_say_is_said_once() -> None:
    nothing, gone = Finding("nothing"), Finding("gone")
    assert finding_of_all({0: nothing, 1: nothing}) == nothing
    joint = finding_of_all({0: nothing, 1: gone, 2: nothing})
    assert joint == Finding("ranks 0, 2: nothing\nrank 1: gone")
    assert not joint.faults


def test_a_report_without_other_ranks_names_none() -> None:
    assert ", on rank 2" in str(fault(2))
    assert "rank" not in str(dataclasses.replace(fault(2), rank=None))
