"""A plain ``loss.backward()`` in addition to ``amp.backward(loss)`` is warned of, with its line."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Net, warnings_with
from runs import Training, started_on_cpu
from torch import Tensor


class Penalized(Training):
    def __init__(self, level: str = "O2", optimizer: str = "AdamW", **fields: Any) -> None:
        super().__init__(Net, optimizer, level, lr=1e-3, **fields)

    def penalty(self) -> Tensor:
        return self.model.last.weight.float().square().sum()

    def iterate(self, iteration: Callable[["Penalized"], Any]) -> None:
        for _ in range(6):
            iteration(self)
            self.finish()


start = started_on_cpu(Penalized)


warned = warnings_with("plain")


def behind(run: Penalized) -> None:
    run.backward()
    run.penalty().backward()


def before(run: Penalized) -> None:
    run.penalty().backward()
    run.backward()


@pytest.mark.parametrize("kind", ["AdamW", "NAdam"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("iteration", [behind, before], ids=lambda f: f.__name__)
def test_the_line_is_named(
    start: Any,
    iteration: Callable[[Penalized], None],
    level: str,
    kind: str,
    warned: Callable[[], list[str]],
) -> None:
    start(level, kind).iterate(iteration)
    (message,) = warned()
    number = iteration.__code__.co_firstlineno + (2 if iteration is behind else 1)
    line = f"{os.path.abspath(__file__)}:{number}"
    assert message.startswith(f"a plain loss.backward() at {line} has added gradients")


def advised(run: Penalized) -> None:
    run.backward()
    run.amp.backward(run.penalty())


def advised_to_clear(run: Penalized) -> None:
    run.penalty().backward()
    run.optimizer.zero_grad()
    run.backward()


def cleared_by_the_model(run: Penalized) -> None:
    run.penalty().backward()
    run.model.zero_grad()
    run.backward()


def with_the_scaler(run: Penalized) -> None:
    run.backward(by_scaler=True)


def in_a_block(run: Penalized) -> None:
    with run.amp.scale_loss(run.loss()) as scaled:
        scaled.backward()


def of_inputs_alone(run: Penalized) -> None:
    run.backward()
    torch.autograd.grad(run.loss(), list(run.model.parameters()))


RIGHT = (
    advised,
    advised_to_clear,
    cleared_by_the_model,
    with_the_scaler,
    in_a_block,
    of_inputs_alone,
)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("iteration", RIGHT, ids=lambda f: f.__name__)
def test_nothing_is_said_of(
    start: Any,
    iteration: Callable[[Penalized], None],
    level: str,
    warned: Callable[[], list[str]],
) -> None:
    start(level).iterate(iteration)
    assert warned() == []


@pytest.mark.parametrize(
    "settings", [{"level": "O0"}, {"level": "O2", "dtype": torch.bfloat16}], ids=["O0", "bfloat16"]
)
def test_without_a_scale_both_count(
    start: Any, settings: dict[str, Any], warned: Callable[[], list[str]]
) -> None:
    start(**settings).iterate(behind)
    assert warned() == []


@pytest.mark.parametrize("ends", ["steps", "disable"])
def test_no_hook_stays(start: Any, ends: str) -> None:
    """They cost a call for each parameter in each backward."""
    run = start()
    params = [p for p in run.model.parameters()]
    if ends == "steps":
        run.iterate(advised)
    else:
        run.amp.disable()
    assert not any(p._post_accumulate_grad_hooks for p in params)  # type: ignore[attr-defined]
