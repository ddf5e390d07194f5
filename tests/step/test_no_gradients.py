"""A step without any gradients does nothing and counts for nothing: enable, GradScaler, apex."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Net, same, snapshot
from runs import LEVELS, Training, batch, named, started
from torch import nn

import tritonamp
from tritonamp.apex import amp as apex_amp
from tritonamp.apex.amp import _amp_state
from tritonamp.apex.fp16_utils import FP16_Optimizer

MAKERS = named("AdamW", "SGD momentum", "NAdam")  # which steps by itself
FOREIGN = "no amp.backward\\(loss\\) fed this optimizer"  # gradients of a plain loss.backward()


class WithoutGradients(Training):
    """A run of which calls are made that must change nothing."""

    def assert_nothing(self, call: Callable[[], Any]) -> None:
        before, stats, steps = snapshot(self.optimizer), self.amp.stats(), len(self.amp.history)
        call()
        assert same(before, snapshot(self.optimizer)) and self.amp.stats() == stats
        assert len(self.amp.history) == steps


start = started(WithoutGradients)


@pytest.mark.parametrize("optimizer", ["AdamW", "NAdam"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("by_scaler", [False, True], ids=["step", "scaler.step"])
def test_enabled(start: Any, level: str, optimizer: str, by_scaler: bool) -> None:
    """Before the first backward and after, after a step, a skip, and a model that was cleared."""
    run = start(level=level, optimizer=optimizer)
    scaler = run.amp.scaler

    def no_op() -> None:
        if by_scaler:
            scaler.unscale_(run.optimizer)
            scaler.step(run.optimizer)
            scaler.update()
        else:
            run.optimizer.step()

    run.assert_nothing(no_op)
    run.step()
    run.assert_nothing(no_op)
    run.step(factor=float("nan"))
    run.assert_nothing(no_op)
    run.loss()  # a forward alone
    run.assert_nothing(no_op)
    run.step()
    assert run.amp.stats() == {**run.amp.stats(), "steps": 2, "skipped": 1}


@pytest.mark.parametrize("between", ["", "clip_grad_norm_", "unscale_"])
@pytest.mark.parametrize("clear", ["model", "optimizer"])
def test_cleared_gradients(start: Any, between: str, clear: str) -> None:
    """A loss whose gradients are gone decides nothing, unless it was decided on before."""
    run = start()
    run.step()
    run.backward()
    getattr(run, clear).zero_grad()
    if between == "clip_grad_norm_":
        assert float(run.amp.clip_grad_norm_(1.0)) == 0.0
    elif between:
        assert run.amp.unscale_() == []
    run.assert_nothing(run.optimizer.step)
    assert run.amp.stats()["steps"] == 1
    run.step()
    assert run.amp.stats()["steps"] == 2


def test_a_loss_that_reaches_one_of_two_optimizers(device: torch.device) -> None:
    """One decision, one step: the schedule of the other one stays, too."""
    models = [Net().to(device), Net().to(device)]
    optimizers = [MAKERS["AdamW"](m.parameters(), lr=1e-2) for m in models]
    with tritonamp.enable(models, optimizers, level="O2") as amp:
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 1) for o in optimizers]
        still = snapshot(optimizers[1])
        for _ in range(3):
            amp.backward(
                models[0](batch(0, device=device)).square().mean()
            )  # feeds both, for all that amp knows
            for optimizer in reversed(optimizers):
                optimizer.step()
                optimizer.zero_grad()
            amp.step_schedulers(*schedulers)
        assert same(still, snapshot(optimizers[1]))
        assert amp.stats()["steps"] == 3
        assert [s.last_epoch for s in schedulers] == [3, 0]


def test_schedulers_do_not_warn(start: Any) -> None:
    """torch's scheduler sees that ``step`` was called; ``step_schedulers`` that none was taken."""
    run = start()
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.optimizer.step()
        run.amp.step_schedulers(scheduler)
        assert scheduler.last_epoch == 0
        scheduler.step()
        assert scheduler.last_epoch == 1


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_plain_gradients_stay_an_error(start: Any, level: str) -> None:
    run = start(level=level)
    run.optimizer.step()
    run.loss().backward()
    with pytest.raises(RuntimeError, match=FOREIGN):
        run.optimizer.step()
    with pytest.raises(RuntimeError, match=FOREIGN):
        run.amp.scaler.step(run.optimizer)


SCALED = {**MAKERS, **named("our AdamW", "fused AdamW")}


@pytest.mark.parametrize("optimizer", SCALED)
@pytest.mark.parametrize("unscale", [False, True])
def test_scaler_alone(device: torch.device, optimizer: str, unscale: bool) -> None:
    model = nn.Linear(6, 3).to(device)
    opt = SCALED[optimizer](model.parameters(), lr=1e-2)
    scaler = tritonamp.GradScaler(device.type, growth_interval=2)

    def loop(with_gradients: bool) -> None:
        if with_gradients:
            scaler.scale(model(batch(0, device=device)).square().mean()).backward()
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()

    start = snapshot(opt)
    loop(False)
    assert same(start, snapshot(opt)) and scaler.get_scale() == 2.0**16
    loop(True)
    before = snapshot(opt)
    for _ in range(3):
        loop(False)
    assert same(before, snapshot(opt)) and not same(start, before)
    assert scaler.state_dict()["_growth_tracker"] == 1 and scaler.get_scale() == 2.0**16
    loop(True)
    assert scaler.get_scale() == 2.0**17


def test_what_unscaling_has_found_counts_though_gradients_are_cleared(
    device: torch.device,
) -> None:
    """As in torch: whoever drops a bad batch wants a lower scale for the next one."""
    model = nn.Linear(6, 3).to(device)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = tritonamp.GradScaler(device.type)
    scaler.scale(model(batch(0, device=device)).square().mean()).backward()
    model.weight.grad[0, 0] = float("inf")
    scaler.unscale_(opt)
    opt.zero_grad()
    scaler.step(opt)
    scaler.update()
    assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("optimizer", ["SGD momentum", "our AdamW", "fused AdamW"])
@pytest.mark.parametrize("value", [1.0, float("inf")])
def test_gradients_that_come_after_unscaling(
    device: torch.device, optimizer: str, value: float
) -> None:
    """They are taken for true ones, and looked at."""
    model = nn.Linear(6, 3).to(device)
    opt = SCALED[optimizer](model.parameters(), lr=1e-2)
    scaler = tritonamp.GradScaler(device.type)
    scaler.scale(torch.ones((), device=device, requires_grad=True)).backward()
    scaler.unscale_(opt)
    for p in model.parameters():
        p.grad = torch.full_like(p, value)
    before = snapshot(opt)[:2]
    scaler.step(opt)
    scaler.update()
    assert same(before, snapshot(opt)[:2]) is (value != 1.0)
    assert scaler.get_scale() == (2.0**16 if value == 1.0 else 2.0**15)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_apex(device: torch.device, opt_level: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = Net().to(device)
    optimizer = MAKERS["SGD momentum"](model.parameters(), lr=1e-2)
    try:
        model, optimizer = apex_amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)

        def no_op() -> None:
            before, scale = snapshot(optimizer), apex_amp.state_dict()
            optimizer.step()
            assert same(before, snapshot(optimizer)) and apex_amp.state_dict() == scale

        no_op()
        with apex_amp.scale_loss(
            model(batch(0, device=device)).square().mean(), optimizer
        ) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        no_op()
        if opt_level == "O2":
            model(batch(0, device=device)).square().mean().backward()
            with pytest.raises(RuntimeError, match=FOREIGN):
                optimizer.step()
    finally:
        _amp_state.handle._deactivate()


def test_fp16_optimizer(device: torch.device) -> None:
    """The overflow of an earlier step is not of this one."""
    model = nn.Linear(6, 3).to(device).half()
    optimizer = FP16_Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True, verbose=False
    )
    optimizer.step()
    for value in (1.0, float("inf")):
        for p in model.parameters():
            p.grad = torch.full_like(p, value)
        optimizer.update_master_grads()
        optimizer.step()
    optimizer.zero_grad(set_grads_to_None=True)
    before, scale = snapshot(optimizer.optimizer), dict(vars(optimizer.loss_scaler))
    optimizer.step()
    assert same(before, snapshot(optimizer.optimizer)) and vars(optimizer.loss_scaler) == scale
