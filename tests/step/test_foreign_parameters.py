"""Parameters of no enabled model that ``add_param_group`` brings: of a loss, a temperature."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import disabled_after
from torch import Tensor, nn

import tritonamp

OPTIMIZERS = [torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam]
STEPS = 6


class Loop:
    """A model, and a head and a log-temperature that belong to the loss.

    Args:
        kind: class of the optimizer.
        dtype: of the loss's parameters.
        level: None: not enabled, in float64.
    """

    def __init__(self, kind: Any, dtype: torch.dtype, level: str | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.head = nn.Linear(4, 4).to(dtype)
        self.temperature = nn.Parameter(torch.tensor(0.25, dtype=dtype))
        self.x = torch.randn(16, 8)
        if level is None:
            self.model, self.head = self.model.double(), self.head.double()
            self.temperature = nn.Parameter(self.temperature.detach().double())
            self.x = self.x.double()
        self.optimizer = kind(self.model.parameters(), lr=1e-2)
        if level is not None:
            self.amp = tritonamp.enable(self.model, self.optimizer, level=level)
        group = {"params": [*self.head.parameters(), self.temperature], "lr": 2e-2}
        self.optimizer.add_param_group(group)

    def loss(self) -> Tensor:
        y = self.head(self.model(self.x).to(self.head.weight.dtype))
        scaled = y.to(torch.promote_types(y.dtype, torch.float32)) * self.temperature.exp()
        return (scaled - 1).square().mean()

    def train(self, backward: Callable[[Tensor], None]) -> None:
        for _ in range(STEPS):
            backward(self.loss())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def foreign(self) -> list[Tensor]:
        return [*self.head.parameters(), self.temperature]


@pytest.fixture
def make() -> Iterator[Callable[..., Loop]]:
    yield from disabled_after(Loop)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_they_train_as_in_fp32(
    make: Callable[..., Loop], kind: Any, level: str, dtype: torch.dtype
) -> None:
    loop, exact = make(kind, dtype, level), Loop(kind, dtype)
    loop.train(loop.amp.backward)
    exact.train(lambda loss: loss.backward())
    skipped = loop.amp.stats()["skipped"]
    assert skipped == 0
    eps = torch.finfo(dtype if dtype in (torch.float16, torch.bfloat16) else torch.float16).eps
    for ours, value in zip(loop.foreign(), exact.foreign(), strict=True):
        assert ours.dtype is dtype  # half ones stay half, and have FP32 masters
        # each step moves by lr or less times what half activations lose, and the sum is rounded
        torch.testing.assert_close(ours.double(), value, rtol=4 * eps, atol=STEPS * 2e-2 * 8 * eps)
    loop.amp.disable()
    held = {p for group in loop.optimizer.param_groups for p in group["params"]}
    assert held == {*loop.model.parameters(), *loop.foreign()}
