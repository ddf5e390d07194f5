"""The counts that the answer to a fault depends on."""

import pytest

from tritonamp.diagnosis.fault_counts import FaultCounts


def test_each_fault_makes_new_counts() -> None:
    none = FaultCounts()
    one = none.with_fault(replayable=True).with_module("head")
    two = one.with_fault(replayable=False).with_module("head").with_module("body")
    assert none == (0, 0, {})
    assert one == (1, 1, {"head": 1})
    assert two == (2, 1, {"head": 2, "body": 1})


def test_a_state_is_plain_and_comes_back() -> None:
    counts = FaultCounts(3, 2, {"head": 1})
    state = counts.to_dict()
    assert state == {"in_a_row": 3, "seen": 2, "by_module": {"head": 1}}
    assert FaultCounts.of({**state, "last_good": [0.0, 0.0]}) == counts
    assert FaultCounts.of({}) == FaultCounts()


@pytest.mark.parametrize(
    ("seen", "wanted"), [(1, True), (8, True), (9, False), (15, False), (16, True), (24, False)]
)
def test_the_first_eight_are_replayed_and_those_at_powers_of_two(seen: int, wanted: bool) -> None:
    assert FaultCounts(seen=seen).wants_replay is wanted
