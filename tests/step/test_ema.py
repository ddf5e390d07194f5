"""``Amp.ema``: averages of FP32 values, which leave out skipped steps, and go into other models."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import more
from gpuless.real_cuda import AnyCuda
from helpers import same_bits, take_step
from runs import LEVELS, Training, batch
from small_models import TiedAndFrozen
from torch import Tensor, nn

import tritonamp

DECAY = 0.75
U = 2.0**-24


class Masked(TiedAndFrozen):
    """A buffer that is no number, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([True, False, True]))


class Averaged(Training):
    parts = (*Training.parts, "ema")

    def __init__(self, device: Any, level: str = "O2", decay: float = DECAY, **fields: Any) -> None:
        super().__init__(Masked, "AdamW", level, device, lr=0.05, **fields)
        self.lower_scale()
        self.ema = self.amp.ema(decay)

    def values(self) -> list[Tensor]:
        return [p.double().cpu() for p in self.masters()]

    def averages(self) -> list[Tensor]:
        """In the order of the optimizer's parameters."""
        state = self.ema.state_dict()
        names = {p: name for name, p in reversed(list(self.model.named_parameters()))}
        params = [p for p in self.model.parameters() if p in names]
        return [state[names[p]].cpu() for p in params if not names[p].startswith("frozen")]

    def saved(self) -> dict[str, Tensor]:
        return {name: x.clone() for name, x in self.ema.state_dict().items()}


@pytest.mark.parametrize("backend", ["eager", "auto"])
@pytest.mark.parametrize("decay", [0.0, 0.25, 0.75, 0.999])
@pytest.mark.parametrize("level", LEVELS)
def test_the_average_of_what_the_optimizer_steps_on(
    device: torch.device, level: str, decay: float, backend: str
) -> None:
    """As FP64 has it: an update rounds by less than 8 u of numbers below 2."""
    run = Averaged(device, level, decay, backend=backend)
    expected = [p.double() for p in run.averages()]
    assert all(map(torch.equal, expected, run.values())) or level == "O3"  # which begins in FP32
    for _ in range(4):
        run.step()
        run.ema.update()
        expected = [
            decay * a + (1 - decay) * p for a, p in zip(expected, run.values(), strict=True)
        ]
    for average, right in zip(run.averages(), expected, strict=True):
        assert average.dtype is torch.float32
        assert (average.double() - right).abs().max() <= 4 * 16 * U


def test_it_moves_where_an_average_of_half_values_would_not(device: torch.device) -> None:
    run = Averaged(device, decay=0.9999)
    before = run.saved()["last.weight"]
    run.step()
    run.ema.update()
    after = run.saved()["last.weight"]
    assert (after != before).all()
    assert (after - before).abs().max() < 2.0**-14  # half a step of float16 at 1/4


@pytest.mark.parametrize("by_scaler", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_it_skips_with_the_step(device: torch.device, level: str, by_scaler: bool) -> None:
    """Averages and buffers, whose running means a bad batch has spoiled."""
    run = Averaged(device, level)
    run.step()
    run.ema.update()
    before = run.saved()
    run.x[0] = math.inf
    run.step(by_scaler=by_scaler)
    assert not run.model.norm.running_mean.isfinite().all()
    for _ in range(2):
        run.ema.update()
        assert same_bits(run.saved(), before)
    run.model.norm.reset_running_stats()
    run.x[0] = 1.0
    run.step()
    run.ema.update()
    after = run.saved()
    assert not torch.equal(after["last.weight"], before["last.weight"])
    assert torch.equal(after["norm.running_mean"], run.model.norm.running_mean)


def test_what_its_state_holds(device: torch.device) -> None:
    """Averages and buffers by all their names, in FP32 where they are half."""
    run = Averaged(device, "O3")
    plain = {name: x for name, x in Masked().state_dict().items() if not name.startswith("frozen")}
    state = run.ema.state_dict()
    assert state.keys() == plain.keys()
    assert all(state[name].dtype is x.dtype for name, x in plain.items())
    assert torch.equal(state["first.weight"], state["tied.weight"])
    assert run.model.third.dtype is torch.float16
    assert torch.equal(state["third"].cpu(), torch.full((6,), 1 / 3))
    run.step()
    run.ema.update()
    assert torch.equal(run.ema.state_dict()["third"].cpu(), torch.full((6,), 1 / 3))
    run.model.third.fill_(0.5)
    run.ema.update()
    assert torch.equal(run.ema.state_dict()["third"].cpu(), torch.full((6,), 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_copy_to_a_plain_model(
    device: torch.device, level: str, disabled: bool, dtype: torch.dtype
) -> None:
    """Averages are rounded once; buffers are of the last update; frozen parameters are copied."""
    run = Averaged(device, level)
    frozen = run.model.state_dict()["frozen.weight"].clone()
    for _ in range(3):
        run.step()
        run.ema.update()
    mean = run.model.norm.running_mean.clone()
    run.step()
    expected = run.saved()
    if disabled:
        run.amp.disable()
    target = Masked().to(device, dtype)
    run.ema.copy_to(target)
    state = target.state_dict()
    assert state["first.weight"].dtype is dtype
    for name, value in expected.items():
        assert torch.equal(state[name], value.to(state[name].dtype)), name
    assert torch.equal(state["frozen.weight"], frozen.to(dtype))
    assert torch.equal(state["norm.running_mean"], mean.to(dtype))


@pytest.mark.parametrize("level", LEVELS)
def test_copy_to_an_enabled_model(device: torch.device, level: str) -> None:
    """Its masters take the averages unrounded; also the model's own."""
    run = Averaged(device)
    for _ in range(3):
        run.step()
        run.ema.update()
    averages, other = run.averages(), Averaged(device, level)
    for target in (other, run):
        run.ema.copy_to(target.model)
        values = target.model.state_dict()
        assert torch.equal(values["last.weight"], run.ema.state_dict()["last.weight"])
        if target.amp.policy.master_weights or level in ("O0", "O1"):
            for value, average in zip(target.values(), averages, strict=True):
                assert torch.equal(value, average.double())
    with torch.no_grad():
        run.model.eval()(run.x)


def test_copy_to_compiled_models_and_several(device: torch.device) -> None:
    models = [nn.Linear(3, 4).to(device), nn.Linear(4, 2).to(device)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    amp = tritonamp.enable(models, optimizers, level="O2")
    ema = amp.ema(0.5)
    assert list(ema.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    targets = [nn.Linear(3, 4).to(device), torch.compile(nn.Linear(4, 2).to(device))]
    ema.copy_to(targets)
    for target, model in zip(targets, models, strict=True):
        assert torch.equal(target.weight, model.state_dict()["weight"])
    with pytest.raises(ValueError, match=r"expected 2 model\(s\), got 1"):
        ema.copy_to(models[0])
    amp.disable()


def test_each_parameter_follows_its_own_optimizer(device: torch.device) -> None:
    models = [nn.Linear(3, 4).to(device), nn.Linear(3, 4).to(device)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    scaler = tritonamp.GradScaler(device.type, init_scale=8.0)
    amp = tritonamp.enable(models, optimizers, level="O2", scaler=scaler)
    ema = amp.ema(0.5)
    ema.update()  # before any step
    before = {name: x.clone() for name, x in ema.state_dict().items()}
    x = torch.ones(2, 3, device=device)
    for i, factor in enumerate((math.inf, 1.0)):
        amp.backward(models[i](x).float().sum() * factor, optimizers[i], loss_id=i)
        optimizers[i].step()
    with torch.no_grad():  # as a skipped step does not do
        for p in optimizers[0].param_groups[0]["params"]:
            p += 1.0
    ema.update()
    moved = {name for name, x in ema.state_dict().items() if not torch.equal(x, before[name])}
    assert moved == {"1.weight", "1.bias"}
    amp.disable()


def test_buffers_wait_for_all_optimizers(device: torch.device, handles: Any) -> None:
    """A skip of one optimizer keeps all averaged buffers, because a buffer belongs to none."""
    models = [nn.BatchNorm1d(3).to(device) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    amp = handles(models, optimizers, level="O2")
    average = amp.ema(0.5)
    buffers = [name for name in average.state_dict() if "running" in name]
    for skipped in (0, 1, None):
        before = {name: average.state_dict()[name].clone() for name in buffers}
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            loss = model(batch(i, 4, 3, device=device)).float().square().sum()
            take_step(amp, optimizer, loss * (math.inf if i == skipped else 1.0))
        average.update()
        moved = [not torch.equal(before[name], average.state_dict()[name]) for name in buffers]
        assert moved == [skipped is None] * 4


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("way", ["loaded", "written"])
def test_values_that_replace_those_of_the_step(device: torch.device, level: str, way: str) -> None:
    """A checkpoint or the user may replace parameters between the step and the update."""
    run = Averaged(device, level)
    run.step()
    before = run.ema.state_dict()["last.weight"].clone()
    if way == "loaded":
        run.model.load_state_dict({"last.weight": torch.full((3, 12), 0.5)}, strict=False)
    else:
        with torch.no_grad():
            run.model.last.weight.fill_(0.5)
    run.ema.update()
    average = run.ema.state_dict()["last.weight"]
    torch.testing.assert_close(average, DECAY * before + (1 - DECAY) * 0.5, rtol=1e-6, atol=1e-7)


def test_a_group_that_is_added(device: torch.device) -> None:
    """Its averages begin where it does."""
    run = Averaged(device)
    run.step()
    run.ema.update()
    assert "frozen.weight" not in run.ema.state_dict()
    run.model.frozen.requires_grad_(True)
    run.optimizer.add_param_group({"params": list(run.model.frozen.parameters())})
    value = run.model.state_dict()["frozen.weight"].clone()
    run.ema.update()
    assert torch.equal(run.ema.state_dict()["frozen.weight"], value)
    run.step()
    new = run.model.state_dict()["frozen.weight"]
    run.ema.update()
    average = run.ema.state_dict()["frozen.weight"]
    assert not torch.equal(average, value)
    torch.testing.assert_close(average, DECAY * value + (1 - DECAY) * new, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_a_resume_goes_on_with_the_same_bits(
    device: torch.device, tmp_path: Path, level: str, skip: bool
) -> None:
    run = Averaged(device, level)
    for number in range(3):
        run.step(bad=skip and number == 2)
        run.ema.update()
    path = tmp_path / "run.pt"
    tritonamp.save(path, **run.objects())
    new = Averaged(device, level)
    new.step()
    tritonamp.load(path, **new.objects())
    assert same_bits(new.saved(), run.saved())
    for r in (run, new):
        for _ in range(2):
            r.step()
            r.ema.update()
    assert same_bits(new.saved(), run.saved())
    plain = Masked()
    plain.load_state_dict(tritonamp.load(path)["ema"], strict=False)


def test_the_state_loads_into_a_plain_model_that_is_trained_as_a_whole(
    device: torch.device,
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(device)
    amp = tritonamp.enable(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O2")
    state = copy.deepcopy(amp.ema(0.5).state_dict())
    amp.disable()
    model.load_state_dict(state)


@pytest.mark.parametrize("level", ["O2", *more(["O1"])])
def test_a_cuda_graph_captures_it(gpu: AnyCuda, level: str) -> None:
    """Replays, one of them skipped, leave the bits of eager steps; eager steps may follow."""
    eager, captured = Averaged("cuda", level), Averaged("cuda", level)
    factors = [torch.ones((), device="cuda") for _ in range(2)]

    def step(run: Averaged, factor: Tensor) -> None:
        take_step(run.amp, run.optimizer, run.loss() * factor)
        run.ema.update()

    for run, factor in zip((eager, captured), factors, strict=True):
        step(run, factor)
    with gpu.capture() as graph:
        step(captured, factors[1])
    for value in (1.0, math.inf, 1.0):
        for factor in factors:
            factor.fill_(value)
        step(eager, factors[0])
        graph.replay()
    assert same_bits(captured.saved(), eager.saved())
    for run, factor in zip((eager, captured), factors, strict=True):
        step(run, factor)
    assert same_bits(captured.saved(), eager.saved())
    before = captured.saved()
    factors[1].fill_(math.inf)
    graph.replay()
    captured.ema.update()  # outside, about the replay's step
    assert same_bits(captured.saved(), before)


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_waits(gpu: AnyCuda, level: str) -> None:
    run = Averaged("cuda", level)
    run.step()
    run.ema.update()
    for skip in (False, True):
        run.step(bad=skip)
        with gpu.watch() as records:
            run.ema.update()
        assert records == []
    gpu.launches.clear()
    run.ema.update()
    assert gpu.launches == ["ema_kernel"]


@pytest.mark.parametrize("decay", [-0.1, 1.0, 2, math.nan, True, "0.9", None])
def test_decay_is_checked(decay: Any) -> None:
    run = Averaged("cpu")
    with pytest.raises(ValueError, match=r"decay: expected a number in \[0, 1\), got "):
        run.amp.ema(decay)
    with pytest.raises(ValueError, match="decay: expected"):
        run.ema.decay = decay
    run.ema.decay = 0
    assert run.ema.decay == 0.0


def test_errors() -> None:
    run = Averaged("cpu")
    state, before = run.saved(), run.saved()
    del state["last.bias"]
    state["last.weight"] = torch.zeros(1)
    state["other"] = torch.zeros(1)
    message = (
        r"ema.load_state_dict: expected the same architecture, got missing: last.bias; "
        r"unknown: other; of other shapes: last.weight \(expected \(3, 12\), got \(1,\)\)"
    )
    with pytest.raises(ValueError, match=message):
        run.ema.load_state_dict(state)
    assert same_bits(run.saved(), before)
    with pytest.raises(ValueError, match=r"ema.copy_to: expected the same architecture, got miss"):
        run.ema.copy_to(nn.Linear(3, 4))
    with pytest.raises(ValueError, match=r"got one on the meta device: call model.to_empty"):
        run.ema.copy_to(Masked().to("meta"))
    run.amp.disable()
    calls: list[Callable[[], Any]] = [run.ema.update, lambda: run.amp.ema(0.5)]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"this model was disabled; call tritonamp.enable"):
            call()
    amp = tritonamp.enable(Masked(), level="O2")
    with pytest.raises(RuntimeError, match="enabled without an optimizer"):
        amp.ema(0.5).update()
    amp.disable()
