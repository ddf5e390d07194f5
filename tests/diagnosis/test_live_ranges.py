"""amp.watch and amp.ranges: their numbers, the steps that they read, and no trace in training."""

import copy
import logging
import math
import pickle
from typing import Any

import pytest
import torch
from helpers import Net, take_step
from runs import LEVELS, Training, batch, started_on_cpu
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tritonamp
from tritonamp.diagnosis.live_ranges import RangeRecord


class Watched(Training):
    def __init__(self, model: Any = Net, **fields: Any) -> None:
        super().__init__(model, "SGD", **fields)
        self.x = batch(0, 4, 6)

    def records(self) -> dict[tuple[str, str], RangeRecord]:
        return {(r.module, r.direction): r for r in self.amp.ranges()}


run = started_on_cpu(Watched)


class Kept(nn.Module):
    """Keeps the output of a layer, and the gradient of the output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        self.output = self.layer(x)
        self.output.register_hook(lambda grad: setattr(self, "grad", grad))
        return self.output


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_what_it_shows(run: Any, level: str, dtype: torch.dtype) -> None:
    kept = Kept(nn.Linear(6, 3))
    training = run(nn.Sequential(kept), level=level, dtype=dtype)
    training.amp.watch()
    training.step()
    records = training.records()
    assert list(records) == [
        (name, direction) for direction in ("forward", "backward") for name in ("0", "0.layer")
    ]
    for direction, tensor in (("forward", kept.output), ("backward", kept.grad)):
        found = records["0.layer", direction]
        form = torch.finfo(tensor.dtype)
        numbers = tensor.detach().double().abs()
        assert found.step == 1 and found.elements == 12 and found.dtype is tensor.dtype
        assert found.absmax == numbers.max().item()
        assert found.headroom_bits == math.log2(form.max / found.absmax)
        assert found.zeros == (numbers == 0).double().mean().item()
        small = (numbers > 0) & (numbers < form.tiny)
        assert found.subnormals == small.double().mean().item()


def test_a_gradient_carries_the_loss_scale(run: Any) -> None:
    training = run(loss_scale=1024.0)
    training.amp.watch()
    training.step()
    scaled = training.records()["last", "backward"].absmax
    other = run(loss_scale=1.0)
    other.amp.watch()
    other.step()
    assert scaled == pytest.approx(1024.0 * other.records()["last", "backward"].absmax, rel=1e-2)


def test_every_third_step(run: Any) -> None:
    training = run()
    training.step()
    training.amp.watch(every=3)
    assert training.amp.ranges() == []
    seen = []
    for _ in range(8):
        training.step()
        seen.append({record.step for record in training.amp.ranges()})
    assert seen == [{2}] * 3 + [{5}] * 3 + [{8}] * 2


def test_a_step_whose_forward_had_run_already(run: Any) -> None:
    training = run()
    loss = training.model(training.x).float().mean()
    training.amp.watch(every=2)
    take_step(training.amp, training.optimizer, loss)
    assert training.amp.ranges() == []
    for _ in range(2):
        training.step()
    assert {record.step for record in training.amp.ranges()} == {3}


def test_steps_between_change_nothing_of_it(run: Any) -> None:
    training = run()
    training.amp.watch(every=3)
    training.step()
    first = training.amp.ranges()
    training.step(1000.0 * training.x)
    training.step()
    assert training.amp.ranges() == first


def test_micro_batches_are_one_step(run: Any) -> None:
    training = run()
    training.amp.watch()
    for factor in (1.0, 3.0):
        training.amp.backward(training.model(factor * training.x).sum())
    training.optimizer.step()
    assert training.records()["first", "forward"].elements == 2 * 4 * 16


def test_a_forward_without_gradients_is_not_read(run: Any) -> None:
    training = run()
    training.amp.watch()
    with torch.no_grad():
        training.model(1000.0 * training.x)
    training.step()
    assert training.records()["first", "forward"].elements == 4 * 16


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_training_has_the_same_bits(run: Any, level: str) -> None:
    watched, plain = run(level=level), run(level=level)
    watched.amp.watch(every=2)
    for _ in range(4):
        watched.step()
        plain.step()
    pairs = zip(watched.amp.master_params(), plain.amp.master_params(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_writes_in_place_behind_a_module(run: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(inplace=True), nn.Linear(16, 3))
    training = run(model)
    training.amp.watch()
    training.step()
    assert training.records()["0", "forward"].absmax > 0
    assert training.records()["1", "forward"].zeros > 0.2


class Checkpointed(Net):
    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(super().forward, x, use_reentrant=self.use_reentrant)
        return output


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(run: Any, use_reentrant: bool) -> None:
    model = Checkpointed()
    model.use_reentrant = use_reentrant
    training, plain = run(model), run()
    model.load_state_dict(plain.model.state_dict())
    for each in (training, plain):
        each.x = torch.linspace(-2, 2, 24).view(4, 6).requires_grad_()
        each.amp.watch()
        each.step()
    for key, record in plain.records().items():
        if key[0]:
            assert training.records()[key].absmax == record.absmax


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_one_graph(run: Any, backend: str) -> None:
    layers = [nn.Linear(6, 16), nn.ReLU(inplace=True), nn.LayerNorm(16), nn.Linear(16, 3)]
    training, plain = run(nn.Sequential(*copy.deepcopy(layers))), run(nn.Sequential(*layers))
    for each in (training, plain):
        each.amp.watch(every=2)
    compiled = torch.compile(training.model, backend=backend, fullgraph=True)
    for _ in range(3):
        training.backward(compiled(training.x).float().square().mean())
        training.finish()
        plain.step()
    assert training.records().keys() == plain.records().keys()
    for key, record in plain.records().items():
        assert training.records()[key].absmax == pytest.approx(record.absmax, rel=1e-2)
        assert (training.records()[key].step, record.step) == (3, 3)
    torch._dynamo.reset()


def test_a_replay_is_not_read(run: Any) -> None:
    training = run(on_nonfinite="explain")
    training.amp.watch(every=1)
    training.step(torch.full((4, 6), 1e6))
    assert not math.isfinite(training.records()["first", "forward"].absmax)
    training.step()
    assert training.records()["first", "forward"].absmax < 10
    assert training.records()["first", "forward"].elements == 4 * 16


def test_several_models(run: Any) -> None:
    torch.manual_seed(0)
    models = [Net(), Net()]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.01)
    with tritonamp.enable(models, optimizer, level="O1") as amp:
        amp.watch()
        take_step(amp, optimizer, sum(m(torch.randn(4, 6)).sum() for m in models))
        assert {r.module for r in amp.ranges()} >= {"0", "0.first", "1", "1.last"}


def test_it_ends(run: Any) -> None:
    training = run()
    handle = training.amp.watch()
    training.step()
    read = training.amp.ranges()
    handle.remove()
    training.step(1000.0 * training.x)
    assert training.amp.ranges() == read
    training.amp.watch(every=7)
    training.amp.disable()
    assert not any(module._forward_hooks for module in training.model.modules())


def test_copies_do_not_watch(run: Any) -> None:
    training = run()
    training.amp.watch()
    for copied in (copy.deepcopy(training.model), pickle.loads(pickle.dumps(training.model))):
        copied(1000.0 * training.x).sum().backward()
    training.step()
    assert training.records()["first", "forward"].elements == 4 * 16


class Growing(nn.Module):
    """The output of a layer grows by 2 % a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.step = nn.Linear(6, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return self.layer(x) * 300.0 * 1.02**self.step


def test_a_warning_before_the_overflow(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    """At most a fifth off, with at least fifty steps to go."""
    caplog.set_level(logging.WARNING, "tritonamp")
    training = run(nn.Sequential(Growing()))
    training.optimizer.param_groups[0]["lr"] = 0.0
    training.amp.watch(every=10)
    told = expected = 0
    while not any("skipped" in r.message for r in caplog.records):
        output = training.model(training.x)
        take_step(training.amp, training.optimizer, 1e-6 * output.float().mean())
        taken = training.model[0].step
        left = training.records()["0", "forward"].steps_left
        if left and not told:
            told, expected = taken, taken + left
    end = training.model[0].step
    said = [r.getMessage() for r in caplog.records if "will pass" in r.message]
    assert len(said) == 1 and "the output of 0 has grown to" in said[0]
    assert "will pass 65504, where float16 ends" in said[0] and "amp.heal('0')" in said[0]
    assert end - told >= 50
    assert abs(expected - end) <= 0.2 * (end - told)


def test_no_warning_of_an_ordinary_run(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    training = run()
    training.amp.watch(every=2)
    for _ in range(40):
        training.step()
    assert not caplog.records


def test_metrics(run: Any) -> None:
    training = run()
    training.amp.watch(every=2)
    for _ in range(5):
        training.step()
    records = training.amp.ranges()
    for direction in ("forward", "backward"):
        least = min(r.headroom_bits for r in records if r.direction == direction)
        assert training.amp.metrics()[f"amp/headroom_{direction}"] == least


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "10", None])
def test_bad_numbers(run: Any, every: Any) -> None:
    training = run()
    with pytest.raises(ValueError, match=r"every: expected a number of steps, 1 or more, got"):
        training.amp.watch(every=every)
    assert not any(module._forward_hooks for module in training.model.modules())


def test_misuse(run: Any) -> None:
    training = run()
    with pytest.raises(RuntimeError, match=r"nothing is watched, call amp.watch\(\)"):
        training.amp.ranges()
    training.amp.watch(every=5)
    with pytest.raises(RuntimeError, match=r"called already, with every=5.*remove\(\)"):
        training.amp.watch()
    training.amp.disable()
    with pytest.raises(RuntimeError, match=r"amp.watch\(\): this model was disabled"):
        training.amp.watch()
    model = Net()
    with tritonamp.enable(model) as amp, pytest.raises(RuntimeError, match="without an optimizer"):
        amp.watch()
