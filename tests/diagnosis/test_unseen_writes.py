"""Writes through ``.data`` are warned of, because torch does not count them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Net, warnings_with
from runs import Training, started
from torch import Tensor, nn


class Written(Training):
    """Writes to its weights after each step."""

    def loss(self, x: Any = None) -> Tensor:
        return (self.model(self.x) - 1).square().mean()

    def train_and(self, write: Callable[["Written"], Any], steps: int = 3) -> None:
        for _ in range(steps):
            self.step()
            write(self)


start = started(Written)


warned = warnings_with(".data")


def on_each(write: Callable[[Tensor], Any], masters: bool = False) -> Callable[[Written], None]:
    def work(run: Written) -> None:
        for param in run.amp.master_params() if masters else run.model.parameters():
            write(param)

    return work


def renormalise(run: Written) -> None:
    weight = run.model.first.weight
    weight.data.div_(weight.data.norm(dim=1, keepdim=True))


UNSEEN: dict[str, Callable[[Written], Any]] = {
    "clamp_": on_each(lambda p: p.data.clamp_(-0.1, 0.1)),
    "one row": lambda run: run.model.last.weight.data[1].zero_(),
    "copy_": lambda run: run.model.first.weight.data.copy_(torch.zeros(16, 6)),
    "init": lambda run: nn.init.normal_(run.model.first.weight.data),
    "renormalised": renormalise,
    "masters": on_each(lambda p: p.data.mul_(0.9), masters=True),
}


@pytest.mark.parametrize("write", UNSEEN)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_parameter_is_named(
    start: Any,
    write: str,
    dtype: torch.dtype,
    warned: Callable[[], list[str]],
) -> None:
    run = start(level="O2", dtype=dtype)
    run.train_and(UNSEEN[write], steps=4)
    (message,) = warned()
    name = "last.weight" if write == "one row" else "first.weight"
    assert message.startswith(f"in parameter '{name}'")


def without_data(change: Callable[[Tensor], Any], masters: bool) -> Callable[[Written], None]:
    return torch.no_grad()(on_each(change, masters))


ADVISED = {
    "a parameter of the model": without_data(lambda p: p.clamp_(-0.1, 0.1), masters=False),
    "one of amp.master_params()": without_data(lambda p: p.clamp_(-0.1, 0.1), masters=True),
}


@pytest.mark.parametrize("write", ADVISED)
def test_the_advice_is_right(start: Any, write: str, warned: Callable[[], list[str]]) -> None:
    """Without ``.data`` the other side follows: masters at a step, the model at a forward."""
    run = start(level="O2")
    run.train_and(ADVISED[write], steps=4)
    run.model(run.x)
    step = 2 * 1e-2  # an AdamW step with lr=1e-2 moves each weight by less
    for param, (_, master) in zip(
        run.model.parameters(), run.amp.named_master_params(), strict=True
    ):
        assert param.abs().max() <= 0.1 and master.abs().max() < 0.1 + step
    assert warned() == []


def reset(run: Written) -> None:
    nn.init.normal_(run.model.first.weight)


def load(run: Written) -> None:
    run.model.load_state_dict(Net().state_dict())


def restore(run: Written) -> None:
    """As for an evaluation of averaged weights, which are put back."""
    for param in run.model.parameters():
        before = param.data.clone()
        param.data.zero_()
        param.data.copy_(before)


def nothing(run: Written) -> None:
    pass


@pytest.mark.parametrize("write", [nothing, reset, load, restore], ids=lambda f: f.__name__)
@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
def test_other_writes(
    start: Any,
    write: Callable[[Written], Any],
    state: str,
    warned: Callable[[], list[str]],
) -> None:
    start(level="O2", state=state).train_and(write, steps=4)
    assert warned() == []


def test_masters_that_are_written_before_the_step(
    start: Any, warned: Callable[[], list[str]]
) -> None:
    run = start(level="O2")
    for _ in range(3):
        run.backward()
        with torch.no_grad():
            for master in run.amp.master_params():
                master.mul_(0.9)
        run.finish()
    assert warned() == []


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_levels_without_masters_keep_what_is_written(
    start: Any, level: str, warned: Callable[[], list[str]]
) -> None:
    run = start(level=level)
    run.train_and(UNSEEN["clamp_"], steps=4)
    assert all(p.abs().max() <= 0.1 for p in run.model.parameters())
    assert warned() == []
