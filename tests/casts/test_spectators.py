"""Spectators of forwards: what they hear of, in which order, and of failures."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonamp
from tritonamp.watched.forwards import Spectator


class Noting(Spectator):
    """Notes all that it hears of.

    Args:
        heard: list that several spectators share.
        name: name of the spectator.
        wants_end: whether it wants to hear how a forward ends.
    """

    def __init__(self, heard: list[Any], name: str, wants_end: bool = True) -> None:
        self.heard, self.name, self.wants_end = heard, name, wants_end

    def before(self, model: Any, args: Any, kwargs: Any, method: str) -> Any:
        self.heard.append((self.name, "before", method, args, kwargs))
        return (self.name, model) if self.wants_end else None

    def after(self, noted: Any, output: Any) -> None:
        self.heard.append((self.name, "after", noted, output))

    def failed(self, noted: Any) -> None:
        self.heard.append((self.name, "failed", noted))

    def traced(self) -> None:
        self.heard.append((self.name, "traced"))


class Stubborn(Spectator):
    def before(self, *forward: Any) -> Any:
        raise KeyboardInterrupt


class Net(nn.Linear):
    def forward(self, x: Tensor, *, raises: bool = False) -> Tensor:
        if raises:
            raise KeyError
        return super().forward(x)

    def encode(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.fixture
def net() -> Iterator[Net]:
    model = Net(2, 2)
    with tritonamp.enable(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O1"):
        yield model


def test_each_hears_of_each_forward_in_order(net: Any) -> None:
    heard: list[Any] = []
    net._tritonamp.spectators = Noting(heard, "a"), Noting(heard, "b", False), Noting(heard, "c")
    x = torch.ones(1, 2)
    output = net(x, raises=False)
    before = "before", "__call__", (x,), {"raises": False}
    ends = [(name, "after", (name, net), output) for name in "ac"]
    assert heard == [("a", *before), ("b", *before), ("c", *before), *ends]
    heard.clear()
    net.encode(x)
    assert [entry[:3] for entry in heard[:3]] == [(name, "before", "encode") for name in "abc"]


@pytest.mark.parametrize("healed", [False, True])
def test_those_that_wait_for_the_end_hear_of_a_failure(net: Any, healed: bool) -> None:
    heard: list[Any] = []
    if healed:
        tritonamp.handle(net).heal("")
    net._tritonamp.spectators = Noting(heard, "a"), Noting(heard, "b", False), Noting(heard, "c")
    with pytest.raises(KeyError):
        net(torch.ones(1, 2), raises=True)
    assert [entry[:2] for entry in heard[3:]] == [("a", "failed"), ("c", "failed")]


def test_the_first_hears_if_another_one_raises(net: Any) -> None:
    heard: list[Any] = []
    net._tritonamp.spectators = Noting(heard, "a"), Stubborn(), Noting(heard, "b")
    with pytest.raises(KeyboardInterrupt):
        net(torch.ones(1, 2))
    assert [entry[:2] for entry in heard] == [("a", "before"), ("a", "failed")]


def test_nobody_listens_to_a_copy(net: Any) -> None:
    copied = copy.deepcopy(net)
    assert len(net._tritonamp.spectators) == 2 and not copied._tritonamp.spectators
    assert copied(torch.ones(1, 2)).dtype is torch.float32


def test_a_trace_is_heard_of_once(net: Any) -> None:
    class Counting(Spectator):
        count = 0

        def traced(self) -> None:
            self.count += 1

    counting = Counting()
    net._tritonamp.spectators = *net._tritonamp.spectators, counting
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    x = torch.ones(1, 2)
    assert torch.equal(compiled(x), net(x))
    compiled(x)
    # a graph repeats the count with its own results; it does not call the spectator
    assert counting.count >= 1
