"""Remedies that are tried against a fault, their order, and the end of the search."""

from collections.abc import Callable, Collection

import pytest

from tritonamp.diagnosis.remedies import find_remedy
from tritonamp.diagnosis.replay import Remedy

BFLOAT16 = Remedy(bfloat16=True)


def scripted(
    moves: dict[tuple[str, ...], Collection[str | None]], bfloat16_helps: bool
) -> tuple[list[Remedy], Callable[[Remedy], Collection[str | None]]]:
    tried: list[Remedy] = []

    def again(remedy: Remedy) -> Collection[str | None]:
        tried.append(remedy)
        if remedy.bfloat16:
            return [] if bfloat16_helps else ["a"]
        return moves[remedy.modules]

    return tried, again


def test_modules_that_a_fault_moves_on_to_are_tried_together() -> None:
    tried, again = scripted({("a",): ["b"], ("a", "b"): ["a", "c"], ("a", "b", "c"): []}, True)
    assert find_remedy(["a"], again, 4) == Remedy(("a", "b", "c"))
    assert [len(remedy.modules) for remedy in tried] == [1, 2, 3]


@pytest.mark.parametrize("helps", [True, False])
@pytest.mark.parametrize(
    ("wrong", "moves", "most", "runs"),
    [
        (["a"], {("a",): ["a"]}, 4, 2),  # it stays
        (["a"], {("a",): [None]}, 4, 2),  # it leaves the model
        ([None], {}, 4, 1),
        (["a", None], {}, 4, 1),
        (["a"], {("a",): ["b"], ("a", "b"): ["c"]}, 2, 3),
    ],
    ids=["stays", "leaves", "outside", "outside, too", "too many"],
)
def test_bfloat16_comes_last(
    wrong: list[str | None],
    moves: dict[tuple[str, ...], list[str | None]],
    most: int,
    runs: int,
    helps: bool,
) -> None:
    tried, again = scripted(moves, helps)
    found = find_remedy(wrong, again, most)
    assert tried[-1] == BFLOAT16 and len(tried) == runs
    assert found == Remedy(bfloat16=helps) and found.helps is helps
