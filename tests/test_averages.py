"""Averages of an enabled model: they move as those of an FP32 model do, however they are made."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from covering import more
from helpers import disabled_after, take_step
from runs import LEVELS, STATES, Training
from small_models import TiedAndFrozen
from torch import Tensor, nn
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
    get_swa_multi_avg_fn,
    update_bn,
)

import tritonamp

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
HALVES = [FP16, BF16]
DECAY = 0.9998
STEPS = 20


class Running(Training):
    def __init__(self, device: torch.device, **fields: Any) -> None:
        super().__init__(TiedAndFrozen, device=device, **{"loss_scale": 64.0, **fields})

    def values(self) -> dict[str, Tensor]:
        """FP32 values of parameters and buffers by name, without the counts of steps."""
        return state_of(self.model)


@pytest.fixture
def runs(device: torch.device) -> Iterator[Any]:
    def make(**fields: Any) -> Running:
        if fields.get("state") == "8bit" and fields.get("level") == "O3":
            pytest.skip("O3 has no FP32 values to pack")
        return Running(device, **fields)

    yield from disabled_after(make)


# through state_dict()


def v2(average: nn.Module, model: nn.Module, decay: float) -> None:
    """As ModelEmaV2 of timm."""
    for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        mean.copy_(decay * mean + (1.0 - decay) * value)


def v3(average: nn.Module, model: nn.Module, decay: float) -> None:
    """As ModelEmaV3, without foreach."""
    for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        if mean.is_floating_point():
            mean.lerp_(value, weight=1.0 - decay)
        else:
            mean.copy_(value)


def v3_foreach(average: nn.Module, model: nn.Module, decay: float) -> None:
    """As ModelEmaV3 does by default."""
    means, values = [], []
    for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        if mean.is_floating_point():
            means.append(mean)
            values.append(value)
        else:
            mean.copy_(value)
    torch._foreach_lerp_(means, values, weight=1.0 - decay)


def by_keys(average: nn.Module, model: nn.Module, decay: float) -> None:
    """As DeiT, YOLO: a state by its keys."""
    given = model.state_dict()
    for name, mean in average.state_dict().items():
        if mean.dtype.is_floating_point:
            mean *= decay
            mean += (1.0 - decay) * given[name].detach()


def loaded(average: nn.Module, model: nn.Module, decay: float) -> None:
    """A state is computed, and loaded."""
    means, values = average.state_dict(), model.state_dict()
    average.load_state_dict(
        {name: decay * means[name] + (1.0 - decay) * values[name] for name in means}
    )


STATE_LOOPS = [v2, v3, v3_foreach, by_keys, loaded]

# through parameters()


def soft_update(average: nn.Module, model: nn.Module, decay: float) -> None:
    """As target networks are updated."""
    for mean, p in zip(average.parameters(), model.parameters(), strict=True):
        mean.data.mul_(decay).add_((1.0 - decay) * p.data)


def soft_copy(average: nn.Module, model: nn.Module, decay: float) -> None:
    for mean, p in zip(average.parameters(), model.parameters(), strict=True):
        mean.data.copy_((1.0 - decay) * p.data + decay * mean.data)


def moco(average: nn.Module, model: nn.Module, decay: float) -> None:
    for mean, p in zip(average.parameters(), model.parameters(), strict=True):
        mean.data = mean.data * decay + p.data * (1.0 - decay)


def wide_lerp(average: nn.Module, model: nn.Module, decay: float) -> None:
    """As ``explain`` says for half parameters."""
    for mean, p in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(p.float(), 1.0 - decay)


def foreach(average: nn.Module, model: nn.Module, decay: float) -> None:
    means, params = list(average.parameters()), list(model.parameters())
    torch._foreach_mul_(means, decay)
    torch._foreach_add_(means, params, alpha=1.0 - decay)


PARAMETER_LOOPS = [soft_update, soft_copy, moco, wide_lerp, foreach]

# by torch

Averages = Callable[..., AveragedModel]
TORCHS: dict[str, Averages] = {
    "foreach EMA": lambda m, **k: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(DECAY), **k),
    "EMA": lambda m, **k: AveragedModel(m, avg_fn=get_ema_avg_fn(DECAY), **k),
    "foreach SWA": lambda m, **k: AveragedModel(m, multi_avg_fn=get_swa_multi_avg_fn(), **k),
    "SWA": lambda m, **k: AveragedModel(m, avg_fn=get_swa_avg_fn(), **k),
    "default": AveragedModel,
}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    return {n: v.detach().clone() for n, v in state.items() if v.is_floating_point()}


def exact(start: dict[str, Tensor], values: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the average at DECAY in FP64."""
    means = {name: value.double() for name, value in start.items()}
    for given in values:
        means = {n: DECAY * mean + (1 - DECAY) * given[n].double() for n, mean in means.items()}
    return means


def assert_near(
    average: nn.Module,
    run: Running,
    start: dict[str, Tensor],
    values: list[dict[str, Tensor]],
    half: torch.dtype | None,
) -> None:
    """Assert that an average is the one in FP64, up to FP32's rounding, and that it has moved.

    An update rounds four times at most, and each rounding stays. ``half``: what is averaged was
    rounded to that; of it, 1 - decay enters at each update, of which an eps / 2 is an error.
    """
    expected = exact(start, values)
    names = [name for name, _ in run.model.named_parameters()]
    for name in names:
        mean, right = average.get_parameter(name), expected[name]
        largest = max(v[name].abs().max().item() for v in (start, *values))
        allowed = 4 * STEPS * 2.0**-24 * largest
        if half is not None:
            share = 1 - DECAY**STEPS
            allowed += share * (torch.finfo(half).eps / 2 * largest + torch.finfo(half).tiny)
        assert mean.dtype is FP32, name
        assert (mean.double() - right).abs().max() <= allowed, name
        moved = (right - start[name].double()).abs().max()
        assert name.startswith("frozen") or moved > 4 * STEPS * 2.0**-24 * largest


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loop", STATE_LOOPS, ids=lambda loop: loop.__name__)
def test_averages_through_states_move_as_in_fp32(
    runs: Any, loop: Any, level: str, half: torch.dtype, state: str
) -> None:
    """Bit for bit as the same loop over plain FP32 models."""
    run = runs(level=level, dtype=half, state=state)
    average, plain = copy.deepcopy(run.model), TiedAndFrozen().to(run.x.device)
    expected = copy.deepcopy(plain)
    expected.load_state_dict(run.model.state_dict())
    start = run.values()
    for _ in range(STEPS):
        run.step()
        plain.load_state_dict(run.model.state_dict())
        with torch.no_grad():
            loop(average, run.model, DECAY)
            loop(expected, plain, DECAY)
    for name, mean in expected.state_dict().items():
        assert torch.equal(average.state_dict()[name], mean), name
    for name, param in run.model.named_parameters():
        if param.requires_grad:
            assert not torch.equal(average.state_dict()[name], start[name])


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loop", PARAMETER_LOOPS, ids=lambda loop: loop.__name__)
def test_averages_through_parameters_move_up_to_the_rounding_of_half(
    runs: Any, loop: Any, level: str, half: torch.dtype
) -> None:
    run = runs(level=level, dtype=half)
    average, start, values = copy.deepcopy(run.model), run.values(), []
    for _ in range(STEPS):
        run.step()
        values.append(run.values())
        with torch.no_grad():
            loop(average, run.model, DECAY)
    assert_near(average, run, start, values, half if level in ("O2", "O3") else None)


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("made", ["before", "after", "copied", "of a DataParallel"])
@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", TORCHS)
def test_torchs_averages(
    device: torch.device, kind: str, level: str, half: torch.dtype, made: str, use_buffers: bool
) -> None:
    """Bit for bit those of a plain FP32 model with the same values."""
    if kind == "foreach SWA" and use_buffers:
        pytest.skip("torch's has no average of integers, such as batch_norm's counts")
    torch.manual_seed(0)
    run, plain = Training(TiedAndFrozen, level=None, device=device), TiedAndFrozen().to(device)
    make = lambda model: TORCHS[kind](model, use_buffers=use_buffers)  # noqa: E731
    before = make(run.model)
    run.amp = tritonamp.enable(run.model, run.optimizer, level=level, dtype=half, loss_scale=64.0)
    plain.load_state_dict(run.model.state_dict())
    expected = make(plain)
    given: nn.Module = nn.DataParallel(run.model) if made == "of a DataParallel" else run.model
    average = before if made == "before" else make(given)
    if made == "copied":
        average = copy.deepcopy(average)
    for _ in range(4):
        run.step()
        plain.load_state_dict(run.model.state_dict())
        average.update_parameters(given)
        expected.update_parameters(plain)
    found = [*average.parameters(), *average.module.buffers()]
    right = [*expected.parameters(), *expected.module.buffers()]
    for mean, value in zip(found, right, strict=True):
        assert torch.equal(mean, value) and mean.dtype is value.dtype
    assert average.n_averaged == 4
    assert average(run.x).isfinite().all()
    run.amp.disable()
    average.update_parameters(given)  # torch's own again, over FP32 parameters


@pytest.mark.parametrize("state", STATES[1:])
def test_torchs_averages_of_packed_values(runs: Any, state: str) -> None:
    run = runs(state=state)
    average = TORCHS["foreach EMA"](run.model)
    start, values = {}, []
    for _ in range(STEPS):
        run.step()
        average.update_parameters(run.model)
        start, values = (start, [*values, run.values()]) if start else (run.values(), values)
    assert_near(average.module, run, start, values, None)


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize("kind", TORCHS)
def test_torchs_averages_of_what_is_not_enabled(runs: Any, kind: str, dtype: torch.dtype) -> None:
    """An enabled model changes nothing for them."""
    run, model = runs(), nn.Linear(4, 4).to(dtype)
    averages = [TORCHS[kind](model) for _ in range(2)]
    for average in averages:
        for value in (1, 2, 3):
            nn.init.constant_(model.weight, value)
            average.update_parameters(model)
        if run.amp._enabled:
            run.amp.disable()
    found, expected = (average.module.weight for average in averages)
    assert torch.equal(found, expected) and found.dtype is dtype


class Own(AveragedModel):
    """Reads more of the model than torch's does."""

    def update_parameters(self, model: nn.Module) -> None:
        self.training_now = model.training
        super().update_parameters(model)


def test_a_class_derived_from_torchs(runs: Any) -> None:
    run = runs()
    average = Own(run.model)
    average.update_parameters(run.model)
    assert average.training_now
    assert torch.equal(average.module.last.weight, run.values()["last.weight"])


@pytest.mark.parametrize("kind", TORCHS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_average_that_was_half_before(
    device: torch.device, caplog: pytest.LogCaptureFixture, level: str, kind: str
) -> None:
    """It works as in torch, in half; one warning says that its steps are rounded away."""
    model = nn.Linear(4, 4).to(device, FP16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = TORCHS[kind](model)
    amp = tritonamp.enable(model, optimizer, level=level)
    for _ in range(3):
        average.update_parameters(model)
    assert average.module.weight.dtype is FP16
    warned = [r.getMessage() for r in caplog.records if "AveragedModel" in r.getMessage()]
    assert len(warned) == 1 and "Make it after tritonamp.enable" in warned[0]
    after = TORCHS[kind](model)  # as it says
    after.update_parameters(model)
    assert after.module.weight.dtype is FP32
    assert sum("AveragedModel" in r.getMessage() for r in caplog.records) == 1
    amp.disable()


@pytest.mark.parametrize("level", LEVELS)
def test_statistics_are_computed_for_an_average(runs: Any, level: str) -> None:
    """By torch's update_bn: FP32 statistics of half activations."""
    run = runs(level=level)
    average = AveragedModel(run.model)
    for _ in range(2):
        run.step()
        average.update_parameters(run.model)
    plain = TiedAndFrozen().to(run.x.device)
    plain.load_state_dict(average.module.state_dict())
    loader = [run.x, run.x + 1]
    for model in (average, plain):
        update_bn(loader, model)
    found, right = average.module.norm, plain.norm
    assert found.running_mean.dtype is FP32 and found.num_batches_tracked == 2
    if level == "O0":
        assert torch.equal(found.running_mean, right.running_mean)
    # operands of the layer before are half: six products of numbers below 4
    assert (found.running_mean - right.running_mean).abs().max() <= 24 * torch.finfo(FP16).eps
    assert (found.running_var - right.running_var).abs().max() <= 24 * torch.finfo(FP16).eps


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_states_go_from_copy_to_model_and_back(runs: Any, level: str, half: torch.dtype) -> None:
    run = runs(level=level, dtype=half)
    run.step()
    copied, before = copy.deepcopy(run.model), run.values()
    for _ in range(2):
        run.step()
    after = run.values()
    run.model.load_state_dict(copied.state_dict())
    assert all(torch.equal(v, before[n]) for n, v in run.values().items())
    for name, param in run.model.named_parameters():
        assert torch.equal(param, before[name].to(param.dtype))
    run.step()
    copied.load_state_dict(after)
    assert all(torch.equal(copied.state_dict()[n], v) for n, v in after.items())
    copied.load_state_dict(run.model.state_dict())
    assert all(torch.equal(copied.state_dict()[n], v) for n, v in run.values().items())


def test_a_state_in_half_is_averaged_up_to_its_rounding(runs: Any) -> None:
    """With ``state_dict_dtype``; a tied weight stands in a state twice, and is averaged twice."""
    run = runs(state_dict_dtype=FP16)
    average, plain, largest = copy.deepcopy(run.model), TiedAndFrozen().to(run.x.device), 0.0
    plain.load_state_dict(average.state_dict())
    expected = copy.deepcopy(plain)
    for _ in range(STEPS):
        run.step()
        with torch.no_grad():
            for p, (_, master) in zip(
                plain.parameters(), run.amp.named_master_params(), strict=True
            ):
                p.copy_(master)
                largest = max(largest, p.abs().max().item())
            v2(average, run.model, DECAY)
            v2(expected, plain, DECAY)
    allowed = (1 - DECAY ** (2 * STEPS)) * torch.finfo(FP16).eps / 2 * largest
    for mean, right in zip(average.parameters(), expected.parameters(), strict=True):
        assert mean.dtype is FP32 and (mean - right).abs().max() <= allowed


@pytest.mark.parametrize("level", [*more(["O0"]), "O1", "O2", *more(["O3"])])
def test_an_average_is_as_accurate_as_its_model(device: torch.device, level: str) -> None:
    """Three classes of points; the average by states, by parameters, by torch and by ``ema``."""
    torch.manual_seed(0)
    y = torch.arange(96, device=device) % 3
    x = 3 * torch.eye(3, 6, device=device)[y] + 0.5 * torch.randn(96, 6, device=device)
    run = Training(TiedAndFrozen, level=level, device=device)
    model, amp = run.model, run.amp
    states, params = copy.deepcopy(model), copy.deepcopy(model)
    average, ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8)), amp.ema(0.8)
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(x).float(), y)
        take_step(amp, run.optimizer, loss)
        with torch.no_grad():
            v2(states, model, 0.8)
            soft_update(params, model, 0.8)
            for mine, buffer in zip(params.buffers(), model.buffers(), strict=True):
                mine.copy_(buffer)
        average.update_parameters(model)
        ema.update()
    copied = TiedAndFrozen().to(device)
    ema.copy_to(copied)

    def accuracy(model: nn.Module) -> float:
        with torch.no_grad():
            return (model.eval()(x).argmax(1) == y).float().mean().item()

    trained = accuracy(model)
    assert trained > 0.9
    for name, averaged in {
        "states": states,
        "parameters": params,
        "AveragedModel": average,
        "ema": copied,
    }.items():
        assert accuracy(averaged) > trained - 0.05, name
    amp.disable()
