"""A run that was saved, loaded into other objects and continued has the bits of the run that never
stopped.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Net, disabled_after, take_step
from runs import named
from saves import bits_of
from torch import Tensor, nn

import tritonamp

pytestmark = pytest.mark.steps

STEPS = 10
ACCUMULATED = 2  # micro-batches of a step
OVERFLOWS, FAULTS, CRITIC_OVERFLOWS = (2, 3, 7), (5,), (1, 5)
LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"level": "O0"},
    "O1": {"level": "O1"},
    "O2": {"level": "O2"},
    "O3": {"level": "O3"},
    "bf16 O1": {"level": "O4"},
    "bf16 O2": {"level": "O5"},
}
OPTIMIZERS = {
    **named("AdamW", "our AdamW", "SGD momentum", "Adagrad"),
    "Adam amsgrad": partial(torch.optim.Adam, amsgrad=True, eps=1e-4),
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.5, eps=1e-4),
    "NAdam": partial(torch.optim.NAdam, eps=1e-4),  # steps by itself
}
SCALERS: dict[str, dict[str, Any]] = {
    "interval": {"init_scale": 2.0**8, "growth_interval": 2, "hysteresis": 2},
    "headroom": {"init_scale": 2.0**4, "growth_interval": 5, "mode": "headroom"},
}
NAMES = ("model", "critic", "optimizer", "critic_optimizer", "amp", "scheduler")


class Normed(Net):
    """A model with running statistics and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


class TwoModels:
    """Two models, two optimizers, two losses, and a schedule. Everything that ``NAMES`` names has a
    state.

    Args:
        before: a state to load before ``enable``; the state of amp goes in after.
    """

    def __init__(
        self,
        device: torch.device,
        level: str = "O2",
        optimizer: str = "AdamW",
        scaler: str = "interval",
        seed: int = 0,
        before: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.device = device
        self.model, self.critic = Normed().to(device), nn.Linear(3, 1).to(device)
        make = OPTIMIZERS[optimizer]
        hidden = [*self.model.first.parameters(), *self.model.norm.parameters()]
        groups = [{"params": hidden}, {"params": self.model.last.parameters(), "lr": 3e-3}]
        self.optimizer, self.critic_optimizer = (
            make(groups, lr=1e-2),
            make(self.critic.parameters(), lr=1e-2),
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, 0.5)
        if before is not None:
            self.load(before, [name for name in NAMES if name != "amp"])
        self.amp = tritonamp.enable(
            [self.model, self.critic],
            [self.optimizer, self.critic_optimizer],
            scaler=tritonamp.GradScaler(device.type, **SCALERS[scaler]),
            **LEVELS[level],
            **fields,
        )
        if before is not None:
            self.load(before, ["amp"])

    def step(self, i: int) -> list[float]:
        """One step of both; the two losses of the last micro-batch."""
        for part in range(ACCUMULATED):
            generator = torch.Generator().manual_seed(ACCUMULATED * i + part)
            x = torch.randn(8, 6, generator=generator).to(self.device)
            y = torch.randint(0, 3, (8,), generator=generator).to(self.device)
            output = self.model(x)
            loss = nn.functional.cross_entropy(output, y) * (float("nan") if i in FAULTS else 1.0)
            self.amp.backward(loss / ACCUMULATED, self.optimizer)
            score = self.critic(output.detach()).square().mean()
            self.amp.backward(score, self.critic_optimizer, loss_id=1)
        for overflows, param in (
            (OVERFLOWS, self.model.first.weight),
            (CRITIC_OVERFLOWS, self.critic.weight),
        ):
            if i in overflows:
                param.grad[0, 0] = float("inf")
        if i % 2:
            self.amp.clip_grad_norm_(0.5)
        for optimizer in (self.optimizer, self.critic_optimizer):
            optimizer.step()
            optimizer.zero_grad()
        self.scheduler.step()
        return [loss.item(), score.item()]

    def go_on(self, start: int = 0, end: int = STEPS) -> list[list[float]]:
        return [self.step(i) for i in range(start, end)]

    def state(self) -> dict[str, Any]:
        """Return the content of a checkpoint, not copied."""
        rng = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state()
        return {**{name: getattr(self, name).state_dict() for name in NAMES}, "rng": rng}

    def save(self, path: Path) -> None:
        tritonamp.save(path, **self.state())

    def load(self, state: dict[str, Any], names: Any = NAMES) -> None:
        """In the order of ``names``."""
        for name in names:
            getattr(self, name).load_state_dict(state[name])
        torch.set_rng_state(state["rng"]["cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["rng"]["cuda"])

    def everything(self) -> Any:
        """Every bit that counts, as plain values: the state, half parameters, masters, counts."""
        stats = self.amp.stats()
        tensors = [*self.model.parameters(), *self.critic.parameters(), *self.amp.master_params()]
        counted = (
            "steps",
            "skipped",
            "scale_overflows",
            "forward_faults",
            "growth_tracker",
            "scales",
            "healed",
        )
        return exactly([self.state(), tensors, [stats[name] for name in counted]])


def exactly(value: Any) -> Any:
    """``value`` with tensors as their dtype, shape and bytes, so that ``==`` compares every bit,
    NaN and zeros too.
    """
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), bits_of(value.detach().cpu())
    if isinstance(value, dict):
        return {key: exactly(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [exactly(item) for item in value]
    return repr(value) if isinstance(value, float) else value


@pytest.fixture
def start(device: torch.device) -> Iterator[Callable[..., TwoModels]]:
    yield from disabled_after(partial(TwoModels, device))


def assert_resumes_after_any_step(start: Callable[..., TwoModels], *case: str) -> None:
    straight = start(*case)
    losses, states, seen = [], [], []
    for i in range(STEPS):
        losses.append(straight.step(i))
        states.append(copy.deepcopy(straight.state()))
        seen.append(straight.everything())
    stats = straight.amp.stats()
    assert (stats["scale_overflows"], stats["forward_faults"]) == (
        len(OVERFLOWS + CRITIC_OVERFLOWS),
        len(FAULTS),
    )
    assert all(torch.isfinite(p).all() for p in straight.amp.master_params())
    for i in range(STEPS):
        end = min(i + 3, STEPS)
        resumed = start(*case, seed=100 + i)
        resumed.load(states[i])
        assert exactly(resumed.go_on(i + 1, end)) == exactly(losses[i + 1 : end]), (
            f"stopped after step {i}"
        )
        assert resumed.everything() == seen[end - 1], f"stopped after step {i}"


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD momentum"])
@pytest.mark.parametrize("level", LEVELS)
def test_resumed_after_any_step(
    start: Callable[..., TwoModels], level: str, optimizer: str
) -> None:
    assert_resumes_after_any_step(start, level, optimizer)


@pytest.mark.parametrize("optimizer", ["our AdamW", "Adam amsgrad", "RMSprop", "NAdam", "Adagrad"])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_other_optimizers_resumed(
    start: Callable[..., TwoModels], level: str, optimizer: str
) -> None:
    assert_resumes_after_any_step(start, level, optimizer)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD momentum"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_headroom_resumed(start: Callable[..., TwoModels], level: str, optimizer: str) -> None:
    assert_resumes_after_any_step(start, level, optimizer, "headroom")


@pytest.mark.parametrize(("level", "optimizer"), [("O1", "SGD momentum"), ("O2", "AdamW")])
def test_through_a_file_to_the_end(
    start: Callable[..., TwoModels], level: str, optimizer: str, tmp_path: Path
) -> None:
    straight = start(level, optimizer)
    losses = []
    for i in range(STEPS):
        losses.append(straight.step(i))
        straight.save(tmp_path / f"{i}.pt")
    expected = straight.everything()
    for i in range(STEPS):
        resumed = start(level, optimizer, seed=100 + i)
        resumed.load(tritonamp.load(tmp_path / f"{i}.pt"))
        assert exactly(resumed.go_on(i + 1)) == exactly(losses[i + 1 :]), f"stopped after step {i}"
        assert resumed.everything() == expected, f"stopped after step {i}"


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD momentum"])
@pytest.mark.parametrize("level", LEVELS)
def test_into_objects_that_have_gone_on(
    start: Callable[..., TwoModels], level: str, optimizer: str
) -> None:
    """Also the state from before the first step, which knows nothing of a second loss."""
    run = start(level, optimizer)
    begun, start = run.everything(), copy.deepcopy(run.state())
    losses = run.go_on(0, 2)
    middle = copy.deepcopy(run.state())
    losses += run.go_on(2, 6)
    expected = run.everything()
    run.go_on(6)
    for state, first in ((middle, 2), (start, 0)):
        run.load(state)
        assert first > 0 or run.everything() == begun
        again = run.go_on(first, 2)
        if level == "O3":  # the originals behind its halves follow when they are asked for
            run.state()
        again += run.go_on(2, 6)
        assert exactly(again) == exactly(losses[first:])
        assert run.everything() == expected


@pytest.mark.parametrize("optimizer", ["AdamW", "our AdamW", "SGD momentum"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_in_any_order_with_a_healed_module(
    start: Callable[..., TwoModels], level: str, optimizer: str
) -> None:
    straight = start(level, optimizer)
    straight.amp.heal("0.last")
    straight.go_on(0, 4)
    state = copy.deepcopy(straight.state())
    losses = straight.go_on(4, 6)
    expected = straight.everything()
    for order in itertools.permutations(("model", "optimizer", "amp")):
        resumed = start(level, optimizer, seed=9)
        resumed.go_on(0, 1)
        resumed.load(copy.deepcopy(state), [*order, "critic", "critic_optimizer", "scheduler"])
        assert resumed.amp.stats()["healed"] == ["0.last"]
        assert exactly(resumed.go_on(4, 6)) == exactly(losses), order
        assert resumed.everything() == expected, order
    resumed.load(copy.deepcopy(start(level, optimizer).state()))
    assert resumed.amp.stats()["healed"] == []


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD momentum"])
@pytest.mark.parametrize("level", LEVELS)
def test_loaded_before_enable(start: Callable[..., TwoModels], level: str, optimizer: str) -> None:
    straight = start(level, optimizer)
    straight.go_on(0, 4)
    state = copy.deepcopy(straight.state())
    losses = straight.go_on(4, 6)
    resumed = start(level, optimizer, seed=9, before=state)
    assert exactly(resumed.go_on(4, 6)) == exactly(losses)
    assert resumed.everything() == straight.everything()


@pytest.mark.parametrize("level", LEVELS)
def test_in_the_middle_of_accumulation(start: Callable[..., TwoModels], level: str) -> None:
    """Gradients are not saved: such a state is that of the last step, and the micro-batches are to
    be run again.
    """
    run = start(level)
    # its statistics and the mask of the dropout move with each forward, not with each step
    run.model.norm.eval()
    run.model.drop.p = 0.0
    run.go_on(0, 2)
    before = run.everything()
    run.amp.backward(run.model(torch.ones(4, 6, device=run.device)).sum(), run.optimizer)
    state = copy.deepcopy(run.state())
    assert run.everything() == before
    run.optimizer.zero_grad()
    losses = run.go_on(2, 4)
    resumed = start(level, seed=9)
    resumed.model.norm.eval()
    resumed.model.drop.p = 0.0
    resumed.load(state)
    assert exactly(resumed.go_on(2, 4)) == exactly(losses)
    assert resumed.everything() == run.everything()


def test_masters_of_a_model_that_was_half_already(device: torch.device) -> None:
    def begin(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, tritonamp.Amp]:
        torch.manual_seed(seed)
        model = nn.Linear(6, 3).to(device, torch.float16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        fields = {"half_parameters": True, "master_weights": True}
        return model, optimizer, tritonamp.enable(model, optimizer, level="O1", **fields)

    def train_on(run: Any, steps: range) -> Any:
        model, optimizer, amp = run
        for i in steps:
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i)).to(device)
            take_step(amp, optimizer, model(x).square().mean())
        return exactly([*[part.state_dict() for part in run], list(amp.master_params())])

    straight, resumed = begin(0), begin(1)
    train_on(straight, range(3))
    state = copy.deepcopy([part.state_dict() for part in straight])
    for part, given in zip(resumed, state, strict=True):
        part.load_state_dict(given)
    assert train_on(resumed, range(3, 5)) == train_on(straight, range(3, 5))
    for _, _, amp in (straight, resumed):
        amp.disable()


class Fragile(nn.Module):
    """Its product leaves float16 where the input is 1000."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x) * 100)


def test_faults_on_the_way_to_healing_count_on(device: torch.device) -> None:
    """The second fault in a module heals it, the first of them before the save or after."""

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, tritonamp.Amp]:
        torch.manual_seed(0)
        model = Fragile().to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, tritonamp.enable(model, optimizer, level="O2", on_nonfinite="heal")

    def fail(run: Any) -> list[str]:
        model, optimizer, amp = run
        take_step(amp, optimizer, model(torch.full((4, 4), 3000.0, device=device)).mean())
        return amp.stats()["healed"]  # type: ignore[no-any-return]

    straight = begin()
    assert fail(straight) == []
    states = copy.deepcopy([part.state_dict() for part in straight])
    resumed = begin()
    for part, state in zip(resumed, states, strict=True):
        part.load_state_dict(state)
    assert fail(straight) == fail(resumed) != []
    for _, _, amp in (straight, resumed):
        amp.disable()


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_scaler_alone_with_half_parameters(
    device: torch.device, half: torch.dtype, tmp_path: Path
) -> None:
    def begin(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, tritonamp.GradScaler]:
        torch.manual_seed(seed)
        model = nn.Linear(6, 3).to(device, half)
        scaler = tritonamp.GradScaler(
            device.type, init_scale=2.0**8, growth_interval=2, hysteresis=2
        )
        return model, tritonamp.optim.AdamW(model.parameters(), lr=1e-2), scaler

    def step(run: Any, i: int) -> None:
        model, optimizer, scaler = run
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i)).to(device, half)
        loss = model(x).float().square().mean() * (float("nan") if i == 5 else 1.0)
        scaler.scale(loss).backward()
        if i in (2, 3):
            model.weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    straight = begin(0)
    for i in range(8):
        step(straight, i)
        torch.save([part.state_dict() for part in straight], tmp_path / f"{i}.pt")
    expected = exactly([part.state_dict() for part in straight])
    for i in range(8):
        states = torch.load(tmp_path / f"{i}.pt", weights_only=True)
        for order in ((0, 1, 2), (2, 1, 0)):
            resumed = begin(1)
            for part in order:
                resumed[part].load_state_dict(states[part])
            for later in range(i + 1, 8):
                step(resumed, later)
            assert exactly([part.state_dict() for part in resumed]) == expected, (
                f"stopped after step {i}"
            )


def test_a_loss_before_loading_does_not_count_after(device: torch.device) -> None:
    scaler = tritonamp.GradScaler(device.type)
    param = nn.Parameter(torch.ones(3, device=device))
    optimizer = torch.optim.SGD([param], lr=0.5)
    state = scaler.state_dict()
    scaler.scale(param.sum() * float("nan"))  # whoever sees it goes back to a checkpoint
    scaler.load_state_dict(state)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param, torch.full_like(param, 0.5))


@pytest.mark.parametrize(
    "fields",
    [
        {"level": "O3"},
        {"level": "O2", "keep_norms_fp32": False, "op_policy": False, "cast_inputs": True},
    ],
)
def test_running_statistics_in_half(device: torch.device, fields: dict[str, Any]) -> None:
    """batch_norm writes to them and no hook is called."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).to(device)
    amp = tritonamp.enable(model, torch.optim.SGD(model.parameters(), lr=0.1), **fields)
    model(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)).to(device))
    running = [model[1].running_mean.clone(), model[1].running_var.clone()]
    state = model.state_dict()
    amp.disable()
    after = [model[1].running_mean, model[1].running_var]
    assert running[0].dtype is torch.float16 and running[0].any()
    for half, stored, put_back in zip(
        running, [state["1.running_mean"], state["1.running_var"]], after, strict=True
    ):
        assert torch.equal(half.float(), stored) and torch.equal(stored, put_back)


def test_the_gradients_of_the_last_good_step_are_remembered(device: torch.device) -> None:
    """A NaN far above them is a backward fault, where a first step would let the scale find its
    level.
    """
    causes: list[str | None] = []
    state: dict[str, Any] = {}
    for resumed in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        amp = tritonamp.enable(
            model, optimizer, scaler=tritonamp.GradScaler(device.type, init_scale=2.0)
        )
        if resumed:
            amp.load_state_dict(state)
        else:
            take_step(amp, optimizer, model(torch.ones(2, 4, device=device)).mean())
            state = amp.state_dict()
            assert amp.stats()["grad_norm"] > 0
        assert amp.state_dict() == state
        amp.backward(model(torch.ones(2, 4, device=device)).mean())
        model.weight.grad.fill_(torch.nan)
        optimizer.step()
        causes.append(amp.history[-1].cause)
        amp.disable()
    assert causes == ["backward fault"] * 2
