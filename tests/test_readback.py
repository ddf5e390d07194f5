"""Numbers come in the order in which their copies were started, and none but those that are asked
for.
"""

import torch

from tritonamp.readback import Readback


def numbers(first: float, device: torch.device) -> torch.Tensor:
    return torch.tensor([first, 2.5], dtype=torch.float64, device=device)


def read(readback: Readback) -> list[tuple[list[float], str]]:
    return [(list(r.values), r.attached) for r in readback.ready(wait=True)]


def test_in_order_and_once(device: torch.device) -> None:
    readback = Readback(numbers(0.0, device))
    assert read(readback) == []
    for i, name in enumerate("abc"):
        readback.start(numbers(i, device), name)
    assert read(readback) == [([0.0, 2.5], "a"), ([1.0, 2.5], "b"), ([2.0, 2.5], "c")]
    assert read(readback) == []


def test_what_is_copied_is_what_was_there(device: torch.device) -> None:
    source = numbers(1.0, device)
    readback = Readback(source)
    readback.start(source, "before")
    source.fill_(7.0)
    assert read(readback) == [([1.0, 2.5], "before")]


def test_four_at_a_time(device: torch.device) -> None:
    """More would hold more batches; those that do not fit are not asked for later."""
    readback = Readback(numbers(0.0, device))
    for i, name in enumerate("abcdef"):
        readback.start(numbers(i, device), name)
    assert [name for _, name in read(readback)] == list("abcd")
    readback.start(numbers(9.0, device), "g")
    assert read(readback) == [([9.0, 2.5], "g")]


def test_as_many_as_asked_for(device: torch.device) -> None:
    readback = Readback(numbers(0.0, device), most=1)
    readback.start(numbers(1.0, device), "a")
    readback.start(numbers(2.0, device), "b")
    assert read(readback) == [([1.0, 2.5], "a")]


def test_the_last_one_is_cancelled(device: torch.device) -> None:
    readback = Readback(numbers(0.0, device), most=2)
    readback.cancel_last()  # nothing was started
    for _ in range(3):  # a cancelled copy does not use up room
        readback.start(numbers(1.0, device), "a")
        readback.start(numbers(2.0, device), "b")
        readback.cancel_last()
        assert read(readback) == [([1.0, 2.5], "a")]
    readback.cancel_last()  # it was read
    assert read(readback) == []


def test_one_without_room_is_cancelled_alone(device: torch.device) -> None:
    """A step that is undone while four copies are under way leaves those of the steps before."""
    numbers = torch.zeros(2, dtype=torch.float64, device=device)
    readback = Readback(numbers, most=2)
    for step in range(3):
        readback.start(numbers, step)
    readback.cancel_last()
    assert [reading.attached for reading in readback.ready(wait=True)] == [0, 1]


def test_the_last_one_is_started_again(device: torch.device) -> None:
    """With what was attached to it; a new one starts where it was read or had no room."""
    readback = Readback(numbers(0.0, device), most=2)
    for first in (1.0, 2.0, 3.0):
        readback.start(numbers(first, device), first)
        readback.restart(numbers(-first, device), "again")
    assert read(readback) == [([-1.0, 2.5], 1.0), ([-2.0, 2.5], 2.0)]
    readback.start(numbers(4.0, device), "read")
    assert len(read(readback)) == 1
    readback.restart(numbers(5.0, device), "again")
    assert read(readback) == [([5.0, 2.5], "again")]


def test_a_reading_is_there_while_the_next_are_under_way(device: torch.device) -> None:
    readback = Readback(numbers(0.0, device))
    for i, name in enumerate("ab"):
        readback.start(numbers(i, device), name)
    seen = []
    for reading in readback.ready(wait=True):
        seen.append((reading.attached, list(reading.values)))
        if reading.attached == "a":
            readback.start(numbers(5.0, device), "c")
    assert seen == [("a", [0.0, 2.5]), ("b", [1.0, 2.5]), ("c", [5.0, 2.5])]
