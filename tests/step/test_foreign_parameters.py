"""Parameters of no enabled model that ``add_param_group`` brings: of a loss, a temperature."""

from typing import Any

import pytest
import torch
from runs import Training, batch, started_on_cpu
from torch import Tensor, nn

OPTIMIZERS = "AdamW", "SGD", "NAdam"
STEPS = 6


class WithForeign(Training):
    """Trains a head and a log-temperature that belong to the loss.

    Args:
        dtype: dtype of the loss's parameters.
        level: level of ``enable``; None trains everything in float64, not enabled.
    """

    def __init__(self, kind: str, dtype: torch.dtype, level: str | None) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.head = nn.Linear(4, 4).to(dtype)
        self.temperature = nn.Parameter(torch.tensor(0.25, dtype=dtype))
        if level is None:
            model, self.head = model.double(), self.head.double()
            self.temperature = nn.Parameter(self.temperature.detach().double())
        super().__init__(model, kind, level)
        self.x = batch(0, 16, 8, dtype=torch.float64 if level is None else torch.float32)
        self.optimizer.add_param_group({"params": self.foreign(), "lr": 2e-2})

    def loss(self, x: Tensor | None = None) -> Tensor:
        y = self.head(self.model(self.x).to(self.head.weight.dtype))
        scaled = y.to(torch.promote_types(y.dtype, torch.float32)) * self.temperature.exp()
        return (scaled - 1).square().mean()

    def foreign(self) -> list[Tensor]:
        return [*self.head.parameters(), self.temperature]


start = started_on_cpu(WithForeign)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_they_train_as_in_fp32(start: Any, kind: str, level: str, dtype: torch.dtype) -> None:
    loop, exact = start(kind, dtype, level), WithForeign(kind, dtype, None)
    for _ in range(STEPS):
        loop.step()
        exact.step()
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
