"""Diverged training is distinguished from arithmetic that half cannot do, by the growth of loss and
weights, and by a run of the batch in FP32.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from helpers import op_of_linear, take_step
from runs import Training
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import tritonamp
from tritonamp.diagnosis.divergence import Fp32Run, Growth, WeightSizes, growth_of
from tritonamp.diagnosis.fault_counts import is_power_of_two

INF, NAN = float("inf"), float("nan")


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )


class Recurrent(nn.Module):
    """Its gradients explode through the steps in time."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.RNN(16, 32, batch_first=True), nn.Linear(32, 4)
        with torch.no_grad():
            self.rnn.weight_hh_l0.mul_(4.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x[:, None].expand(-1, 16, -1))[0][:, -1] * 3)


class Diverging(Training):
    """Training of a classifier; ``break_`` is called before step 10, if it is given."""

    def __init__(
        self,
        device: torch.device,
        model: nn.Module,
        optimizer: Callable[..., Any],
        steps: int = 12,
        break_: Callable[[Any], Any] | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(model, optimizer, device=device, lr=None, **fields)
        for i in range(1, steps + 1):
            self.x = torch.randn(32, 16, device=device)
            self.y = torch.randint(0, 4, (32,), device=device)
            if break_ is not None and i == 10:
                break_(self)
            self.step()

    def loss(self, x: Any = None) -> Tensor:
        return nn.functional.cross_entropy(self.model(self.x), self.y)


LEVELS = [("O1", torch.float16), ("O2", torch.float16), ("O3", torch.float16)]
LEVELS += [("O2", torch.bfloat16)]
MODES = ["skip", "explain"]
RATES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], str]] = {
    "sgd": (mlp, partial(SGD, lr=1000.0), "SGD, lr=1000"),
    "adamw": (mlp, partial(AdamW, lr=10.0), "AdamW, lr=10"),
    "rnn": (Recurrent, partial(SGD, lr=30.0), "SGD, lr=30"),
}


def too_high() -> Iterator[Any]:
    """Yield each rate at each level; each of both meets each mode."""
    for i, (name, case) in enumerate(RATES.items()):
        for k, (level, dtype) in enumerate(LEVELS):
            mode = MODES[(i + k) % 2]
            yield pytest.param(*case, level, dtype, mode, id=f"{name}-{level}-{dtype}-{mode}")


@pytest.mark.steps
@pytest.mark.parametrize(("make", "optimizer", "rate", "level", "dtype", "mode"), [*too_high()])
def test_a_rate_far_too_high(
    device: torch.device,
    make: Callable[[], nn.Module],
    optimizer: Any,
    rate: str,
    level: str,
    dtype: torch.dtype,
    mode: str,
) -> None:
    if make is Recurrent:
        device = torch.device("cpu")  # torch asks the driver about cuDNN, which only a GPU has
    torch.manual_seed(0)
    fields: dict[str, Any] = {"level": level, "dtype": dtype, "on_nonfinite": mode}
    if level != "O3" and dtype is torch.float16:  # else most steps look for the scale's level
        fields["scaler"] = tritonamp.GradScaler(device.type, init_scale=16.0)
    run = Diverging(device, make(), optimizer, **fields)
    for text in (run.amp.explain(), run.amp.explain(replay=True), run.amp.explain(run.loss)):
        assert "training has diverged: loss " in text
        assert ", largest weight " in text and "FP32" in text
        assert ("No precision helps" in text) is ("; FP32 diverges as well: run again" in text)
        assert "fp32_modules" not in text and "sqrt at 0" not in text.replace("and norms at 0", "")
    needs_help = {cause for cause in run.causes if cause not in (None, "scale overflow")}
    assert needs_help <= {"divergence"}
    if needs_help:
        assert f"Lower the learning rate (now {rate}), first to a tenth, warm it up" in text
    run.amp.disable()


def test_the_first_line(device: torch.device) -> None:
    torch.manual_seed(0)
    run = Diverging(device, mlp(), partial(SGD, lr=1000.0), steps=2, level="O2")
    loss, _ = (record.loss for record in run.amp.history)
    assert run.amp.explain().startswith(
        f"step 2 skipped (1 of 2): divergence: training has diverged: loss {loss:.3g} -> inf or "
        "NaN after step 1, largest weight 0.25 -> "
    )
    names = {f"(in {name});" for name, _ in run.model.named_parameters()}
    assert any(name in run.amp.explain() for name in names)
    again = run.amp.explain(replay=run.loss)  # the loss is known then
    assert f"training has diverged: loss {loss:.3g} -> " in again and "inf or NaN" not in again
    assert "; FP32 diverges as well: run again in it, the loss is " in again
    run.amp.disable()


class Wide(nn.Module):
    """Healthy, but for one activation that ``size`` brings beyond 65504, as in T5."""

    size = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(torch.relu(self.up(x)) * self.size)
        return self.head(self.norm(h))


class ZeroHead(nn.Module):
    """Begins at zero, where any step makes weights larger at any rate."""

    size = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 4)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(x) * self.size) / self.size


class Distances(nn.Module):
    """The slope of a root at 0 is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.at_zero = nn.Linear(16, 16), nn.Linear(16, 4), False

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return self.head(h) + ((h - h.detach()).square() + float(not self.at_zero)).sqrt().mean()


def grow(run: Diverging) -> None:
    run.model.size = 3e5


def data(run: Diverging) -> None:
    run.x = run.x * 1e30  # finite in FP32


@pytest.mark.parametrize("mode", ["skip", "explain"])
@pytest.mark.parametrize(
    ("make", "optimizer", "break_", "cause"),
    [
        pytest.param(Wide, partial(AdamW, lr=1e-3), grow, "forward fault", id="activation"),
        pytest.param(Wide, partial(SGD, lr=0.5), grow, "forward fault", id="activation-sgd"),
        pytest.param(ZeroHead, partial(AdamW, lr=0.05), grow, "forward fault", id="from-zero"),
        pytest.param(mlp, partial(AdamW, lr=1e-2), data, "forward fault", id="data"),
        pytest.param(
            Distances,
            partial(AdamW, lr=1e-3),
            lambda run: setattr(run.model, "at_zero", True),
            "backward fault",
            id="root",
        ),
    ],
)
def test_what_is_no_divergence(
    device: torch.device, make: Any, optimizer: Any, break_: Any, cause: str, mode: str
) -> None:
    torch.manual_seed(0)
    scaler = tritonamp.GradScaler(device.type, init_scale=16.0)
    run = Diverging(
        device, make(), optimizer, 12, break_, level="O2", scaler=scaler, on_nonfinite=mode
    )
    assert set(run.causes) - {None} == {cause}
    for text in (run.amp.explain(), run.amp.explain(replay=True), run.amp.explain(run.loss)):
        assert "diverged" not in text
    run.amp.disable()


def test_a_scale_that_climbs_again_is_no_divergence(device: torch.device) -> None:
    torch.manual_seed(0)
    scaler = tritonamp.GradScaler(device.type, init_scale=2.0**24, growth_interval=5)
    run = Diverging(device, mlp(), partial(AdamW, lr=1e-2), 40, level="O2", scaler=scaler)
    assert set(run.causes) == {None, "scale overflow"}
    assert "diverged" not in run.amp.explain() + run.amp.explain(replay=run.loss)
    run.amp.disable()


def test_fp32_that_cures_it_withdraws_the_claim(device: torch.device) -> None:
    """Weights that are 400 times larger where the next are as much smaller: the same function."""

    def rescale(run: Diverging) -> None:
        with torch.no_grad():
            run.model[0].weight.mul_(2e5), run.model[0].bias.mul_(2e5)
            run.model[2].weight.mul_(5e-6)

    torch.manual_seed(0)
    run = Diverging(device, mlp(), partial(AdamW, lr=1e-3), 10, rescale, level="O1")
    assert run.causes[-1] == "divergence", "by growth alone"
    text = run.amp.explain(replay=run.loss)
    assert "forward fault" in text and "diverged" not in text
    assert f"overflow, forward: 0, op {op_of_linear(device)}" in text
    assert (
        run.causes[-1] == "forward fault" and run.amp.stats()["last_skip_reason"] == run.causes[-1]
    )
    assert run.amp.metrics()["amp/skipped_forward_fault"] == 1.0
    assert run.amp.metrics()["amp/skipped_divergence"] == 0.0
    run.amp.disable()


class SquaredMean(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x).float().square().mean()
        return result


class OwnLoss(Diverging):
    def loss(self, x: Any = None) -> Tensor:
        loss: Tensor = self.model(self.x)
        return loss


@pytest.mark.parametrize(("mode", "cause"), [("skip", "divergence"), ("explain", "forward fault")])
def test_a_batch_that_may_run_again_decides_at_once(
    device: torch.device, mode: str, cause: str
) -> None:
    def rescale(run: Any) -> None:
        with torch.no_grad():
            first, second = run.model.inner[0], run.model.inner[2]
            first.weight.mul_(2e5), first.bias.mul_(2e5), second.weight.mul_(5e-6)

    run = OwnLoss(
        device, SquaredMean(), partial(AdamW, lr=1e-3), 10, rescale, level="O1", on_nonfinite=mode
    )
    assert run.causes[-1] == cause
    run.amp.disable()


SUSPECT = Growth(weights=5.0, usual_loss=1.0)
EXPLODED = Growth(weights=20.0, usual_loss=1.0)


@pytest.mark.parametrize(
    ("growth", "in_fp32", "diverged"),
    [
        (Growth(), Fp32Run(False), False),
        (Growth(loss=1e6), Fp32Run(False), False),  # a loss alone says nothing
        (Growth(norm=1e6), Fp32Run(False), False),
        (Growth(weights=3.9), Fp32Run(False), False),
        (SUSPECT, None, False),
        (SUSPECT, Fp32Run(True), False),
        (SUSPECT, Fp32Run(False), True),
        (SUSPECT, Fp32Run(True, 9.9), False),
        (SUSPECT, Fp32Run(True, 10.1), True),
        (SUSPECT, Fp32Run(True, -10.1), True),
        (EXPLODED, None, True),
        (EXPLODED, Fp32Run(True), True),  # the loss is elsewhere, and what is bounded says nothing
        (EXPLODED, Fp32Run(True, 1.5), False),
        (EXPLODED._replace(usual_loss=0.0), Fp32Run(True, 1.5), True),
        (Growth(weights=2.0, loss=100.0, norm=10.0), None, True),
        (Growth(weights=1.9, loss=100.0, norm=10.0), None, False),
        (Growth(weights=2.0, loss=99.0, norm=10.0), None, False),
        (Growth(weights=2.0, loss=100.0, norm=9.0), None, False),
    ],
    ids=str,
)
def test_what_decides(growth: Growth, in_fp32: Fp32Run | None, diverged: bool) -> None:
    assert growth.is_divergence(in_fp32) is diverged


def sizes(*values: float, skipped: int = 0) -> WeightSizes:
    """The sizes of one weight that has had these values, one before each step."""
    weight = nn.Parameter(torch.zeros(2))
    found = WeightSizes(lambda: {weight: "weight"})
    for i, value in enumerate(values):
        weight.data.fill_(-value)
        taken = min(i + 1.0, len(values) - 1 - skipped)
        if i < len(values) - 1 and is_power_of_two(i + 1):
            found.measure(torch.tensor([taken, i + 1 - taken]))
    return found


@pytest.mark.parametrize(
    ("weights", "taken", "times"),
    [
        (sizes(1.0, 1.0), 1, 0.5),
        (sizes(0.2, 129.0), 1, 645.0 / 2),
        (sizes(0.0, 1.0), 1, 10.0 / 2),  # from zero it is as if from 0.1
        (sizes(0.0, *(0.1 * i for i in range(1, 65))), 64, 128 / 65),  # an even pace is no growth
        (sizes(1.0, 1.0, 1.0, 1.0, 1.0, 400.0), 5, 400.0 * 4 / 6),  # late, and sudden
        (sizes(1.0, *[50.0] * 40, skipped=39), 1, 25.0),  # skips do not make it look slower
        (sizes(1.0, INF), 1, 0.0),  # only what is finite tells
    ],
)
def test_growth_of_weights(weights: WeightSizes, taken: int, times: float) -> None:
    assert weights.growth(taken)[0] == pytest.approx(times, rel=1e-3)


@pytest.mark.parametrize(
    ("losses", "now", "times", "after", "shown"),
    [
        ([1.0], None, 1.0, 1, (1.0, INF)),
        ([2.0, 1e5, 1e8], None, 5e7, 1, (2.0, INF)),  # most are bad: the first was not
        ([2.0, 1.0, 0.1, 0.1, 0.1, 0.1, 5.0], 9.0, 90.0, 6, (0.1, 9.0)),  # it had become smaller
        ([1.0, 0.01, -1.0, -1.0], None, 1.0, 4, (-1.0, INF)),  # it has changed its sign
        ([None, None], None, 1.0, 2, (None, INF)),  # no loss is known
        ([], 3.0, 1.0, 0, (None, 3.0)),
    ],
)
def test_growth_of_losses(
    losses: list[float | None],
    now: float | None,
    times: float,
    after: int,
    shown: tuple[float | None, float],
) -> None:
    good = [(i + 1, loss, 1.0) for i, loss in enumerate(losses)]
    growth = growth_of(good, now, len(losses), sizes(1.0, 1.0))
    assert (growth.loss, growth.after, growth.losses) == (pytest.approx(times), after, shown)


@pytest.mark.parametrize(
    ("losses", "times"),
    [
        ([1.0, 1.0, 1.0], 1200 / 100 * 2 / 4),  # with the weights of step 2 it was the same
        ([1.0, 1e3, 1e6], 1200 / 0.1 / 4),  # with the weights of step 2 it was bad
        ([1e6, 1e5, 1e4, 1e3], 1200 / 1000 * 4 / 5),  # it became smaller until step 4
        ([1.0, 1.0, 1e3, 1e6], 1200 / 100 * 2 / 5),
        ([1.0, 5.0, 9.0, 60.0], 1200 / 100 * 2 / 5),  # it grows by little at each step
        ([None] * 4, 1200 / 0.1 / 5),
    ],
)
def test_weights_that_made_a_good_loss_have_not_run_away(
    losses: list[float | None], times: float
) -> None:
    good = [(i + 1, loss, 1.0) for i, loss in enumerate(losses)]
    weights = sizes(0.0, 100.0, 1000.0, 1000.0, 1200.0)
    growth = growth_of(good, None, len(losses), weights)
    assert growth.weights == pytest.approx(times)


def test_growth_from_zero_to_a_far_minimum_is_no_divergence() -> None:
    torch.manual_seed(0)
    target = 1000 * torch.randn(8, 1)
    model = nn.Linear(8, 1)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tritonamp.enable(model, optimizer, level="O1", backend="eager") as amp:
        for last in [False] * 29 + [True]:
            x = torch.randn(16, 8)
            loss = nn.functional.mse_loss(model(x), x @ target)
            take_step(amp, optimizer, loss * (NAN if last else 1.0))
        assert float(model.weight.detach().abs().max()) > 1000.0
        assert amp.history[-1].cause == "forward fault"
        assert "diverged" not in amp.explain()


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_losses_stand_in_the_history(device: torch.device, level: str) -> None:
    torch.manual_seed(0)
    run = Diverging(device, mlp(), partial(AdamW, lr=1e-3), steps=0, level=level)
    x, y = torch.randn(8, 16, device=device), torch.randint(0, 4, (8,), device=device)
    expected = []
    for parts in (1, 2):  # micro-batches are one step
        losses = [nn.functional.cross_entropy(run.model(x), y) / parts for _ in range(parts)]
        for loss in losses:
            run.amp.backward(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
        expected.append(sum(loss.item() for loss in losses))
    run.amp.backward(run.model(x).sum() * NAN)
    run.optimizer.step()
    assert [record.loss for record in run.amp.history] == [
        *map(pytest.approx, expected),
        None,
    ]
    run.amp.disable()


def test_half_losses_of_micro_batches_add_up_in_fp32(device: torch.device) -> None:
    run = Diverging(device, mlp(), partial(AdamW, lr=1e-3), steps=0, level="O0")
    for _ in range(3):
        run.amp.backward((0 * run.model(torch.ones(1, 16, device=device)).sum() + 3e4).half())
    run.optimizer.step()
    run.amp.explain()
    assert [record.loss for record in run.amp.history] == [9e4]
    run.amp.disable()


def test_a_loss_that_is_scaled_by_hand_is_not_known(device: torch.device) -> None:
    run = Diverging(device, mlp(), partial(AdamW, lr=1e-3), steps=1, level="O2")
    run.amp.scaler.scale(run.loss()).backward()
    run.amp.scaler.step(run.optimizer)
    run.amp.scaler.update()
    assert [record.loss is None for record in run.amp.history] == [False, True]
    run.amp.disable()
