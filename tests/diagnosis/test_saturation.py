"""Overflows that later ops swallow: named with their line, and compared with FP32's result."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tritonamp

SWALLOWED: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": lambda huge: torch.tanh(huge / 9e4),
    "sigmoid": lambda huge: torch.sigmoid(huge / 9e4),
    "erf": lambda huge: torch.erf(huge / 9e4),
    "clamp": lambda huge: (huge / 9e4).clamp(-2, 2),
    "hardtanh": lambda huge: nn.functional.hardtanh(huge / 2e5),
    "relu6": lambda huge: nn.functional.relu6(huge / 3e4),
    "1/x": lambda huge: 5e4 / huge,
    "exp": lambda huge: torch.exp(-huge.abs() / 9e4),
    "softmax": lambda huge: torch.softmax(torch.stack([-huge / 9e4, torch.zeros_like(huge)]), 0),
}
HARMLESS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda huge: huge.clamp(-1, 1),
    "tanh": torch.tanh,
    "relu6": nn.functional.relu6,
    "masked softmax": lambda huge: torch.softmax(
        torch.stack([-huge.abs() - 1, torch.zeros_like(huge)], -1), -1
    ),
}


class Swallows(nn.Module):
    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.after = nn.Linear(1, 1, bias=False), after
        nn.init.constant_(self.up.weight, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.up(x) * 6e4)


def report(
    after: Callable[[Tensor], Tensor], device: torch.device, size: float = 1.2, **fields: object
) -> str:
    model = Swallows(after).to(device)
    x = torch.full((4, 1), size, device=device)
    amp = tritonamp.enable(model, **fields)
    text = amp.explain(replay=lambda: model(x))
    amp.disable()
    return text


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("name", SWALLOWED)
def test_a_swallowed_overflow_is_named(name: str, level: str, device: torch.device) -> None:
    text = report(SWALLOWED[name], device, level=level)
    assert "silent overflow, forward: the model itself (Swallows), op mul at" in text
    assert "return self.after(self.up(x) * 6e4)" in text
    assert "the result differs from FP32's by up to" in text


def test_by_how_much(device: torch.device) -> None:
    text = report(SWALLOWED["tanh"], device, level="O2")
    by = float(text.split("FP32's by up to ")[1].split(",")[0])
    assert by == pytest.approx(1 - math.tanh(0.8), abs=1e-3)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_overflow_is_said_to_be_harmless(name: str, device: torch.device) -> None:
    text = report(HARMLESS[name], device, level="O2")
    assert "vanished overflow, forward" in text and "it was harmless" in text
    assert "to do:" not in text


@pytest.mark.parametrize("fields", [{"dtype": torch.bfloat16}, {"dtype": torch.float16}])
def test_nothing_to_report(fields: dict[str, object], device: torch.device) -> None:
    size = 1.2 if fields["dtype"] is torch.bfloat16 else 0.5
    text = report(SWALLOWED["tanh"], device, size, level="O2", **fields)
    assert text.endswith("nothing overflows, nor does any overflow vanish on the way.")


def test_what_a_where_replaces_is_compared_with_fp32(device: torch.device) -> None:
    text = report(lambda huge: torch.where(huge.isinf(), 0, huge) / 9e4, device, level="O2")
    assert "vanished overflow, forward" in text and "to do:" in text
    assert "the result differs from FP32's by up to 0.8" in text
    assert "harmless" not in text
