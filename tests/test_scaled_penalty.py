"""Gradient penalties that differentiate a scaled tensor, as scripts for torch.amp do."""

import contextlib
import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonamp

SCALED, UNSCALED, BACKWARD = "scaled", "unscaled", " and amp.backward"


def critic_and_optimizer(device: Any = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)).to(device)
    return critic, torch.optim.Adam(critic.parameters(), 1e-3)


def losses_of(
    critic: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    form: str,
    casts: Callable[[], Any] = contextlib.nullcontext,
    steps: int = 24,
    fault: float = 1.0,
) -> list[float]:
    """Train as WGAN-GP does; the form says what is scaled. Losses are multiplied by ``fault``."""
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 16).to(next(critic.parameters()).device).requires_grad_()
        with casts():
            scores = critic(x).float()
        if form.startswith(UNSCALED):
            (grad,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        else:
            (grad,) = torch.autograd.grad(scaler.scale(scores.sum()), x, create_graph=True)
            grad = grad * (1.0 / scaler.get_scale())
        # half, or the gradient of the last bias would be the scale itself, 65536
        loss = scores.mean() / 2 + (grad.float().norm(dim=1) - 1).square().mean()
        loss = loss * fault
        if form.endswith(BACKWARD):
            tritonamp.handle(critic).backward(loss)
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    return losses


def run(
    level: str, form: str, device: Any = "cpu", **settings: Any
) -> tuple[tritonamp.Amp, list[float]]:
    """Return the handle, still enabled, and the losses."""
    steps = {name: settings.pop(name) for name in ("steps", "fault") if name in settings}
    critic, optimizer = critic_and_optimizer(device)
    amp = tritonamp.enable(critic, optimizer, level=level, dtype=torch.float16, **settings)
    return amp, losses_of(critic, optimizer, amp.scaler, form, **steps)


def in_fp32() -> list[float]:
    critic, optimizer = critic_and_optimizer()
    return losses_of(critic, optimizer, torch.amp.GradScaler("cpu", enabled=False), UNSCALED)


FORMS = [SCALED, SCALED + BACKWARD]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_scale_falls_to_where_the_inner_gradient_fits(
    device: torch.device, level: str, form: str
) -> None:
    amp, losses = run(level, form, device)
    causes = [record.cause for record in amp.history]
    assert causes[0] == "scale overflow"  # 65536 is too much for the inner gradient
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


@pytest.mark.parametrize("settings", [{}, {"on_nonfinite": "raise"}, {"on_nonfinite": "heal"}])
@pytest.mark.parametrize("form", FORMS)
def test_a_skip_is_one_of_the_scale(form: str, settings: dict[str, Any], caplog) -> None:
    amp, _ = run("O2", form, steps=1, **settings)
    said = str(amp.explain())
    assert caplog.messages[0].startswith(said)
    assert said == (
        "step 1 skipped (1 of 1): scale overflow: the loss contains the gradient of a scaled "
        "tensor, and at loss scale 65536 the gradients of 2 parameter(s) were NaN: 0.weight, "
        "2.weight. The scale was lowered; single skips of this kind are how it finds its "
        "level."
    )
    assert amp.stats()["healed"] == []
    amp.disable()


def test_the_gradient_of_a_sum_needs_no_scale() -> None:
    amp, losses = run("O2", UNSCALED)
    assert amp.stats()["skipped"] == 0 and amp.scaler.get_scale() == 2.0**16
    assert losses == pytest.approx(in_fp32(), rel=1e-2, abs=1e-3)
    amp.disable()


@pytest.mark.parametrize("form", [*FORMS, UNSCALED])
def test_faults_that_no_scale_helps(form: str) -> None:
    """As with torch, the scale falls where it may be the cause, and only there."""
    amp, _ = run("O2", form, fault=math.nan, steps=3)
    assert amp.scaler.get_scale() == (2.0**16 if form == UNSCALED else 2.0**13)
    assert {record.cause for record in amp.history} == (
        {"forward fault"} if form == UNSCALED else {"scale overflow"}
    )
    amp.disable()


@pytest.mark.parametrize("by", ["", BACKWARD])
def test_the_next_losses_count_again(by: str) -> None:
    """A penalty in some steps, as for lazy regularisation, says nothing about the others."""
    critic, optimizer = critic_and_optimizer()
    amp = tritonamp.enable(critic, optimizer, level="O2", dtype=torch.float16)
    scales = []
    for form, fault in ((SCALED, 1.0), (UNSCALED, math.nan), (SCALED, 1.0), (UNSCALED, math.nan)):
        losses_of(critic, optimizer, amp.scaler, form + by, steps=2, fault=fault)
        scales.append(amp.scaler.get_scale())
    assert scales[0] == scales[1] and scales[2] == scales[3]
    causes = [record.cause for record in amp.history]
    assert causes[2:4] == causes[6:8] == ["forward fault"] * 2
    amp.disable()


def test_a_fixed_scale_stays() -> None:
    amp, _ = run("O2", SCALED, loss_scale=65536.0, steps=2)
    assert amp.scaler.get_scale() == 65536.0
    assert "give a lower loss_scale, or 'dynamic'" in str(amp.explain())
    amp.disable()


def test_in_bfloat16_a_fault_is_one() -> None:
    critic, optimizer = critic_and_optimizer()
    amp = tritonamp.enable(critic, optimizer, level="O2", dtype=torch.bfloat16)
    losses_of(critic, optimizer, amp.scaler, SCALED, steps=1, fault=math.nan)
    assert amp.stats()["forward_faults"] == 1
    amp.disable()


@pytest.mark.parametrize("form", [SCALED, UNSCALED])
def test_a_scaler_without_enable(device: torch.device, form: str) -> None:
    critic, optimizer = critic_and_optimizer(device)
    scaler = tritonamp.GradScaler(device.type, init_scale=16.0)
    losses_of(critic, optimizer, scaler, form, fault=math.nan, steps=3)
    assert scaler.get_scale() == (16.0 if form == UNSCALED else 2.0)
    state = vars(pickle.loads(pickle.dumps(scaler)))
    assert not state["has_gradient_in_loss"]


def test_what_is_noted() -> None:
    scaler = tritonamp.GradScaler("cpu")
    x = torch.ones((), requires_grad=True)

    def notes(*losses: Tensor) -> list[bool]:
        return [(scaler.scale(loss), scaler.has_gradient_in_loss)[1] for loss in losses]

    assert notes(torch.ones(()), x.detach()) == [False, False]
    scaled = scaler.scale(x.square())
    torch.autograd.grad(scaled, x, retain_graph=True)
    assert notes(x * 2) == [False]
    torch.autograd.grad(scaled, x, create_graph=True)
    assert notes(x * 2) == [True]
    scaler.update(8.0)
    assert notes(x * 2) == [False]
    # transforms of functions differentiate with a graph of their own
    grad = torch.func.grad(lambda x: scaler.scale(x.square()))(torch.tensor(3.0))
    assert grad == 6 * 8.0


@pytest.mark.parametrize("by", ["", BACKWARD])
def test_the_loss_after_the_one_with_the_penalty_is_judged(by: str) -> None:
    """A loop of a GAN: the penalty is in the loss of the critic alone."""
    critic, optimizer = critic_and_optimizer()
    maker = nn.Linear(4, 16)
    optimizers = [optimizer, torch.optim.Adam(maker.parameters())]
    amp = tritonamp.enable([critic, maker], optimizers, level="O2", dtype=torch.float16)
    losses_of(critic, optimizer, amp.scaler, SCALED + by, steps=8)
    scale, skipped = amp.scaler.get_scale(), amp.stats()["skipped"]
    x = torch.randn(8, 16, requires_grad=True)
    scores = critic(x).float()
    (grad,) = torch.autograd.grad(amp.scaler.scale(scores.sum()), x, create_graph=True)
    loss = scores.mean() + (grad.float().norm() / scale - 1).square()
    of_maker = critic(maker(torch.randn(8, 4))).float().mean() * math.nan
    for each, its_loss in zip(optimizers, (loss, of_maker), strict=True):
        if by:
            amp.backward(its_loss, each)
            each.step()
        else:
            amp.scaler.scale(its_loss).backward()
            amp.scaler.step(each)
            amp.scaler.update()
        each.zero_grad()
    assert amp.stats()["skipped"] == skipped + 1 and amp.scaler.get_scale() == scale
    assert amp.history[-1].cause == "forward fault"
    amp.disable()


@pytest.mark.parametrize("by", ["", BACKWARD])
def test_scores_that_are_nan_are_a_fault(by: str) -> None:
    critic, optimizer = critic_and_optimizer()
    amp = tritonamp.enable(critic, optimizer, level="O2", dtype=torch.float16)
    with torch.no_grad():
        critic[0].weight[0, 0] = math.nan
    losses_of(critic, optimizer, amp.scaler, SCALED + by, steps=2)
    assert amp.scaler.get_scale() == 2.0**16
    assert amp.stats()["forward_faults"] == 2
    amp.disable()


def test_a_step_without_update_is_one_of_the_scale() -> None:
    critic, optimizer = critic_and_optimizer()
    amp = tritonamp.enable(critic, optimizer, level="O2", dtype=torch.float16)
    for _ in range(2):
        x = torch.randn(8, 16, requires_grad=True)
        scores = critic(x).float()
        (grad,) = torch.autograd.grad(amp.scaler.scale(scores.sum()), x, create_graph=True)
        amp.scaler.scale(scores.mean() + grad.float().norm()).backward()
        optimizer.step()  # and no ``scaler.update``
        optimizer.zero_grad()
    assert amp.scaler.get_scale() == 2.0**14
    assert amp.explain().count("the loss contains the gradient of a scaled tensor") == 1
    amp.disable()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_knows_no_graph(copied: Callable[[Any], Any]) -> None:
    scaler = tritonamp.GradScaler("cpu")
    x = torch.ones((), requires_grad=True)
    torch.autograd.grad(scaler.scale(x.square()), x, create_graph=True)
    other = copied(scaler)
    other.scale(x)
    assert not other.has_gradient_in_loss
    scaler.scale(x)
    assert scaler.has_gradient_in_loss and not copied(scaler).has_gradient_in_loss


def test_a_node_does_not_keep_the_scaler() -> None:
    scaler = tritonamp.GradScaler("cpu")
    scaler.last = scaler.scale(torch.ones((), requires_grad=True) * 2)
    known = weakref.ref(scaler)
    del scaler
    gc.collect()
    assert known() is None
