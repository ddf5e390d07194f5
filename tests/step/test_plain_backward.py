"""A plain ``loss.backward()`` in addition to ``amp.backward(loss)`` is warned of, with its line."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import Net, disabled_after, warnings_with
from torch import Tensor

import tritonamp


class Loop:
    def __init__(self, level: str = "O2", kind: Any = torch.optim.AdamW, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = kind(self.model.parameters(), lr=1e-3)
        self.amp = tritonamp.enable(self.model, self.optimizer, level=level, **settings)

    def loss(self) -> Tensor:
        return self.model(torch.ones(4, 6)).square().mean()

    def penalty(self) -> Tensor:
        return self.model.last.weight.float().square().sum()

    def train(self, iteration: Callable[["Loop"], Any]) -> None:
        for _ in range(6):
            iteration(self)
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.fixture
def make() -> Iterator[Callable[..., Loop]]:
    yield from disabled_after(Loop)


warned = warnings_with("plain")


def behind(loop: Loop) -> None:
    loop.amp.backward(loop.loss())
    loop.penalty().backward()


def before(loop: Loop) -> None:
    loop.penalty().backward()
    loop.amp.backward(loop.loss())


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("iteration", [behind, before], ids=lambda f: f.__name__)
def test_the_line_is_named(
    make: Callable[..., Loop],
    iteration: Callable[[Loop], None],
    level: str,
    kind: Any,
    warned: Callable[[], list[str]],
) -> None:
    make(level, kind).train(iteration)
    (message,) = warned()
    number = iteration.__code__.co_firstlineno + (2 if iteration is behind else 1)
    line = f"{os.path.abspath(__file__)}:{number}"
    assert message.startswith(f"a plain loss.backward() at {line} has added gradients")


def advised(loop: Loop) -> None:
    loop.amp.backward(loop.loss())
    loop.amp.backward(loop.penalty())


def advised_to_clear(loop: Loop) -> None:
    loop.penalty().backward()
    loop.optimizer.zero_grad()
    loop.amp.backward(loop.loss())


def cleared_by_the_model(loop: Loop) -> None:
    loop.penalty().backward()
    loop.model.zero_grad()
    loop.amp.backward(loop.loss())


def by_hand(loop: Loop) -> None:
    loop.amp.scaler.scale(loop.loss()).backward()


def in_a_block(loop: Loop) -> None:
    with loop.amp.scale_loss(loop.loss()) as scaled:
        scaled.backward()


def of_inputs_alone(loop: Loop) -> None:
    loop.amp.backward(loop.loss())
    torch.autograd.grad(loop.loss(), list(loop.model.parameters()))


RIGHT = advised, advised_to_clear, cleared_by_the_model, by_hand, in_a_block, of_inputs_alone


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("iteration", RIGHT, ids=lambda f: f.__name__)
def test_nothing_is_said_of(
    make: Callable[..., Loop],
    iteration: Callable[[Loop], None],
    level: str,
    warned: Callable[[], list[str]],
) -> None:
    make(level).train(iteration)
    assert warned() == []


@pytest.mark.parametrize(
    "settings", [{"level": "O0"}, {"level": "O2", "dtype": torch.bfloat16}], ids=["O0", "bfloat16"]
)
def test_without_a_scale_both_count(
    make: Callable[..., Loop], settings: dict[str, Any], warned: Callable[[], list[str]]
) -> None:
    make(**settings).train(behind)
    assert warned() == []


@pytest.mark.parametrize("ends", ["steps", "disable"])
def test_no_hook_stays(make: Callable[..., Loop], ends: str) -> None:
    """They cost a call for each parameter in each backward."""
    loop = make()
    params = [p for p in loop.model.parameters()]
    if ends == "steps":
        loop.train(advised)
    else:
        loop.amp.disable()
    assert not any(p._post_accumulate_grad_hooks for p in params)  # type: ignore[attr-defined]
