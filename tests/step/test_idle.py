"""Three steps in a row without gradients are worth one warning, unless that is by design."""

import inspect
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import warnings_with
from runs import LEVELS, OPTIMIZERS, Training, started_on_cpu
from torch import nn


class TwoOptimizers(Training):
    def __init__(self, level: str = "O2", kind: str = "AdamW") -> None:
        super().__init__(
            nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1)),
            lambda params, **rest: [OPTIMIZERS[kind](p, **rest) for p in (params[:2], params[2:])],
            level,
            lr=1e-3,
        )

    def step_both(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


start = started_on_cpu(TwoOptimizers)


warned = warnings_with("found no gradient")


def no_backward(run: TwoOptimizers) -> None:
    run.zero_grad()
    run.step_both()


def cleared_by_the_optimizer(run: TwoOptimizers) -> None:
    run.backward()
    run.zero_grad()
    run.step_both()


def cleared_by_the_model(run: TwoOptimizers) -> None:
    run.backward()
    run.model.zero_grad()
    run.step_both()


def by_scaler(run: TwoOptimizers) -> None:
    run.amp.scaler.scale(run.loss())  # and no backward
    for optimizer in run.optimizers:
        run.amp.scaler.step(optimizer)
    run.amp.scaler.update()


IDLE = no_backward, cleared_by_the_optimizer, cleared_by_the_model, by_scaler


@pytest.mark.parametrize("kind", ["AdamW", "NAdam"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("iteration", IDLE, ids=lambda f: f.__name__)
def test_the_third_step_names_its_line(
    start: Any,
    iteration: Callable[[TwoOptimizers], None],
    level: str,
    kind: str,
    warned: Callable[[], list[str]],
) -> None:
    run = start(level, kind)
    counts = []
    for _ in range(6):
        iteration(run)
        counts.append(len(warned()))
    assert counts == [0, 0, 1, 1, 1, 1]
    (message,) = warned()
    assert message.startswith(f"{kind}.step() at {os.path.abspath(__file__)}:")
    called = iteration if iteration is by_scaler else TwoOptimizers.step_both
    lines, first = inspect.getsourcelines(called)
    number = int(message.partition(f"{os.path.basename(__file__)}:")[2].split()[0])
    assert first <= number < first + len(lines)


def test_the_advice_is_right(start: Any, warned: Callable[[], list[str]]) -> None:
    """Backward before each step, ``zero_grad`` after it or before the backward."""
    run = start()
    before = [p.clone() for p in run.amp.master_params()]
    for clears_first in (False, True):
        for _ in range(4):
            if clears_first:
                run.zero_grad()
            run.backward()
            run.step_both()
            if not clears_first:
                run.zero_grad()
    assert warned() == []
    assert not any(map(torch.equal, before, run.amp.master_params()))


def take_turns(run: TwoOptimizers) -> None:
    """Five steps of one for each of the other, as of critic and generator; both are called."""
    for i in range(12):
        fed = run.optimizers[i % 6 == 5]
        run.zero_grad()
        run.amp.backward(run.loss(), fed)
        for other in run.optimizers:
            if other is not fed:
                other.zero_grad()
        run.step_both()


def frozen(run: TwoOptimizers) -> None:
    for param in run.model[0].parameters():
        param.requires_grad_(False)
    for _ in range(6):
        run.optimizer.step()


def skipped(run: TwoOptimizers) -> None:
    for _ in range(4):
        run.amp.backward(run.loss() * float("nan"))
        run.finish()


def two_at_a_time(run: TwoOptimizers) -> None:
    for _ in range(3):
        for _ in range(2):
            run.step_both()
        run.backward()
        run.finish()


BY_DESIGN = take_turns, frozen, skipped, two_at_a_time


@pytest.mark.parametrize("design", BY_DESIGN, ids=lambda f: f.__name__)
def test_nothing_is_said_of(
    start: Any, design: Callable[[TwoOptimizers], None], warned: Callable[[], list[str]]
) -> None:
    design(start())
    assert warned() == []


def test_freezing_is_an_answer(start: Any, warned: Callable[[], list[str]]) -> None:
    run = start()
    run.model.requires_grad_(False)
    for _ in range(5):
        no_backward(run)
    assert warned() == []


all_zero = warnings_with("all gradients of a step were 0")


@pytest.mark.parametrize("level", [*LEVELS, "O5"])
@pytest.mark.parametrize(
    ("cleared", "warns"), [((), 0), ((0, 1), 0), ((0, 1, 3), 0), ((0, 1, 2), 1), ((0, 1, 2, 3), 1)]
)
def test_gradients_that_are_set_to_zero_before_the_step(
    start: Any,
    cleared: tuple[int, ...],
    warns: int,
    level: str,
    all_zero: Callable[[], list[str]],
) -> None:
    """Three looks in a row are worth one warning. Each of the first four steps is looked at."""
    run = start(level)
    for step in range(5):
        run.backward()
        if step in cleared:
            for optimizer in run.optimizers:
                optimizer.zero_grad(set_to_none=False)
        run.finish()
    run.amp.stats()
    assert len(all_zero()) == warns
