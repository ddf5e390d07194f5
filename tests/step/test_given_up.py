"""A batch that is given up after an early decision: gradients are cleared, and no step follows."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import runs
import torch
from helpers import same, snapshot
from runs import Training, in_two, started_on_cpu

import tritonamp

INF = float("inf")
WARM = 3


class GivenUp(Training):
    """A run that has taken a few steps, whose next batch a test spoils and gives up."""

    def __init__(self, interval: int = WARM + 1, **fields: Any) -> None:
        device = torch.device(fields.get("device", "cpu"))
        scaler = tritonamp.GradScaler(device.type, init_scale=8.0, growth_interval=interval)
        super().__init__(**{"scaler": scaler, "dtype": torch.bfloat16, **fields})
        for _ in range(WARM):
            self.step()

    def spoilt(self, spoil: float = 0.0, factor: float = 1.0, by_scaler: bool = False) -> None:
        """Backpropagate a loss times ``factor``; ``spoil`` becomes a gradient."""
        self.backward(self.loss() * factor, by_scaler)
        if spoil:
            self.model.norm.weight.grad[0] = spoil

    def found(self) -> Any:
        """All that decisions move."""
        state = self.amp.state_dict()
        records = [record[:-2] for record in self.amp.history]
        stats = {k: v for k, v in self.amp.stats().items() if k not in ("time", "seconds")}
        weights = [*self.optimizers, self.model]
        return state["loss_scalers"], state["counts"], state["outliers"], records, stats, weights


start = started_on_cpu(GivenUp)


def same_runs(a: GivenUp, b: GivenUp) -> bool:
    *told, weights = a.found()
    *expected, others = b.found()
    assert told == expected
    return same(snapshot(*weights), snapshot(*others))


EARLY: dict[str, Callable[[Training], object]] = {
    **runs.EARLY,
    "clip twice": lambda run: (run.amp.clip_grad_norm_(1.0), run.amp.clip_grad_norm_(0.1)),
}


def with_zeros(run: GivenUp) -> None:
    for optimizer in run.optimizers:
        optimizer.zero_grad(set_to_none=False)


def by_model(run: GivenUp) -> None:
    run.model.zero_grad()


def by_hand(run: GivenUp) -> None:
    for param in (*run.model.parameters(), *run.amp.master_params()):
        param.grad = None


# what to do, and whether it is seen before the next backward
CLEARS = {Training.zero_grad: True, with_zeros: True, by_model: False, by_hand: False}


@pytest.mark.parametrize("read", [False, True], ids=["unread", "read"])
@pytest.mark.parametrize("two", [False, True], ids=["one", "two"])
@pytest.mark.parametrize("clear", CLEARS)
@pytest.mark.parametrize("early", EARLY)
def test_a_clean_batch_never_was(
    start: Any, early: str, clear: Any, two: bool, read: bool, device: torch.device
) -> None:
    """Scale, growth, window, counts, history and weights are those of a run without it."""
    run, without = (
        start(optimizer=in_two if two else "AdamW", skip_outliers=6.0) for _ in range(2)
    )
    run.spoilt(factor=3.0)
    EARLY[early](run)
    if read:
        assert run.amp.stats()["steps"] == WARM + 1, "decided, and not yet given up"
    clear(run)
    if CLEARS[clear]:
        assert same_runs(run, without)
    for each in (run, without):
        each.step()
        each.step()
    assert same_runs(run, without)


SPOILT = {
    "scale overflow": {"spoil": INF},
    "forward fault": {"factor": INF},
    "huge gradient": {"spoil": 2e33},
}
EARLY_SKIPS = [*itertools.product(SPOILT, ["clip", "unscale", "both"])]
EARLY_SKIPS = [case for case in EARLY_SKIPS if case[0] != "huge gradient" or case[1] == "unscale"]


@pytest.mark.parametrize("read", [False, True], ids=["unread", "read"])
@pytest.mark.parametrize("clear", CLEARS)
@pytest.mark.parametrize(("cause", "early"), EARLY_SKIPS)
def test_one_to_skip_is_a_skip(start: Any, cause: str, early: str, clear: Any, read: bool) -> None:
    """As one that the step would have skipped: a scale that is too high backs off."""
    run, stepped = (start(optimizer=in_two) for _ in range(2))
    for each in (run, stepped):
        each.spoilt(**SPOILT[cause])
        EARLY[early](each)
    if read:
        run.amp.stats()
    clear(run)
    stepped.finish()
    for each in (run, stepped):
        each.step()
    assert same_runs(run, stepped)
    assert run.causes == [None] * WARM + [cause, None]
    assert (run.amp.stats()["scale"] == 4.0) == (cause == "scale overflow")


def test_a_loop_that_drops_what_is_not_finite_finds_its_scale(start: Any) -> None:
    """Gradients overflow down to a scale of 2^-3."""
    run = start(dtype=torch.float16, interval=1000)
    limit = 65504.0 / 8
    taken = 0
    for _ in range(20):
        run.backward()
        run.model.norm.weight.grad[0] = INF if run.amp.stats()["scale"] > 0.125 else limit
        if run.amp.clip_grad_norm_(1.0).isfinite():
            run.optimizer.step()
            taken += 1
        run.optimizer.zero_grad()
    assert taken == 20 - 6
    assert run.amp.stats()["steps"] == WARM + taken


def test_one_of_two_optimizers_gives_up(start: Any) -> None:
    """The other one steps: it was a step."""
    for first in (0, 1):
        run = start(optimizer=in_two)
        run.backward()
        run.amp.clip_grad_norm_(0.1)
        run.optimizers[first].zero_grad()
        run.optimizers[1 - first].step()
        run.optimizers[1 - first].zero_grad()
        assert run.amp.stats()["steps"] == WARM + 1


def test_two_losses_are_given_up_together(start: Any) -> None:
    for spoil in (0.0, INF):
        run = start()
        run.backward()
        run.amp.unscale_()
        run.amp.backward(run.loss(), loss_id=1)
        if spoil:
            run.model.norm.weight.grad[0] = spoil
        run.amp.unscale_()
        run.optimizer.zero_grad()
        causes = [record.cause for record in (run.amp.stats() and run.amp.history)][WARM:]
        assert causes == ([None, "scale overflow"] if spoil else [])


def test_a_backward_after_an_early_decision_is_a_second_one(start: Any) -> None:
    """Nothing was cleared, so nothing was given up: the step adds both, and each counts."""
    run = start()
    for _ in range(2):
        run.backward()
        run.amp.unscale_()
    run.optimizer.step()
    assert run.amp.stats()["steps"] == WARM + 2


def test_by_hand_the_scale_moves_with_the_update(start: Any) -> None:
    """``scaler.update()`` counts the findings of ``scaler.unscale_``, as in torch, but no step."""
    for spoil, scale, growth in ((0.0, 16.0, 0), (INF, 4.0, 0)):
        run = start()
        run.spoilt(spoil, by_scaler=True)
        run.amp.scaler.unscale_(run.optimizer)
        run.optimizer.zero_grad()
        run.amp.scaler.update()
        stats = run.amp.stats()
        assert (stats["scale"], stats["growth_tracker"]) == (scale, growth)
        assert (stats["steps"], stats["skipped"]) == (WARM, int(spoil == INF))
