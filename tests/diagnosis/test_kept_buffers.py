"""A skipped forward leaves no inf or NaN in running statistics and other buffers."""

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from runs import Training, batch
from torch import Tensor, nn

import tritonamp
from tritonamp.diagnosis import kept_buffers
from tritonamp.diagnosis.kept_buffers import KeptBuffers


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Codebook(nn.Module):
    """Averages its inputs into a buffer, and has a mask of -inf."""

    average: Tensor
    mask: Tensor
    lazy: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("mask", torch.full((8,), -math.inf))
        self.register_buffer("lazy", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.average.lerp_(x.detach().float().mean(0), 0.1)
        self.lazy.fill_(-math.inf)
        return x + self.average.to(x.dtype)


def net(buffered: Callable[[], nn.Module] = lambda: nn.BatchNorm1d(8)) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), Square(), buffered(), nn.Linear(8, 2))


def large(run: Training, seed: int = 9) -> Tensor:
    """Return a batch whose squares float16 does not hold."""
    return 1e4 * batch(seed, device=run.device)


def buffers(run: Training) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in run.model.named_buffers()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("mode", ["explain", "heal"])
def test_running_statistics_are_those_before_the_faulty_forward(
    device: torch.device, caplog: Any, level: str, mode: str
) -> None:
    with (
        Training(net, level=level, device=device, on_nonfinite=mode) as run,
        caplog.at_level(logging.INFO, "tritonamp"),
    ):
        run.train(range(3))
        before = buffers(run)
        run.step(large(run))
        assert_same(buffers(run), before)
        (text,) = [t for t in caplog.messages if t.startswith("step 4 skipped")]
        assert (
            "Buffers that became inf or NaN were set back to their values before this step: "
            "2.running_mean, 2.running_var." in text
        )
        assert "reset_running_stats" not in text
        assert run.amp.explain() == text
        run.model.eval()
        assert bool(torch.isfinite(run.model(run.x)).all())


@pytest.mark.parametrize("mode", ["skip", "raise"])
def test_other_modes_keep_no_copies(mode: str) -> None:
    with Training(net, on_nonfinite=mode, raise_after=9) as run:
        run.step(large(run))
        assert not bool(torch.isfinite(run.model[2].running_var).all())
        assert "2.running_var" in run.amp.explain() and "reset_running_stats" in run.amp.explain()


def test_a_healed_run_has_the_statistics_of_a_run_without_the_faulty_steps() -> None:
    with Training(net, on_nonfinite="heal") as run, Training(net, on_nonfinite="heal") as other:
        for training in (run, other):
            training.train(range(2))
        other.amp.heal("1")
        for _ in range(2):
            run.step(large(run))
        assert run.amp.stats()["healed"] == ["1"]
        for training in (run, other):
            training.step(large(training))
        assert_same(buffers(run), buffers(other))
        assert int(run.model[2].num_batches_tracked) == 3


def test_buffers_that_a_forward_averages_into_are_restored_and_masks_are_not() -> None:
    with Training(lambda: net(Codebook), on_nonfinite="explain") as run:
        run.train(range(2))
        before = buffers(run)
        run.step(large(run))
        assert_same(buffers(run), before)
        assert bool(torch.isfinite(run.model[2].average).all())
        assert bool((run.model[2].mask == -math.inf).all())
        assert bool((run.model[2].lazy == -math.inf).all())
        assert " before this step: 2.average." in run.amp.explain()


def test_a_buffer_that_the_first_forward_fills_with_minus_infinity_stays_so() -> None:
    with Training(lambda: net(Codebook), on_nonfinite="explain") as run:
        run.step(bad=True)
        assert bool((run.model[2].lazy == -math.inf).all())


@pytest.mark.parametrize("micro_batches", [2, 6])
def test_of_several_forwards_in_a_step_the_values_before_the_first_count(
    micro_batches: int,
) -> None:
    with Training(net, on_nonfinite="explain") as run:
        run.train(range(2))
        before = buffers(run)
        for i in range(micro_batches):
            run.backward(run.loss(large(run) if i == 0 else run.x))
        run.finish()
        assert_same(buffers(run), before)


def test_micro_batches_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    look = kept_buffers._nonfinite
    monkeypatch.setattr(
        kept_buffers, "_nonfinite", lambda tensors: looks.append(1) or look(tensors)
    )
    with Training(net, on_nonfinite="explain", loss_scale=1.0) as run:
        for step in range(2):
            for _ in range(3):
                run.backward()
            run.finish()
            assert len(looks) == step + 1


class Assigning(nn.Module):
    """Assigns a new tensor to its buffer."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().float().mean(0)
        return x + self.average.to(x.dtype)


def test_a_buffer_that_the_forward_replaces_is_restored() -> None:
    with Training(lambda: net(Assigning), on_nonfinite="explain") as run:
        run.train(range(2))
        before = buffers(run)
        run.step(large(run))
        assert_same(buffers(run), before)


def test_a_buffer_of_another_shape_is_left_alone() -> None:
    with Training(net, on_nonfinite="explain") as run:
        run.step()
        loss = run.loss(large(run))
        run.model[2].running_mean = torch.full((3,), math.nan)
        run.backward(loss)
        run.finish()
        assert run.model[2].running_mean.shape == (3,)
        assert bool(torch.isfinite(run.model[2].running_var).all())


def test_values_that_stayed_unnoticed_in_a_good_step_are_not_kept() -> None:
    with Training(net, on_nonfinite="explain") as run:
        run.step()
        before = run.model[2].running_var.clone()
        run.model(run.x)  # copies what the step left
        run.model[2].running_var.data.fill_(math.nan)
        run.step()  # training does not read them
        run.step(large(run))
        assert run.amp.stats()["skipped"] == 1
        assert torch.equal(run.model[2].running_var, before)


def test_values_that_were_loaded_since_the_last_step_are_the_ones_to_restore() -> None:
    with Training(net, on_nonfinite="explain") as run:
        run.step()
        state = copy.deepcopy(run.model.state_dict())
        state["2.running_mean"] += 7
        run.model(run.x)  # no backward follows
        run.model.load_state_dict(state)
        run.step(large(run))
        assert torch.equal(run.model[2].running_mean, state["2.running_mean"])


def test_what_is_not_finite_from_the_start_is_left_alone_and_said() -> None:
    with Training(net, on_nonfinite="explain") as run:
        run.model[2].running_var.fill_(math.nan)
        run.step(large(run))
        assert bool(run.model[2].running_var.isnan().all())
        assert "reset_running_stats" in run.amp.explain()


def test_a_graph_that_has_saved_the_statistics_still_has_its_backward() -> None:
    """The fakes of a GAN are made before the discriminator's step, which is skipped."""
    generator, discriminator = net(), nn.Linear(2, 1)
    torch.manual_seed(0)
    opt_g, opt_d = (torch.optim.AdamW(m.parameters()) for m in (generator, discriminator))
    with tritonamp.enable(
        [generator, discriminator], [opt_g, opt_d], level="O2", on_nonfinite="explain"
    ) as amp:
        generator(batch(0))
        fake = generator(batch(0))
        generator[2].running_mean.data.fill_(math.nan)
        amp.backward(discriminator(fake.detach()).mean() * math.inf, opt_d, loss_id=0)
        opt_d.step()
        assert bool(torch.isfinite(generator[2].running_mean).all())
        amp.backward(discriminator(fake).mean(), opt_g, loss_id=1)
        opt_g.step()


def test_evaluation_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with Training(net, on_nonfinite="explain") as run:
        run.step()
        looks = []
        monkeypatch.setattr(KeptBuffers, "_keep", lambda self, model: looks.append(model))
        with torch.no_grad():
            run.model(run.x)
        assert looks == []
        run.model(run.x)
        assert looks == [run.model]


def test_each_of_two_models_has_the_statistics_of_the_step_before() -> None:
    torch.manual_seed(0)
    models = [net(), nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8))]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=1e-3)
    with tritonamp.enable(models, optimizer, on_nonfinite="explain") as amp:
        for scale in (1.0, 1.0, 1.0, math.nan):
            before = [{name: b.clone() for name, b in m.named_buffers()} for m in models]
            amp.backward(models[1](models[0](scale * torch.randn(4, 6))).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert amp.stats()["skipped"] == 1
    for model, values in zip(models, before, strict=True):
        assert_same(dict(model.named_buffers()), values)


def test_a_module_of_two_models_has_the_statistics_of_the_step_before() -> None:
    torch.manual_seed(0)
    shared = nn.BatchNorm1d(8)
    models = [nn.Sequential(nn.Linear(6, 8), shared) for _ in range(2)]
    optimizer = torch.optim.SGD({p for m in models for p in m.parameters()})
    with tritonamp.enable(models, optimizer, on_nonfinite="explain") as amp:
        for scale in (1.0, 1.0, math.nan):
            before = {name: b.clone() for name, b in shared.named_buffers()}
            outputs = [m(x * torch.randn(4, 6)) for m, x in zip(models, (1.0, scale), strict=True)]
            amp.backward(sum(outputs).float().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert amp.stats()["skipped"] == 1
    assert_same(dict(shared.named_buffers()), before)


class Best(nn.Module):
    """Holds the least loss so far, which the program sets to inf to begin again."""

    best: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("best", torch.tensor(3.0))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1.0
        return x


def test_infinity_that_the_program_writes_between_steps_stays() -> None:
    with Training(lambda: net(Best), on_nonfinite="explain") as run:
        run.step()
        run.model[2].best.fill_(math.inf)
        run.step()
        run.step(large(run))
        assert run.amp.stats()["skipped"] == 1
        assert run.model[2].best == math.inf and run.model[2].count == 3


def test_an_autocast_of_another_format_around_the_loop_does_not_matter() -> None:
    with (
        Training(net, level="O3", on_nonfinite="explain") as run,
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        run.step()
        before = buffers(run)
        run.step(large(run))
        assert run.amp.stats()["skipped"] == 1
        assert_same(buffers(run), before)
