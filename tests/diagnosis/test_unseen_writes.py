"""Writes through ``.data`` to half weights or masters are warned of: torch counts none of them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import Net, disabled_after, take_step, warnings_with
from torch import Tensor, nn

import tritonamp


class Loop:
    """A model in training that writes to its weights after each step."""

    def __init__(self, device: torch.device, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = Net().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.amp = tritonamp.enable(self.model, self.optimizer, **settings)
        self.x = torch.randn(8, 6, device=device)

    def train(self, write: Callable[["Loop"], Any], steps: int = 3) -> None:
        for _ in range(steps):
            take_step(self.amp, self.optimizer, (self.model(self.x) - 1).square().mean())
            write(self)


@pytest.fixture
def make() -> Iterator[Callable[..., Loop]]:
    yield from disabled_after(Loop)


warned = warnings_with(".data")


def on_each(write: Callable[[Tensor], Any], masters: bool = False) -> Callable[[Loop], None]:
    def work(loop: Loop) -> None:
        for param in loop.amp.master_params() if masters else loop.model.parameters():
            write(param)

    return work


def renormalise(loop: Loop) -> None:
    weight = loop.model.first.weight
    weight.data.div_(weight.data.norm(dim=1, keepdim=True))


UNSEEN: dict[str, Callable[[Loop], Any]] = {
    "clamp_": on_each(lambda p: p.data.clamp_(-0.1, 0.1)),
    "one row": lambda loop: loop.model.last.weight.data[1].zero_(),
    "copy_": lambda loop: loop.model.first.weight.data.copy_(torch.zeros(16, 6)),
    "init": lambda loop: nn.init.normal_(loop.model.first.weight.data),
    "renormalised": renormalise,
    "masters": on_each(lambda p: p.data.mul_(0.9), masters=True),
}


@pytest.mark.parametrize("write", UNSEEN)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_parameter_is_named(
    make: Callable[..., Loop],
    device: torch.device,
    write: str,
    dtype: torch.dtype,
    warned: Callable[[], list[str]],
) -> None:
    loop = make(device, level="O2", dtype=dtype)
    loop.train(UNSEEN[write], steps=4)
    (message,) = warned()
    name = "last.weight" if write == "one row" else "first.weight"
    assert message.startswith(f"in parameter '{name}'")


def without_data(change: Callable[[Tensor], Any], masters: bool) -> Callable[[Loop], None]:
    return torch.no_grad()(on_each(change, masters))


ADVISED = {
    "a parameter of the model": without_data(lambda p: p.clamp_(-0.1, 0.1), masters=False),
    "one of amp.master_params()": without_data(lambda p: p.clamp_(-0.1, 0.1), masters=True),
}


@pytest.mark.parametrize("write", ADVISED)
def test_the_advice_is_right(
    make: Callable[..., Loop], device: torch.device, write: str, warned: Callable[[], list[str]]
) -> None:
    """Without ``.data`` the other side follows: masters at a step, the model at a forward."""
    loop = make(device, level="O2")
    loop.train(ADVISED[write], steps=4)
    loop.model(loop.x)
    step = 2 * 1e-2  # an AdamW step with lr=1e-2 moves each weight by less
    for param, (_, master) in zip(
        loop.model.parameters(), loop.amp.named_master_params(), strict=True
    ):
        assert param.abs().max() <= 0.1 and master.abs().max() < 0.1 + step
    assert warned() == []


def reset(loop: Loop) -> None:
    nn.init.normal_(loop.model.first.weight)


def load(loop: Loop) -> None:
    loop.model.load_state_dict(Net().state_dict())


def restore(loop: Loop) -> None:
    """As for an evaluation of averaged weights, which are put back."""
    for param in loop.model.parameters():
        before = param.data.clone()
        param.data.zero_()
        param.data.copy_(before)


def nothing(loop: Loop) -> None:
    pass


@pytest.mark.parametrize("write", [nothing, reset, load, restore], ids=lambda f: f.__name__)
@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
def test_other_writes(
    make: Callable[..., Loop],
    device: torch.device,
    write: Callable[[Loop], Any],
    state: str,
    warned: Callable[[], list[str]],
) -> None:
    make(device, level="O2", state=state).train(write, steps=4)
    assert warned() == []


def test_masters_that_are_written_before_the_step(
    make: Callable[..., Loop], device: torch.device, warned: Callable[[], list[str]]
) -> None:
    loop = make(device, level="O2")
    for _ in range(3):
        loop.amp.backward((loop.model(loop.x) - 1).square().mean())
        with torch.no_grad():
            for master in loop.amp.master_params():
                master.mul_(0.9)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    assert warned() == []


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_levels_without_masters_keep_what_is_written(
    make: Callable[..., Loop], device: torch.device, level: str, warned: Callable[[], list[str]]
) -> None:
    loop = make(device, level=level)
    loop.train(UNSEEN["clamp_"], steps=4)
    assert all(p.abs().max() <= 0.1 for p in loop.model.parameters())
    assert warned() == []
