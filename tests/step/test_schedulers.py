"""``Amp.step_schedulers``: once for each step that was taken, whenever its outcome is known."""

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import more
from gpuless.real_cuda import AnyCuda
from helpers import Net, take_step
from runs import Training, named
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

import tritonamp

LEVELS = ["O1", "O2"]
OPTIMIZERS = named("AdamW", "SGD momentum", "Adagrad")  # which steps by itself
SKIPS = {
    "none": [],
    "the first ones": [0, 1, 2],
    "single ones": [2, 5],
    "in a row": [3, 4, 5, 6],
    "every other": [0, 2, 4, 6, 8],
    "all": list(range(10)),
}
CALLS = 10


class Counting:
    """A scheduler that is not torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.steps = 0
        if optimizer is not None:
            self.optimizer = optimizer

    def step(self) -> None:
        self.steps += 1


class Scheduled(Training):
    parts = (*Training.parts, "scheduler")

    def __init__(self, device: Any, level: str = "O2", kind: str = "AdamW", **fields: Any) -> None:
        def scheduled(params: Any, **rest: Any) -> torch.optim.Optimizer:
            optimizer = OPTIMIZERS[kind](params, **rest)
            self.scheduler = LambdaLR(optimizer, lambda n: 1.0 + n)
            return optimizer

        super().__init__(Net, scheduled, level, device, **fields)
        self.lower_scale()

    def call(self) -> int:
        self.amp.step_schedulers(self.scheduler)
        return self.scheduler.last_epoch


@pytest.mark.parametrize("by_scaler", [False, True])
@pytest.mark.parametrize("skips", SKIPS.values(), ids=SKIPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_one_step_for_each_that_was_taken(
    device: torch.device, level: str, optimizer: str, skips: list[int], by_scaler: bool
) -> None:
    """At most one ahead in between; on the CPU, where outcomes are known at once, never."""
    run, taken = Scheduled(device, level, optimizer), 0
    for call in range(CALLS):
        run.step(by_scaler=by_scaler, bad=call in skips)
        taken += call not in skips
        assert taken <= run.call() <= taken + (device.type == "cuda" and call in skips)
    run.step()
    assert run.call() == taken + 1
    assert run.optimizer.param_groups[0]["lr"] == 0.01 * (taken + 2)


@pytest.mark.parametrize("lag", [3, *more([0, 1, 7, 40, 1000])])
def test_whenever_outcomes_arrive(gpu: AnyCuda, lag: int) -> None:
    """Never behind, ahead by no more than the skips that are not known."""
    run, generator = Scheduled("cuda", backend="eager"), random.Random(lag)
    gpu.event_lag = lag
    taken = skipped = 0
    for _ in range(30):
        skip = generator.random() < 0.3
        run.step(bad=skip)
        taken, skipped = taken + (not skip), skipped + skip
        assert taken <= run.call() <= taken + skipped
    gpu.event_lag = 0
    for _ in range(25):  # outcomes arrive; calls make up
        run.step()
        taken += 1
        torch.cuda.synchronize()
        last = run.call()
    assert last == taken


def test_nothing_waits(gpu: AnyCuda) -> None:
    run = Scheduled("cuda")
    run.step()
    run.call()  # takes pinned memory
    gpu.event_lag = 3
    for skip in (False, True, False, False):
        run.step(bad=skip)
        with gpu.watch() as records:
            run.call()
        assert records == []


def test_ranks_and_determinism_ask_for_outcomes_at_the_same_call(
    gpu: AnyCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late events are."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    found = []
    for lag in (0, 5):
        run = Scheduled("cuda")
        gpu.event_lag = lag
        skips = True, True, False, False, True
        found.append([(run.step(bad=skip), run.call())[1] for skip in skips])
    assert found == [[1, 1, 1, 2, 3]] * 2


def test_a_cuda_graph(gpu: AnyCuda) -> None:
    """Calls follow its replays, whose outcomes the device counts."""
    run = Scheduled("cuda")
    factor = torch.ones((), device="cuda")

    def step() -> None:
        take_step(run.amp, run.optimizer, run.loss() * factor)

    def call() -> int:
        torch.cuda.synchronize()  # the outcomes of all calls before have arrived
        return run.call()

    step()
    assert call() == 1
    with gpu.capture() as graph:
        step()
    taken = 1
    for skip in (False, True, True, False, True, False):
        factor.fill_(math.inf if skip else 1.0)
        graph.replay()
        taken += not skip
        assert taken <= call() <= taken + skip
    for _ in range(3):  # no replay between: a call that was for nothing is made up for
        assert taken <= call() <= taken + 1
    run.step()
    call()
    run.step()
    assert call() == taken + 2


def test_what_a_cuda_graph_refuses(gpu: AnyCuda) -> None:
    run = Scheduled("cuda")
    run.step()
    with gpu.capture():
        run.step()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"expected a call before a CUDA graph captures"):
            run.call()
    run.step()
    with gpu.capture():
        run.step()
    run.call()
    with pytest.raises(RuntimeError, match="after each replay"), gpu.capture():
        run.call()


def test_accumulation_counts_steps(device: torch.device) -> None:
    """As often as it is called: a scheduler steps with its optimizer."""
    run = Scheduled(device)
    for step in range(3):
        for _ in range(4):
            run.backward()
            assert run.call() == step
        run.finish()
        assert run.call() == run.call() == step + 1


def test_once_in_an_epoch(device: torch.device) -> None:
    """A call is for one step of the scheduler, if any step was taken since the call before."""
    run, epoch = Scheduled(device), Counting()
    for skips in ([0], [4], [0, 1, 2, 3, 4], [2]):
        for number in range(5):
            run.step(bad=number in skips)
            run.call()
        run.amp.step_schedulers(epoch)
    run.step()
    run.amp.step_schedulers(epoch)
    assert epoch.steps == 4
    run.call()
    assert run.call() == 20 - 8 + 1


def test_several_schedulers_in_one_call_or_in_several(device: torch.device) -> None:
    run, others = Scheduled(device), [Counting(), Counting()]
    for skip in (True, False, True, True, False, False):
        run.step(bad=skip)
        run.amp.step_schedulers(run.scheduler, others[0])
        run.amp.step_schedulers(others[1])
    assert [run.scheduler.last_epoch, *(other.steps for other in others)] == [3, 3, 3]


def test_two_losses_and_optimizers(device: torch.device) -> None:
    """Each scheduler follows its own optimizer."""
    models = [Net().to(device), Net().to(device)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    schedulers = [Counting(optimizer) for optimizer in optimizers]
    scaler = tritonamp.GradScaler(device.type, init_scale=8.0)
    amp = tritonamp.enable(models, optimizers, level="O2", scaler=scaler)
    x = torch.randn(4, 6, device=device)
    for skips in [(True, False), (True, False), (False, True), (False, False)]:
        for i, skip in enumerate(skips):
            loss = models[i](x).float().square().mean()
            amp.backward(loss * math.inf if skip else loss, optimizers[i], loss_id=i)
            optimizers[i].step()
            optimizers[i].zero_grad()
        amp.step_schedulers(*schedulers)
    assert [scheduler.steps for scheduler in schedulers] == [2, 3]
    with pytest.raises(ValueError, match=r"scheduler 1: .* attribute optimizer .* got none"):
        amp.step_schedulers(schedulers[0], Counting())


def test_one_optimizer_that_two_scaled_losses_feed(device: torch.device) -> None:
    """Its step is skipped where either loss is bad."""
    run = Scheduled(device)
    for skips in [(True, False), (False, True), (True, True), (False, False), (False, False)]:
        for i, skip in enumerate(skips):
            loss = run.loss() / 8
            run.amp.backward(loss * math.inf if skip else loss, loss_id=i)
        run.finish()
        last = run.call()
    assert last == 2


@pytest.mark.steps
@pytest.mark.parametrize("between", [False, True], ids=["after the call", "before the call"])
@pytest.mark.parametrize("skips", SKIPS.values(), ids=SKIPS)
def test_a_resume_goes_on_with_the_same_bits(
    device: torch.device, skips: list[int], between: bool
) -> None:
    """Saved at any call, whatever is outstanding, into new objects and into used ones."""
    used = Scheduled(device)
    for saved_at in (0, 3, 6):
        run = Scheduled(device)
        for call in range(saved_at + 1):
            run.step(bad=call in skips)
            if call < saved_at or not between:
                run.call()
        states = run.states()
        new = Scheduled(device)
        for other in (new, used):
            other.load(copy.deepcopy(states))
        ends = []
        for other in (run, new, used):
            lasts = [other.call()] if between else []
            for call in range(saved_at + 1, CALLS + 2):
                other.step(bad=call in skips)
                lasts.append(other.call())
            ends.append((lasts, other.masters()))
        for lasts, parameters in ends[1:]:
            assert lasts == ends[0][0]
            assert all(map(torch.equal, parameters, ends[0][1]))
        assert ends[0][0][-1] == CALLS + 2 - len(skips)


def test_what_is_outstanding_survives_a_second_save(cuda: torch.device) -> None:
    """Also of a scheduler that was not called in between, by kind."""
    run, other = Scheduled("cuda"), Counting()
    for skip in (False, True):
        run.step(bad=skip)
        run.amp.step_schedulers(run.scheduler, other)
    assert (run.scheduler.last_epoch, other.steps) == (2, 2)
    states = run.states()
    for _ in range(2):
        run = Scheduled("cuda")
        run.load(states)
        states = run.states()
    run.step()
    run.amp.step_schedulers(other, run.scheduler)
    assert (run.scheduler.last_epoch, other.steps) == (2, 2)


def test_states_without_schedulers_load(device: torch.device) -> None:
    """Those of before, and a GradScaler's: nothing is outstanding then."""
    run = Scheduled(device)
    run.step(bad=True)
    run.call()
    state = run.amp.state_dict()
    del state["schedulers"]
    for old in (state, run.amp.scaler.state_dict()):
        run = Scheduled(device)
        run.amp.load_state_dict(old)
        assert run.call() == 0
        run.step()
        assert run.call() == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda o: ExponentialLR(o, 0.9),
        lambda o: SequentialLR(o, [LinearLR(o), ExponentialLR(o, 0.9)], milestones=[2]),
        lambda o: ChainedScheduler([LinearLR(o), ExponentialLR(o, 0.9)]),
        lambda o: OneCycleLR(o, max_lr=0.1, total_steps=CALLS, cycle_momentum=False),
    ],
    ids=["ExponentialLR", "SequentialLR", "ChainedScheduler", "OneCycleLR"],
)
@pytest.mark.parametrize("before", [False, True], ids=["made after enable", "made before"])
def test_torchs_schedulers_do_not_warn(
    device: torch.device, make: Callable[..., Any], before: bool
) -> None:
    """Not when the first steps are skipped, and OneCycleLR not of a call too many."""
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plain = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    expected = make(plain)
    scheduler = make(optimizer) if before else None
    amp = tritonamp.enable(model, optimizer, level="O1")
    scheduler = scheduler or make(optimizer)
    for call in range(CALLS - 1):
        loss = model(torch.ones(2, 6, device=device)).float().sum()
        take_step(amp, optimizer, loss * math.inf if call < 3 else loss * 1e-3)
        amp.step_schedulers(scheduler)
        if call >= 3:
            plain.step()
            expected.step()
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]


def test_a_step_that_failed_was_none(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Scheduled(device)
    run.step()
    assert run.call() == 1
    handle = run.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    run.backward()
    with pytest.raises(ZeroDivisionError):
        run.optimizer.step()
    assert run.call() == 1
    handle.remove()
    run.optimizer.step()
    assert run.call() == 2
    handle = run.optimizer.register_step_post_hook(lambda *_: 1 / 0)  # too late
    run.backward()
    with pytest.raises(ZeroDivisionError):
        run.optimizer.step()
    assert run.call() == 3
    handle.remove()


def test_errors(device: torch.device) -> None:
    run = Scheduled(device)
    run.step()
    plateau = ReduceLROnPlateau(run.optimizer)
    foreign = LambdaLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0), lambda _: 1.0)
    for wrong, message in {
        plateau: r"expected one .* no arguments, got ReduceLROnPlateau .*metrics.*yourself",
        foreign: "expected LambdaLR whose attribute optimizer .* got another SGD",
        run.optimizer: r"expected a learning-rate scheduler.*step\(\), got AdamW: .*one by one",
        LambdaLR: r"expected a learning-rate scheduler.*got the class LambdaLR",
        "warmup": "expected a learning-rate scheduler.*got str",
    }.items():
        with pytest.raises(ValueError, match=f"scheduler 1: {message}"):
            run.amp.step_schedulers(run.scheduler, wrong)
    assert run.scheduler.last_epoch == 0
    run.amp.disable()
    with pytest.raises(RuntimeError, match=r"amp.step_schedulers\(\): this model was disabled"):
        run.call()
    amp = tritonamp.enable(Net())
    with pytest.raises(RuntimeError, match="enabled without an optimizer"):
        amp.step_schedulers(run.scheduler)
    amp.disable()
