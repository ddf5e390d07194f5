"""Gradient penalties that differentiate a scaled tensor, as scripts for torch.amp do."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonamp

SCALED, UNSCALED = "scaled", "unscaled"


def critic_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    return critic, torch.optim.Adam(critic.parameters(), 1e-3)


def losses_of(
    critic: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    form: str,
    casts: Callable[[], Any] = contextlib.nullcontext,
    steps: int = 24,
    fault: float = 0.0,
) -> list[float]:
    """Train as WGAN-GP does; ``fault`` times inf is added to each loss."""
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 16, requires_grad=True)
        with casts():
            scores = critic(x).float()
        if form == SCALED:
            (grad,) = torch.autograd.grad(scaler.scale(scores.sum()), x, create_graph=True)
            grad = grad * (1.0 / scaler.get_scale())
        else:
            (grad,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        # half, or the gradient of the last bias would be the scale itself, 65536
        loss = scores.mean() / 2 + (grad.float().norm(dim=1) - 1).square().mean()
        if fault:
            loss = loss + fault * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def run(level: str, form: str, **settings: Any) -> tuple[tritonamp.Amp, list[float]]:
    """Return the handle, still enabled, and the losses."""
    steps = {name: settings.pop(name) for name in ("steps", "fault") if name in settings}
    critic, optimizer = critic_and_optimizer()
    amp = tritonamp.enable(critic, optimizer, level=level, dtype=torch.float16, **settings)
    return amp, losses_of(critic, optimizer, amp.scaler, form, **steps)


def in_fp32() -> list[float]:
    critic, optimizer = critic_and_optimizer()
    return losses_of(critic, optimizer, torch.amp.GradScaler("cpu", enabled=False), UNSCALED)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_scale_falls_to_where_the_inner_gradient_fits(level: str) -> None:
    amp, losses = run(level, SCALED)
    causes = [record.cause for record in amp.history]
    assert causes[0] == "forward fault"  # 65536 is too much for the inner gradient
    assert causes[-12:] == [None] * 12
    assert amp.scaler.get_scale() == 2.0 ** (16 - amp.stats()["skipped"])
    assert losses[-1] < losses[1]
    amp.disable()


def test_scale_and_losses_are_those_of_torch() -> None:
    critic, optimizer = critic_and_optimizer()
    scaler = torch.amp.GradScaler("cpu")

    def casts() -> Any:
        return torch.autocast("cpu", torch.float16)

    of_torch = losses_of(critic, optimizer, scaler, SCALED, casts)
    amp, losses = run("O1", SCALED)
    assert amp.scaler.get_scale() == scaler.get_scale() < 2.0**16
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor(of_torch), rtol=5e-3, atol=1e-3, equal_nan=True
    )
    amp.disable()


def test_what_the_skip_says_cures_it(caplog: pytest.LogCaptureFixture) -> None:
    amp, _ = run("O2", SCALED, steps=1)
    told = "torch.autograd.grad(loss, x, create_graph=True)"  # the line of ``UNSCALED``
    said = str(amp.explain())
    for text in (said, caplog.messages[0]):
        assert "forward fault" in text and "the scale is lowered, but not below 1" in text
        assert told in text and "A lower scale cannot help" not in text
    amp.disable()
    amp, losses = run("O2", UNSCALED)
    assert amp.stats()["skipped"] == 0 and amp.scaler.get_scale() == 2.0**16
    assert losses == pytest.approx(in_fp32(), rel=1e-2, abs=1e-3)
    amp.disable()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_loss_that_is_always_inf_stops_at_a_scale_of_1(level: str) -> None:
    amp, _ = run(level, SCALED, fault=1.0)
    assert amp.scaler.get_scale() == 1.0 and amp.stats()["steps"] == 0
    amp.disable()


@pytest.mark.parametrize("form", [SCALED, UNSCALED])
def test_without_a_scaled_gradient_a_fault_leaves_the_scale(form: str) -> None:
    amp, _ = run("O2", form, fault=1.0, steps=3)
    is_scaled = form == SCALED
    assert amp.scaler.has_gradient_in_loss == is_scaled
    assert amp.scaler.get_scale() == (2.0**13 if is_scaled else 2.0**16)
    assert ("A lower scale cannot help" in str(amp.explain())) != is_scaled
    amp.disable()


def test_a_fixed_scale_stays(caplog: pytest.LogCaptureFixture) -> None:
    amp, _ = run("O2", SCALED, loss_scale=65536.0, steps=2)
    assert amp.scaler.get_scale() == 65536.0
    assert "is lowered" not in caplog.text and "forward fault" in caplog.text
    amp.disable()


@pytest.mark.parametrize("form", [SCALED, UNSCALED])
def test_a_scaler_without_enable(form: str) -> None:
    critic, optimizer = critic_and_optimizer()
    scaler = tritonamp.GradScaler("cpu", init_scale=16.0)
    losses_of(critic, optimizer, scaler, form, fault=1.0, steps=3)
    assert scaler.get_scale() == (2.0 if form == SCALED else 16.0)


def test_a_scaled_tensor_without_a_graph_is_left_alone() -> None:
    scaler = tritonamp.GradScaler("cpu")
    assert not scaler.scale(torch.ones(())).requires_grad
    x = torch.ones((), requires_grad=True)
    scaled: Tensor = scaler.scale(x)
    torch.autograd.grad(scaled, x)
    assert not scaler.has_gradient_in_loss
    # transforms of functions differentiate with a graph of their own
    grad = torch.func.grad(lambda x: scaler.scale(x.square()))(torch.tensor(3.0))
    assert grad == 6 * 65536.0
