"""A decision uses the scaler's own scale, and copies it only where the scale moves first.

Gradients are exact numbers here, and SGD at a learning rate of 1 subtracts them, so a factor of
two in a scale would show.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonamp
from tritonamp.step.decision import Decision

A, B = 0, 1


class Two(nn.Module):
    """Two weights with an optimizer each; the gradient of weight i is ``x``."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(2), torch.zeros(2)])

    def forward(self, i: int, x: float) -> Tensor:
        return (self.weights[i] * x).sum()


class Run:
    """Losses of one scaler, whose scale doubles with every step."""

    def __init__(self, device: torch.device, backend: str) -> None:
        self.model = Two().to(device)
        self.optimizers = [torch.optim.SGD([w], lr=1.0) for w in self.model.weights]
        options: dict[str, Any] = {"init_scale": 4.0, "growth_interval": 1}
        self.scaler = tritonamp.GradScaler(device.type, **options)
        how = {"level": "O1", "dtype": torch.float16, "scaler": self.scaler, "backend": backend}
        self.amp = tritonamp.enable(self.model, self.optimizers, **how)

    def backward(self, i: int, x: float) -> None:
        self.amp.backward(self.model(i, x), self.optimizers[i])

    @property
    def decisions(self) -> list[Decision]:
        return self.amp._parts.pending._decisions

    def ends_at(self, a: float, b: float, scale: float) -> None:
        """Assert both weights and the scale; the decisions are over."""
        assert [w.tolist() for w in self.model.weights] == [[a, a], [b, b]]
        assert self.scaler.get_scale() == scale
        assert not self.decisions
        self.amp.disable()


@pytest.fixture(params=["eager", "triton"])
def run(request: pytest.FixtureRequest, device: torch.device) -> Run:
    return Run(device, request.param)


def is_shared(run: Run, i: int = 0) -> bool:
    """Return whether the decision on the i-th pending loss has the scaler's own scale."""
    return run.decisions[i].scale.data_ptr() == run.scaler.scale_state.scale.data_ptr()


def test_a_single_loss_uses_the_scalers_own(run: Run) -> None:
    for _ in range(3):
        run.backward(A, 3.0)
        assert is_shared(run)
        run.optimizers[A].step()
        run.optimizers[A].zero_grad()
    run.ends_at(-9.0, 0.0, 32.0)


def test_the_second_of_two_losses_keeps_its_scale(run: Run) -> None:
    run.backward(A, 3.0)
    run.backward(B, 5.0)
    assert is_shared(run, A) and is_shared(run, B)
    run.optimizers[A].step()
    assert not is_shared(run), "that of B, which was scaled by 4"
    run.optimizers[B].step()
    run.ends_at(-3.0, -5.0, 16.0)


@pytest.mark.parametrize("inside", [True, False])
def test_a_backward_after_the_scale_has_moved_has_the_scale_of_its_loss(
    run: Run, inside: bool
) -> None:
    """Autograd has saved the scale, and multiplies by it now."""
    with run.amp.scale_loss(run.model(A, 3.0), run.optimizers[A]) as scaled:
        run.backward(B, 5.0)
        run.optimizers[B].step()
        if inside:
            scaled.backward()
    if not inside:
        scaled.backward()
    run.optimizers[A].step()
    run.ends_at(-3.0, -5.0, 16.0)


@pytest.mark.parametrize("how", ["update", "load"])
def test_the_user_may_move_the_scale_before_the_step(run: Run, how: str) -> None:
    run.backward(A, 3.0)
    if how == "update":
        run.scaler.update(64.0)
    else:
        run.scaler.load_state_dict({**run.scaler.state_dict(), "scale": 64.0})
    run.backward(A, 5.0)
    run.optimizers[A].step()
    run.ends_at(-8.0, 0.0, 128.0)


@pytest.mark.parametrize("vetoed", [True, False])
@pytest.mark.parametrize("early", [[A], [A, B], [B, A]])
def test_a_veto_decides_again_by_the_scales_of_before(
    run: Run, early: list[int], vetoed: bool
) -> None:
    """B is scaled by what the decision on A has made of the scale, which the veto takes back."""
    run.backward(A, 3.0)
    if early[0] == A:
        run.amp.unscale_(run.optimizers[A])
    run.backward(B, 5.0)
    for i in early:
        if i == B or early[0] == B:
            run.amp.unscale_(run.optimizers[i])
    run.amp.veto(vetoed)
    for optimizer in run.optimizers:
        optimizer.step()
    if vetoed:
        run.ends_at(0.0, 0.0, 4.0)
    else:
        run.ends_at(-3.0, -5.0, 16.0)


def test_a_batch_that_is_given_up_leaves_another_its_scale(run: Run) -> None:
    run.backward(A, 3.0)
    run.amp.unscale_(run.optimizers[A])
    run.backward(B, 5.0)
    run.optimizers[A].zero_grad()
    assert run.scaler.get_scale() == 4.0
    run.optimizers[B].step()
    run.ends_at(0.0, -5.0, 8.0)


def test_a_scaler_forgets_decisions_and_its_copies_have_none(run: Run) -> None:
    run.backward(A, 3.0)
    assert sum(user() is not None for user in run.scaler._users) == 1
    assert len(copy.deepcopy(run.scaler)._users) == 0
    run.optimizers[A].step()
    assert not any(user() for user in run.scaler._users)
    run.ends_at(-3.0, 0.0, 8.0)


def test_each_of_several_losses_is_judged_by_itself(run: Run) -> None:
    """Their sum is inf, and no fault."""
    big = 3e38
    for x in (1.0, 2.0):
        loss = run.model(A, x) + big
        run.amp.backward(loss, run.optimizers[A])
    run.optimizers[A].step()
    run.ends_at(-3.0, 0.0, 8.0)


def test_norms_that_are_kept_stay_as_they_were(device: torch.device) -> None:
    """Decisions share memory, and no later one writes to the results of another."""
    model = torch.nn.Linear(2, 1, bias=False, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.ones(1, 2, device=device)
    with tritonamp.enable(model, optimizer, level="O2", loss_scale=8.0) as amp:
        kept: list[torch.Tensor] = []
        for i in range(40):
            amp.backward(model(x).float().sum() * (i + 1))
            kept.append(amp.clip_grad_norm_(1.0))
            optimizer.step()
            optimizer.zero_grad()
    expected = [(i + 1) * 2**0.5 for i in range(40)]
    assert [norm.item() for norm in kept] == pytest.approx(expected, rel=1e-3)
