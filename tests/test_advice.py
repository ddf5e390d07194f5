"""Each advice is followed in the very form in which it is printed."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import warnings_with
from torch import nn

import tritonamp

X = torch.linspace(-1, 1, 16).view(4, 4)


warned = warnings_with("")


@pytest.fixture
def messages(warned: Callable[[], list[str]]) -> Callable[[], list[str]]:
    """Our warnings so far, without the one about a first scale that is too high."""
    return lambda: [text for text in warned() if ": scale overflow: " not in text]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def assert_trains(model: nn.Module, optimizer: torch.optim.Optimizer, amp: tritonamp.Amp) -> None:
    """Train as the advice says; the loss must fall."""
    losses = []
    for _ in range(5):
        loss = (model(X) - 1).square().mean()
        losses.append(float(loss.detach()))
        amp.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]


def test_an_optimizer_on_bare_half_weights(messages: Callable[[], list[str]]) -> None:
    model = net()
    amp = tritonamp.enable(model, level="O2")
    optimizer = sgd(model)
    model(X).square().mean().backward()
    optimizer.step()
    (warning,) = messages()
    assert "Call amp.disable(), make the optimizer then, hand it over" in warning
    amp.disable()
    optimizer = sgd(model)
    with tritonamp.enable(model, optimizer, level="O2") as amp:
        optimizer.zero_grad()
        assert_trains(model, optimizer, amp)
    assert messages() == [warning]


def test_enabled_without_an_optimizer(messages: Callable[[], list[str]]) -> None:
    model = net()
    amp = tritonamp.enable(model, level="O2")
    told = r"call amp.disable\(\), then tritonamp.enable\(model, optimizer, ...\)"
    with pytest.raises(RuntimeError, match=told):
        amp.backward(model(X).square().mean())
    amp.disable()
    optimizer = sgd(model)
    with tritonamp.enable(model, optimizer, level="O2") as amp:
        assert_trains(model, optimizer, amp)
    assert messages() == []


@pytest.mark.parametrize("parts", [1, 2], ids=["of the model", "of a second module"])
def test_an_optimizer_that_was_not_handed_over(
    parts: int, messages: Callable[[], list[str]]
) -> None:
    first, second = net(), nn.Linear(1, 1)
    model = nn.Sequential(first, second)
    optimizer, other = sgd(first), sgd(second)
    amp = tritonamp.enable(model, optimizer, level="O2")
    amp.backward((model(X) - 1).square().mean())
    other.step()
    (warning,) = messages()
    assert "amp = tritonamp.enable(model, [optimizer, other]): a list of modules" in warning
    amp.disable()
    for each in (optimizer, other):
        each.zero_grad()
    enabled = model if parts == 1 else [first, second]
    with tritonamp.enable(enabled, [optimizer, other], level="O2") as amp:
        for _ in range(3):
            amp.backward((model(X) - 1).square().mean())
            for each in (optimizer, other):
                each.step()
                each.zero_grad()
    assert messages() == [warning]


def test_a_plain_backward(messages: Callable[[], list[str]]) -> None:
    model = net()
    optimizer = sgd(model)
    with tritonamp.enable(model, optimizer, level="O2") as amp:
        (model(X) - 1).square().mean().backward()
        told = r"clear them, optimizer.zero_grad\(\), and call amp.backward\(loss\)"
        with pytest.raises(RuntimeError, match=told):
            optimizer.step()
        optimizer.zero_grad()
        assert_trains(model, optimizer, amp)
    assert messages() == []


def test_gradients_that_are_too_small(messages: Callable[[], list[str]]) -> None:
    model = net()
    optimizer = sgd(model)
    with tritonamp.enable(model, optimizer, level="O2", loss_scale=1.0) as amp:
        amp.watch(every=1)
        for _ in range(4):
            amp.backward(model(X).square().mean() * 1e-12)
            optimizer.step()
            optimizer.zero_grad()
        amp.stats()
        assert any("amp.ranges() after the next step, show where" in text for text in messages())
        zeros = [r for r in amp.ranges() if r.direction == "backward" and r.zeros]
    assert zeros


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("state", "8bit", "Muon"),
        ("state", "bf16", "Muon"),
        ("state", "bf16", "NAdam"),
        ("masters", "packed", "NAdam"),
    ],
)
def test_one_of_two_optimizers_cannot(field: str, value: str, kind: str) -> None:
    model = net()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    other = getattr(torch.optim, kind)(matrices, lr=0.1)
    adamw = torch.optim.AdamW(vectors, lr=0.1)
    told = rf"got {kind}.*: leave {field} out, or give it to other optimizers alone, "
    told += re.escape(f"tritonamp.optim.AdamW(..., {field}='{value}')")
    with pytest.raises(ValueError, match=told):
        tritonamp.enable(model, [other, adamw], level="O2", **{field: value})
    fields: dict[str, Any] = {field: value}
    adamw = tritonamp.optim.AdamW(vectors, lr=0.1, **fields)
    with tritonamp.enable(model, [other, adamw], level="O2") as amp:
        losses = []
        for _ in range(5):
            losses.append((model(X) - 1).square().mean())
            amp.backward(losses[-1])
            for each in (other, adamw):
                each.step()
                each.zero_grad()
        assert losses[-1] < losses[0]
        # the optimizer steps on the half parameters where their masters are packed
        (group,) = adamw.param_groups
        kept = {p.dtype for p in group["params"]} | {
            s["exp_avg"].dtype for s in adamw.state.values()
        }
        assert {"8bit": torch.uint8, "bf16": torch.bfloat16, "packed": torch.float16}[value] in kept


@pytest.mark.parametrize(("field", "value"), [("state", "8bit"), ("masters", "packed")])
def test_a_differentiable_optimizer(field: str, value: str) -> None:
    fields: dict[str, Any] = {field: value}
    model = net()
    told = "leave differentiable out, or, for tensors that are no leaves and need it, leave "
    with pytest.raises(ValueError, match=told + f"{field} out"):
        tritonamp.optim.AdamW(model.parameters(), lr=0.1, differentiable=True, **fields)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, differentiable=True)
    with pytest.raises(ValueError, match=told + f"{field} out"):
        tritonamp.enable(model, optimizer, level="O2", **fields)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with tritonamp.enable(model, optimizer, level="O2", **fields) as amp:
        assert_trains(model, optimizer, amp)
    start = torch.ones(2, requires_grad=True)
    param = start.clone()
    param.grad = start.detach().clone()
    tritonamp.optim.AdamW([param], lr=0.1, differentiable=True).step()
    assert torch.autograd.grad(param.sum(), start)[0].any()
