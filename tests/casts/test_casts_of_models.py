"""A cast of an enabled model, or of a part of it, is refused where it would change dtypes."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from helpers import Net, disabled_after
from runs import LEVELS, Training
from torch import nn

import tritonamp

CASTS: dict[str, tuple[Callable[[nn.Module], Any], torch.dtype]] = {
    "half": (lambda m: m.half(), torch.float16),
    "float": (lambda m: m.float(), torch.float32),
    "double": (lambda m: m.double(), torch.float64),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "to(dtype)": (lambda m: m.to(torch.float64), torch.float64),
    "to(device, dtype)": (lambda m: m.to("cpu", torch.float16), torch.float16),
    "to(tensor)": (lambda m: m.to(torch.zeros(1, dtype=torch.float64)), torch.float64),
    "type": (lambda m: m.type(torch.bfloat16), torch.bfloat16),
    "of a module around it": (lambda m: nn.ModuleList([m]).double(), torch.float64),
}
MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "to": lambda m: m.to("cpu"),
    "cpu": lambda m: m.cpu(),
    "share_memory": lambda m: m.share_memory(),
    "channels_last": lambda m: m.to(memory_format=torch.channels_last),
}


@pytest.fixture
def make() -> Iterator[Callable[..., Training]]:
    yield from disabled_after(partial(Training, Net, "AdamW"))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cast", CASTS)
def test_another_dtype_is_refused(make: Callable[..., Training], level: str, cast: str) -> None:
    loop, (function, dtype) = make(level), CASTS[cast]
    loop.step()
    before = [p.detach().clone() for p in loop.model.parameters()]
    if any(p.dtype is not dtype for p in before):
        with pytest.raises(RuntimeError, match="Net is enabled: expected a call that keeps"):
            function(loop.model)
    else:
        function(loop.model)
    for param, value in zip(loop.model.parameters(), before, strict=True):
        assert param.dtype is value.dtype and torch.equal(param, value)
    loop.step()
    assert loop.amp.stats()["steps"] == 2
    loop.amp.disable()  # the advice
    function(loop.model)
    assert {p.dtype for p in loop.model.parameters()} == {dtype}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("move", MOVES)
def test_moves_are_not(make: Callable[..., Training], level: str, move: str) -> None:
    loop = make(level)
    loop.step()
    MOVES[move](loop.model)
    loop.step()
    assert loop.amp.stats()["steps"] == 2


def test_a_part_that_has_become_half(make: Callable[..., Training]) -> None:
    loop = make("O1")
    loop.model.first.half()
    with pytest.raises(RuntimeError, match="have become half since tritonamp"):
        loop.step()
    # the advice
    loop.amp.disable()
    loop.model.half()
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-2)
    loop.amp = tritonamp.enable(loop.model, loop.optimizer, level="O1")
    loop.step()
    assert {p.dtype for p in loop.model.parameters()} == {torch.float32}


def test_a_part_that_has_become_fp32_has_its_master(make: Callable[..., Training]) -> None:
    loop, other = make("O2"), make("O2")
    loop.model.first.float()
    for _ in range(4):
        loop.step()
        other.step()
    loop.amp.disable()
    other.amp.disable()
    for a, b in zip(loop.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=4e-3)  # half products, by four steps
