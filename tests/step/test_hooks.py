"""Hooks of a step run at each step that has gradients, skipped or not, with every optimizer."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import Net, disabled_after
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import tritonamp

OPTIMIZERS = [
    torch.optim.AdamW,
    torch.optim.SGD,
    tritonamp.optim.Lion,
    torch.optim.RMSprop,  # these two step by themselves
    torch.optim.Adagrad,
]


class Loop:
    def __init__(self, kind: Any, level: str, hooks: str) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = kind(self.model.parameters(), lr=1e-3)
        self.ran: list[str] = []

        def noted(name: str) -> Callable[..., None]:
            return lambda optimizer, *_: self.ran.append(name)

        self.handles: list[Any] = []
        if hooks == "of all optimizers":
            self.handles.append(register_optimizer_step_pre_hook(noted("pre")))
            self.handles.append(register_optimizer_step_post_hook(noted("post")))
        else:
            self.optimizer.register_step_pre_hook(noted("pre"))
            self.optimizer.register_step_post_hook(noted("post"))
        self.amp = tritonamp.enable(self.model, self.optimizer, level=level)

    def step(self, factor: float | None, by_scaler: bool) -> list[str]:
        """Step on a loss times ``factor`` (None: without gradients); return what ran."""
        self.ran.clear()
        loss = self.model(torch.ones(4, 6)).square().mean()
        scaler = self.amp.scaler
        if factor is not None and by_scaler:
            scaler.scale(loss * factor).backward()
        elif factor is not None:
            self.amp.backward(loss * factor)
        if by_scaler:
            scaler.step(self.optimizer)
            scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return list(self.ran)


@pytest.fixture
def make() -> Iterator[Callable[..., Loop]]:
    made: list[Loop] = []

    def noted(*args: Any) -> Loop:
        made.append(Loop(*args))
        return made[-1]

    yield from disabled_after(noted)
    for loop in made:
        for handle in loop.handles:
            handle.remove()


@pytest.mark.parametrize("hooks", ["of the optimizer", "of all optimizers"])
@pytest.mark.parametrize("by_scaler", [False, True], ids=["step", "scaler.step"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_at_each_step_with_gradients(
    make: Callable[..., Loop], kind: Any, level: str, by_scaler: bool, hooks: str
) -> None:
    loop = make(kind, level, hooks)
    for factor in (1.0, float("nan"), 1.0):
        assert loop.step(factor, by_scaler) == ["pre", "post"]
    assert loop.step(None, by_scaler) == []
    assert (loop.amp.stats()["steps"], loop.amp.stats()["skipped"]) == (2, 1)
