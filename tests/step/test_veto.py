"""``amp.veto``: somebody else's skip; it changes no bit, and leaves the loss scale alone."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from helpers import Net, disabled_after, same, snapshot, take_step
from torch import Tensor

import tritonamp


class Run:
    def __init__(self, device: torch.device, level: str = "O2", **fields: Any) -> None:
        torch.manual_seed(0)
        self.model = Net().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.amp = tritonamp.enable(self.model, self.optimizer, level=level, **fields)
        self.x = torch.ones(2, 6, device=device)

    def loss(self) -> Tensor:
        return self.model(self.x).square().mean()

    def backward(self, by_hand: bool = False) -> None:
        if by_hand:
            self.amp.scaler.scale(self.loss()).backward()
        else:
            self.amp.backward(self.loss())

    def step(self, by_hand: bool = False) -> None:
        if by_hand:
            self.amp.scaler.step(self.optimizer)
            self.amp.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> tuple[list[Tensor], Any]:
        return snapshot(self.model, self.optimizer), self.amp.scaler.state_dict()


@pytest.fixture
def start(device: torch.device) -> Iterator[Callable[..., Run]]:
    yield from disabled_after(partial(Run, device))


LEVELS = {
    "O0": {},
    "O1": {},
    "O2": {},
    "O2 bf16": {"level": "O2", "dtype": torch.bfloat16},
    "O3": {},
}


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_a_veto_skips_and_nothing_moves(
    start: Callable[..., Run], level: str, as_tensor: bool
) -> None:
    run = start(**{"level": level, **LEVELS[level]})
    take_step(run.amp, run.optimizer, run.loss())
    before, scale = run.state()
    run.backward()
    run.amp.veto(torch.tensor(True, device=run.x.device) if as_tensor else True)
    run.step()
    after, scale_after = run.state()
    assert same(before, after)
    assert scale == scale_after, "growth counts included"
    stats, last = run.amp.stats(), run.amp.history[-1]
    assert (stats["steps"], stats["skipped"], stats["vetoes"]) == (1, 1, 1)
    assert (last.cause, stats["last_skip_reason"]) == ("veto", "veto")
    assert run.amp.explain().startswith("step 2 skipped (1 of 2): veto: amp.veto was called")
    assert run.amp.metrics()["amp/skipped_veto"] == 1.0
    take_step(run.amp, run.optimizer, run.loss())
    assert run.amp.stats()["steps"] == 2, "it holds for one step"


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("flags", [(False, False), (False, True), (True, False)])
def test_several_vetoes_combine_by_or(
    start: Callable[..., Run], flags: tuple[bool, bool], by_hand: bool
) -> None:
    run = start()
    before = snapshot(run.model)
    run.backward(by_hand)
    for flag in flags:
        run.amp.veto(flag)
    run.step(by_hand)
    assert run.amp.stats()["vetoes"] == any(flags)
    assert same(snapshot(run.model), before) == any(flags)
    assert run.amp.stats()["growth_tracker"] == (not any(flags))


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("backoff_on_fault", [False, True])
def test_a_veto_comes_before_an_overflow(
    start: Callable[..., Run], by_hand: bool, backoff_on_fault: bool
) -> None:
    """What somebody else has spoilt says nothing about the loss scale."""
    scaler = tritonamp.GradScaler("cpu", init_scale=8.0, backoff_on_fault=backoff_on_fault)
    run = start(scaler=scaler)
    run.backward(by_hand)
    run.model.first.weight.grad.fill_(float("inf"))
    run.amp.veto(True)
    run.step(by_hand)
    assert (run.amp.stats()["scale"], run.amp.history[-1].cause) == (8.0, "veto")


def test_micro_batches_are_one_decision(start: Callable[..., Run]) -> None:
    run = start()
    run.backward()
    run.amp.veto(True)
    run.backward()
    run.step()
    assert (run.amp.stats()["skipped"], run.amp.history[-1].cause) == (1, "veto")


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("early", ["clip_grad_norm_", "unscale_"])
def test_a_veto_after_clipping(
    device: torch.device, start: Callable[..., Run], early: str, flag: bool
) -> None:
    """Where the decision can be undone, it is made again, with the same limit."""
    run, undisturbed = start(), start()
    if device.type != "cpu":
        pytest.skip("kernels keep no copies")
    for one in (run, undisturbed):
        one.backward()
        one.amp.clip_grad_norm_(0.1) if early == "clip_grad_norm_" else one.amp.unscale_()
    before = run.state()
    run.amp.veto(torch.tensor(flag))
    for one in (run, undisturbed):
        one.step()
    if flag:
        assert run.amp.stats()["growth_tracker"] == 0
        assert run.amp.history[-1].cause == "veto"
        assert same(snapshot(run.model), snapshot(start().model)), before
    else:
        assert same(run.state()[0], undisturbed.state()[0])
        assert run.amp.stats() == undisturbed.amp.stats()
        assert run.amp.history == undisturbed.amp.history


def test_on_nonfinite_raise_does_not_raise(start: Callable[..., Run]) -> None:
    run = start(on_nonfinite="raise")
    run.backward()
    run.amp.veto(True)
    run.step()
    assert run.amp.history[-1].cause == "veto"


def test_schedulers_stay_with_the_optimizer(start: Callable[..., Run]) -> None:
    """On a GPU a later call makes up for the one that followed the skip."""
    run = start()
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
    for flag in (False, True, False, False):
        run.backward()
        run.amp.veto(flag)
        run.step()
        run.amp.step_schedulers(scheduler)
    assert scheduler.get_last_lr() == [1.25e-3]


@pytest.mark.parametrize("by_hand", [False, True])
def test_it_ends_where_the_gradients_are_dropped(start: Callable[..., Run], by_hand: bool) -> None:
    run = start()
    run.backward(by_hand)
    run.amp.veto(True)
    run.optimizer.zero_grad()
    if by_hand:
        run.amp.scaler.update()
    for _ in range(2):
        run.backward(by_hand)
        run.step(by_hand)
    assert [record.cause for record in run.amp.history] == [None, None]


@pytest.mark.parametrize(
    "flag", [1, None, "yes", torch.tensor([True]), torch.tensor(1.0), torch.tensor(1)]
)
def test_what_is_no_flag(start: Callable[..., Run], flag: Any) -> None:
    run = start()
    run.backward()
    with pytest.raises(ValueError, match=r"flag: expected True, False or a 0-d tensor"):
        run.amp.veto(flag)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_before_the_backward_or_after_the_step(start: Callable[..., Run], level: str) -> None:
    run = start(level=level)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"between amp.backward\(loss\) and optimizer.step"):
            run.amp.veto(True)
        run.backward()
        run.optimizer.step()
    run.amp.disable()
    with pytest.raises(RuntimeError, match=r"amp.veto\(\): this model was disabled"):
        run.amp.veto(True)


class Manager:
    """Stands for torchft's: ``should_commit`` asks all replicas whether the step was good."""

    def __init__(self, answers: list[bool]) -> None:
        self._answers = iter(answers)

    def should_commit(self) -> bool:
        return next(self._answers)


def test_torchfts_should_commit(start: Callable[..., Run]) -> None:
    """The recipe of the README of integrations."""
    run, manager = start(), Manager([True, False, True])
    for _ in range(3):
        run.backward()
        run.amp.veto(not manager.should_commit())
        run.step()
    assert [record.cause for record in run.amp.history] == [None, "veto", None]
