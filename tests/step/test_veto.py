"""``amp.veto``: a skip that the caller asks for changes no bit, and leaves the loss scale alone."""

from collections.abc import Callable
from typing import Any

import pytest
import runs
import torch
from helpers import same, snapshot
from runs import Training, in_two, started
from torch import Tensor

import tritonamp


class Vetoed(Training):
    def bits_and_scale(self) -> tuple[list[Tensor], Any]:
        return self.stored(), self.amp.scaler.state_dict()


start = started(Vetoed)


LEVELS: dict[str, Any] = {
    **{level: {} for level in runs.LEVELS},
    "O2 bf16": {"level": "O2", "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_a_veto_skips_and_nothing_moves(start: Any, level: str, as_tensor: bool) -> None:
    run = start(**{"level": level, **LEVELS[level]})
    run.step()
    before, scale = run.bits_and_scale()
    run.backward()
    run.amp.veto(torch.tensor(True, device=run.x.device) if as_tensor else True)
    run.finish()
    after, scale_after = run.bits_and_scale()
    assert same(before, after)
    assert scale == scale_after, "growth counts included"
    stats, last = run.amp.stats(), run.amp.history[-1]
    assert (stats["steps"], stats["skipped"], stats["vetoes"]) == (1, 1, 1)
    assert (last.cause, stats["last_skip_reason"]) == ("veto", "veto")
    assert run.amp.explain().startswith("step 2 skipped (1 of 2): veto: amp.veto was called")
    assert run.amp.metrics()["amp/skipped_veto"] == 1.0
    run.step()
    assert run.amp.stats()["steps"] == 2, "it holds for one step"


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("flags", [(False, False), (False, True), (True, False)])
def test_several_vetoes_combine_by_or(start: Any, flags: tuple[bool, bool], by_hand: bool) -> None:
    run = start()
    before = snapshot(run.model)
    run.backward(by_scaler=by_hand)
    for flag in flags:
        run.amp.veto(flag)
    run.finish(by_scaler=by_hand)
    assert run.amp.stats()["vetoes"] == any(flags)
    assert same(snapshot(run.model), before) == any(flags)
    assert run.amp.stats()["growth_tracker"] == (not any(flags))


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("backoff_on_fault", [False, True])
def test_a_veto_comes_before_an_overflow(start: Any, by_hand: bool, backoff_on_fault: bool) -> None:
    """A batch that another part has spoilt says nothing about the loss scale."""
    scaler = tritonamp.GradScaler("cpu", init_scale=8.0, backoff_on_fault=backoff_on_fault)
    run = start(scaler=scaler)
    run.backward(by_scaler=by_hand)
    run.model.first.weight.grad.fill_(float("inf"))
    run.amp.veto(True)
    run.finish(by_scaler=by_hand)
    assert (run.amp.stats()["scale"], run.amp.history[-1].cause) == (8.0, "veto")


def test_micro_batches_are_one_decision(start: Any) -> None:
    run = start()
    run.backward()
    run.amp.veto(True)
    run.backward()
    run.finish()
    assert (run.amp.stats()["skipped"], run.amp.history[-1].cause) == (1, "veto")


EARLY: dict[str, Callable[[Training], object]] = {
    **runs.EARLY,
    "by hand": lambda run: run.amp.scaler.unscale_(run.optimizer),
}


@pytest.mark.parametrize("largest", [1.0, float("inf")], ids=["clean", "overflow"])
@pytest.mark.parametrize("flags", [[True], [False], [False, True]], ids=str)
@pytest.mark.parametrize("early", EARLY)
def test_a_veto_after_an_early_decision(
    start: Any, early: str, flags: list[bool], largest: float
) -> None:
    """The same bits as before it: weights, moments, scale, window, counts and history."""
    fields = {"skip_outliers": 6.0, "on_nonfinite": "explain"}
    before, after = start(**fields), start(**fields)
    by_hand = early == "by hand"
    for run in (before, after):
        run.backward(by_scaler=by_hand)
        run.finish(by_scaler=by_hand)
        run.backward(by_scaler=by_hand)
        run.model.first.weight.grad[0, 0] *= largest
        for when in (before, after):
            if when is run:
                for flag in flags:
                    run.amp.veto(torch.tensor(flag, device=run.x.device))
            if when is before:
                EARLY[early](run)
        run.finish(by_scaler=by_hand)
    assert same(before.bits_and_scale()[0], after.bits_and_scale()[0])
    assert str(before.amp.state_dict()) == str(after.amp.state_dict()), "the window included"
    assert before.amp.stats() == after.amp.stats()
    assert before.amp.history == after.amp.history
    assert before.amp.explain() == after.amp.explain()
    outcome = "veto" if True in flags else "scale overflow" if largest > 1.0 else None
    assert after.amp.history[-1].cause == outcome


@pytest.mark.parametrize("largest", [1.0, float("inf")], ids=["clean", "overflow"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_veto_after_early_decisions_of_two_losses(start: Any, first: int, largest: float) -> None:
    """Both are made again, in whatever order they were made."""
    before, after = start(optimizer=in_two), start(optimizer=in_two)
    for run in (before, after):
        for optimizer in run.optimizers:
            run.amp.backward(run.loss(), optimizer)
        run.model.first.weight.grad[0, 0] *= largest
        for when in (before, after):
            if when is run:
                run.amp.veto(True)
            if when is before:
                for optimizer in (run.optimizers[first], run.optimizers[1 - first]):
                    run.amp.unscale_(optimizer)
        for optimizer in run.optimizers:
            optimizer.step()
    assert same(before.bits_and_scale()[0], after.bits_and_scale()[0])
    assert before.amp.state_dict() == after.amp.state_dict()
    stats = after.amp.stats()
    assert (stats["steps"], stats["skipped"], stats["scale"]) == (0, 2, 2.0**16)
    assert after.amp.history[-1].cause == "veto"


@pytest.mark.parametrize("largest", [1.0, float("inf")], ids=["clean", "overflow"])
def test_a_veto_of_a_decision_that_was_read(start: Any, largest: float) -> None:
    """It replaces the record that was read."""
    run = start()
    run.backward()
    run.model.first.weight.grad[0, 0] *= largest
    run.amp.clip_grad_norm_(0.1)
    assert len(run.amp.history) == 1
    run.amp.veto(True)
    run.finish()
    assert [(record.step, record.cause) for record in run.amp.history] == [(1, "veto")]
    skipped = {k: n for k, n in run.amp.metrics().items() if k.startswith("amp/skipped_") and n}
    assert skipped == {"amp/skipped_veto": 1.0}


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_no_veto_once_one_of_several_has_stepped(start: Any, backend: str) -> None:
    run = start(optimizer=in_two, backend=backend)
    run.backward()
    run.amp.clip_grad_norm_(0.1)
    run.optimizer.step()
    with pytest.raises(RuntimeError, match="before the first of the optimizers that a loss feeds"):
        run.amp.veto(True)
    run.optimizers[1].step()
    assert run.amp.stats()["vetoes"] == 0


def test_on_nonfinite_raise_does_not_raise(start: Any) -> None:
    run = start(on_nonfinite="raise")
    run.backward()
    run.amp.veto(True)
    run.finish()
    assert run.amp.history[-1].cause == "veto"


def test_schedulers_stay_with_the_optimizer(start: Any) -> None:
    """On a GPU a later call makes up for the one that followed the skip."""
    run = start()
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
    for flag in (False, True, False, False):
        run.backward()
        run.amp.veto(flag)
        run.finish()
        run.amp.step_schedulers(scheduler)
    assert scheduler.get_last_lr() == [1.25e-3]


@pytest.mark.parametrize("by_hand", [False, True])
def test_it_ends_where_the_gradients_are_dropped(start: Any, by_hand: bool) -> None:
    run = start()
    run.backward(by_scaler=by_hand)
    run.amp.veto(True)
    run.optimizer.zero_grad()
    if by_hand:
        run.amp.scaler.update()
    for _ in range(2):
        run.backward(by_scaler=by_hand)
        run.finish(by_scaler=by_hand)
    assert [record.cause for record in run.amp.history] == [None, None]


@pytest.mark.parametrize(
    "flag", [1, None, "yes", torch.tensor([True]), torch.tensor(1.0), torch.tensor(1)]
)
def test_what_is_no_flag(start: Any, flag: Any) -> None:
    run = start()
    run.backward()
    with pytest.raises(ValueError, match=r"flag: expected True, False or a 0-d tensor"):
        run.amp.veto(flag)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_before_the_backward_or_after_the_step(start: Any, level: str) -> None:
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


def test_torchfts_should_commit(start: Any) -> None:
    """The recipe of the README of integrations."""
    run, manager = start(), Manager([True, False, True])
    for _ in range(3):
        run.backward()
        run.amp.veto(not manager.should_commit())
        run.finish()
    assert [record.cause for record in run.amp.history] == [None, "veto", None]
