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
    "clamp max": lambda huge: torch.clamp(huge, max=10),
    "minimum": lambda huge: torch.minimum(huge, torch.full_like(huge, 10)),
    "where": lambda huge: torch.where(huge > 10, 10.0, huge),
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


UNREAD: dict[str, Callable[[Tensor], Tensor]] = {
    "compared": lambda huge: (huge > 10).float(),
    "index": lambda huge: huge.argmax(-1).float(),
    "shape": torch.ones_like,
    "thrown away": lambda huge: (huge + 1).new_ones(2),
}


@pytest.mark.parametrize("name", UNREAD)
def test_an_overflow_that_reaches_no_result(name: str, device: torch.device) -> None:
    text = report(UNREAD[name], device, level="O2")
    assert "vanished overflow, forward" in text and "op mul at" in text
    assert "inf reached no result" in text and "it was harmless" in text
    assert "to do:" not in text and "nothing overflows" not in text


@pytest.mark.parametrize(("name", "op"), [("clamp max", "clamp"), ("minimum", "minimum")])
def test_where_it_vanished(name: str, op: str, device: torch.device) -> None:
    text = report(HARMLESS[name], device, level="O2")
    assert f"inf became a finite number in the model itself (Swallows), op {op} at" in text


def test_a_harmless_overflow_is_told_after_a_skip_too(device: torch.device) -> None:
    model = Swallows(lambda huge: torch.clamp(huge, max=10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = tritonamp.enable(model, optimizer, level="O2")
    x = torch.full((4, 1), 1.2, device=device)
    amp.backward(model(x * math.nan).sum())
    optimizer.step()
    text = amp.explain(replay=lambda: model(x).mean())
    amp.disable()
    assert text.startswith("step 1 skipped (1 of 1): data: ")
    assert "not reproduced: run again" in text and "vanished overflow, forward" in text
    assert "op clamp at" in text and "it was harmless" in text
    assert "replay=lambda" not in text and "to do:" not in text


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
