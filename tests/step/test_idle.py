"""Three steps in a row without gradients are worth one warning, unless that is by design."""

import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import disabled_after, warnings_with
from torch import Tensor, nn

import tritonamp

X = torch.ones(2, 4)


class Pair:
    """Two models, each with an optimizer of its own, under one handle."""

    def __init__(self, level: str = "O2", kind: Any = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.models = nn.Linear(4, 4), nn.Linear(4, 1)
        self.optimizers = [kind(model.parameters(), lr=1e-3) for model in self.models]
        self.amp = tritonamp.enable(self.models, self.optimizers, level=level)
        self.first, self.second = self.optimizers

    def loss(self) -> Tensor:
        loss: Tensor = self.models[1](self.models[0](X)).square().mean()
        return loss

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


@pytest.fixture
def make() -> Iterator[Callable[..., Pair]]:
    yield from disabled_after(Pair)


warned = warnings_with("found no gradient")


def no_backward(pair: Pair) -> None:
    pair.zero_grad()
    pair.step()


def cleared_by_the_optimizer(pair: Pair) -> None:
    pair.amp.backward(pair.loss())
    pair.zero_grad()
    pair.step()


def cleared_by_the_model(pair: Pair) -> None:
    pair.amp.backward(pair.loss())
    for model in pair.models:
        model.zero_grad()
    pair.step()


def by_scaler(pair: Pair) -> None:
    pair.amp.scaler.scale(pair.loss())  # and no backward
    for optimizer in pair.optimizers:
        pair.amp.scaler.step(optimizer)
    pair.amp.scaler.update()


IDLE = no_backward, cleared_by_the_optimizer, cleared_by_the_model, by_scaler


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("iteration", IDLE, ids=lambda f: f.__name__)
def test_the_third_step_names_its_line(
    make: Callable[..., Pair],
    iteration: Callable[[Pair], None],
    level: str,
    kind: Any,
    warned: Callable[[], list[str]],
) -> None:
    pair = make(level, kind)
    for _ in range(2):
        iteration(pair)
    assert warned() == []
    for _ in range(4):
        iteration(pair)
    (message,) = warned()
    assert message.startswith(f"{kind.__name__}.step() at {os.path.abspath(__file__)}:")
    called = iteration if iteration is by_scaler else Pair.step
    lines, first = inspect.getsourcelines(called)
    number = int(message.partition(f"{os.path.basename(__file__)}:")[2].split()[0])
    assert first <= number < first + len(lines)


def test_the_advice_is_right(make: Callable[..., Pair], warned: Callable[[], list[str]]) -> None:
    """Backward before each step, ``zero_grad`` after it or before the backward."""
    pair = make()
    before = [p.clone() for p in pair.amp.master_params()]
    for clears_first in (False, True):
        for _ in range(4):
            if clears_first:
                pair.zero_grad()
            pair.amp.backward(pair.loss())
            pair.step()
            if not clears_first:
                pair.zero_grad()
    assert warned() == []
    assert not any(map(torch.equal, before, pair.amp.master_params()))


def take_turns(pair: Pair) -> None:
    """Five steps of one for each of the other, as of critic and generator; both are called."""
    for i in range(12):
        fed = pair.optimizers[i % 6 == 5]
        pair.zero_grad()
        pair.amp.backward(pair.loss(), fed)
        for other in pair.optimizers:
            if other is not fed:
                other.zero_grad()
        pair.step()


def frozen(pair: Pair) -> None:
    for param in pair.models[0].parameters():
        param.requires_grad_(False)
    for _ in range(6):
        pair.first.step()


def skipped(pair: Pair) -> None:
    for _ in range(4):
        pair.amp.backward(pair.loss() * float("nan"))
        pair.step()
        pair.zero_grad()


def two_at_a_time(pair: Pair) -> None:
    for _ in range(3):
        for _ in range(2):
            pair.step()
        pair.amp.backward(pair.loss())
        pair.step()
        pair.zero_grad()


BY_DESIGN = take_turns, frozen, skipped, two_at_a_time


@pytest.mark.parametrize("run", BY_DESIGN, ids=lambda f: f.__name__)
def test_nothing_is_said_of(
    make: Callable[..., Pair], run: Callable[[Pair], None], warned: Callable[[], list[str]]
) -> None:
    run(make())
    assert warned() == []


def test_freezing_is_an_answer(make: Callable[..., Pair], warned: Callable[[], list[str]]) -> None:
    pair = make()
    for model in pair.models:
        model.requires_grad_(False)
    for _ in range(5):
        no_backward(pair)
    assert warned() == []


all_zero = warnings_with("all gradients of a step were 0")


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("cleared", [0, 2, 3], ids=lambda steps: f"{steps} steps")
def test_gradients_that_are_set_to_zero_before_the_step(
    make: Callable[..., Pair], cleared: int, level: str, all_zero: Callable[[], list[str]]
) -> None:
    pair = make(level)
    for step in range(5):
        pair.amp.backward(pair.loss())
        if step < cleared:
            for optimizer in pair.optimizers:
                optimizer.zero_grad(set_to_none=False)
        pair.step()
        pair.zero_grad()
    pair.amp.stats()
    assert len(all_zero()) == (cleared == 3)
