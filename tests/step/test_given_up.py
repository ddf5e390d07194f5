"""A batch that is given up after an early decision: gradients are cleared, and no step follows."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import Net, disabled_after, same, snapshot

import tritonamp

INF = float("inf")
WARM = 3


class Run:
    def __init__(
        self, device: str = "cpu", two: bool = False, interval: int = WARM + 1, **fields: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = Net().to(device)
        params = list(self.model.parameters())
        self.optimizers = [torch.optim.AdamW(params[:-1] if two else params, lr=1e-2)]
        self.optimizers += [torch.optim.AdamW(params[-1:], lr=1e-2)] if two else []
        scaler = tritonamp.GradScaler(device, init_scale=8.0, growth_interval=interval)
        settings = {"level": "O2", "scaler": scaler, "dtype": torch.bfloat16, **fields}
        self.amp = tritonamp.enable(self.model, self.optimizers, **settings)
        self.x = torch.linspace(-1, 1, 12, device=device).view(2, 6)
        for _ in range(WARM):
            self.step()

    def backward(self, spoil: float = 0.0, factor: float = 1.0, by_hand: bool = False) -> None:
        loss = self.model(self.x).float().square().mean() * factor
        if by_hand:
            self.amp.scaler.scale(loss).backward()
        else:
            self.amp.backward(loss)
        if spoil:
            self.model.norm.weight.grad[0] = spoil

    def step(self) -> None:
        self.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def found(self) -> Any:
        """All that decisions move."""
        state = self.amp.state_dict()
        records = [record[:-2] for record in self.amp.history]
        stats = {k: v for k, v in self.amp.stats().items() if k not in ("time", "seconds")}
        weights = [*self.optimizers, self.model]
        return state["loss_scalers"], state["counts"], state["outliers"], records, stats, weights


def same_runs(a: Run, b: Run) -> bool:
    *told, weights = a.found()
    *expected, others = b.found()
    assert told == expected
    return same(snapshot(*weights), snapshot(*others))


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    yield from disabled_after(Run)


EARLY: dict[str, Callable[[Run], Any]] = {
    "clip": lambda run: run.amp.clip_grad_norm_(0.1),
    "unscale": lambda run: run.amp.unscale_(),
    "both": lambda run: (run.amp.clip_grad_norm_(0.1), run.amp.unscale_()),
    "unscale and clip": lambda run: (run.amp.unscale_(), run.amp.clip_grad_norm_(0.1)),
    "clip twice": lambda run: (run.amp.clip_grad_norm_(1.0), run.amp.clip_grad_norm_(0.1)),
}


def by_optimizer(run: Run) -> None:
    for optimizer in run.optimizers:
        optimizer.zero_grad()


def with_zeros(run: Run) -> None:
    for optimizer in run.optimizers:
        optimizer.zero_grad(set_to_none=False)


def by_model(run: Run) -> None:
    run.model.zero_grad()


def by_hand(run: Run) -> None:
    for param in (*run.model.parameters(), *run.amp.master_params()):
        param.grad = None


# what to do, and whether it is seen before the next backward
CLEARS = {by_optimizer: True, with_zeros: True, by_model: False, by_hand: False}


@pytest.mark.parametrize("read", [False, True], ids=["unread", "read"])
@pytest.mark.parametrize("two", [False, True], ids=["one", "two"])
@pytest.mark.parametrize("clear", CLEARS)
@pytest.mark.parametrize("early", EARLY)
def test_a_clean_batch_never_was(
    start: Callable[..., Run], early: str, clear: Any, two: bool, read: bool, device: torch.device
) -> None:
    """Scale, growth, window, counts, history and weights are those of a run without it."""
    run, without = (start(device.type, two=two, skip_outliers=6.0) for _ in range(2))
    run.backward(factor=3.0)
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
def test_one_to_skip_is_a_skip(
    start: Callable[..., Run], cause: str, early: str, clear: Any, read: bool
) -> None:
    """As one that the step would have skipped: a scale that is too high backs off."""
    run, stepped = (start(two=True) for _ in range(2))
    for each in (run, stepped):
        each.backward(**SPOILT[cause])
        EARLY[early](each)
    if read:
        run.amp.stats()
    clear(run)
    for optimizer in stepped.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    for each in (run, stepped):
        each.step()
    assert same_runs(run, stepped)
    assert [record.cause for record in run.amp.history] == [None] * WARM + [cause, None]
    assert (run.amp.stats()["scale"] == 4.0) == (cause == "scale overflow")


def test_a_loop_that_drops_what_is_not_finite_finds_its_scale(start: Callable[..., Run]) -> None:
    """Gradients overflow down to a scale of 2^-3."""
    run = start(dtype=torch.float16, interval=1000)
    limit = 65504.0 / 8
    taken = 0
    for _ in range(20):
        run.backward()
        run.model.norm.weight.grad[0] = INF if run.amp.stats()["scale"] > 0.125 else limit
        if run.amp.clip_grad_norm_(1.0).isfinite():
            run.optimizers[0].step()
            taken += 1
        run.optimizers[0].zero_grad()
    assert taken == 20 - 6
    assert run.amp.stats()["steps"] == WARM + taken


def test_one_of_two_optimizers_gives_up(start: Callable[..., Run]) -> None:
    """The other one steps: it was a step."""
    for first in (0, 1):
        run = start(two=True)
        run.backward()
        run.amp.clip_grad_norm_(0.1)
        run.optimizers[first].zero_grad()
        run.optimizers[1 - first].step()
        run.optimizers[1 - first].zero_grad()
        assert run.amp.stats()["steps"] == WARM + 1


def test_two_losses_are_given_up_together(start: Callable[..., Run]) -> None:
    for spoil in (0.0, INF):
        run = start()
        run.backward()
        run.amp.unscale_()
        loss = run.model(run.x).float().square().mean()
        run.amp.backward(loss, loss_id=1)
        if spoil:
            run.model.norm.weight.grad[0] = spoil
        run.amp.unscale_()
        run.optimizers[0].zero_grad()
        causes = [record.cause for record in (run.amp.stats() and run.amp.history)][WARM:]
        assert causes == ([None, "scale overflow"] if spoil else [])


def test_a_backward_after_an_early_decision_is_a_second_one(start: Callable[..., Run]) -> None:
    """Nothing was cleared, so nothing was given up: the step adds both, and each counts."""
    run = start()
    for _ in range(2):
        run.backward()
        run.amp.unscale_()
    run.optimizers[0].step()
    assert run.amp.stats()["steps"] == WARM + 2


def test_by_hand_the_scale_moves_with_the_update(start: Callable[..., Run]) -> None:
    """As torch's: ``scaler.update()`` counts what ``scaler.unscale_`` has found; a step is none."""
    for spoil, scale, growth in ((0.0, 16.0, 0), (INF, 4.0, 0)):
        run = start()
        run.backward(spoil=spoil, by_hand=True)
        run.amp.scaler.unscale_(run.optimizers[0])
        run.optimizers[0].zero_grad()
        run.amp.scaler.update()
        stats = run.amp.stats()
        assert (stats["scale"], stats["growth_tracker"]) == (scale, growth)
        assert (stats["steps"], stats["skipped"]) == (WARM, int(spoil == INF))
