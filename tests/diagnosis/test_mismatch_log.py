"""``amp.log_mismatch``: its numbers in ``metrics``, its panel in ``plot``, its refusals."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from gpuless.fake_cuda import FakeCuda
from gpuless.real_cuda import AnyCuda
from helpers import Net, take_step
from torch import Tensor

import tritonamp
from tritonamp.diagnosis.plot import picture
from tritonamp.diagnosis.records import MismatchRecord, StepRecord
from tritonamp.functional import Mismatch, mismatch

NAMES = "k1", "k3", "outside", "worst_ratio"


def measured(device: Any, far: float = 0.01) -> Mismatch:
    log_ratios = torch.linspace(-far, 2 * far, 8, device=device)
    return mismatch(log_ratios, torch.zeros_like(log_ratios))


def in_metrics(value: Mismatch) -> dict[str, float]:
    pairs = zip(NAMES, value, strict=True)
    return {f"amp/mismatch_{name}": number.item() for name, number in pairs}


class Run:
    """A small run, whose loss has no mismatch of its own."""

    def __init__(self, device: Any) -> None:
        self.device = device
        model = Net().to(device)
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.amp = tritonamp.enable(model, self.optimizer, level="O2", loss_scale=256.0)
        self.loss = lambda: model(torch.ones(2, 6, device=device)).sum()

    def step(self) -> None:
        take_step(self.amp, self.optimizer, self.loss())


def test_metrics_have_the_last_one(device: torch.device) -> None:
    run = Run(device)
    run.step()
    assert not any("mismatch" in name for name in run.amp.metrics())
    for far in (0.5, 0.02):
        run.amp.log_mismatch(measured(device, far))
        run.step()
    _ = run.amp.history  # waits
    found = run.amp.metrics()
    assert found.items() >= in_metrics(measured(device, 0.02)).items()
    assert found["amp/skipped"] == 0.0


def test_before_the_first_step_and_without_an_optimizer(device: torch.device) -> None:
    amp = tritonamp.enable(Net().to(device), level="O1")
    assert amp.metrics() == {}
    with torch.inference_mode():
        amp.log_mismatch(measured(device))
    amp.log_mismatch(measured(device))
    assert [m.step for m in amp._parts.mismatches.arrived(wait=True)] == [1, 1]
    assert amp.metrics() == in_metrics(measured(device))


def test_they_come_when_they_have_arrived(fake_cuda: FakeCuda) -> None:
    run = Run("cuda")
    run.step()
    fake_cuda.event_lag = 2
    value = measured("cuda")
    with fake_cuda.watch() as records:
        run.amp.log_mismatch(value)
        found = [run.amp.metrics() for _ in range(3)]
        for _ in range(40):  # more than have room
            run.amp.log_mismatch(value)
    assert records == []
    assert not any("mismatch" in name for name in found[0])
    assert found[2].items() >= in_metrics(value).items()


def test_a_capture_refuses_it_and_a_replay_follows(gpu: AnyCuda) -> None:
    run = Run("cuda")
    run.step()
    log_ratios = torch.full((8,), 0.25, device="cuda")
    zeros = torch.zeros_like(log_ratios)
    mismatch(log_ratios, zeros)
    with gpu.capture() as graph:
        captured = mismatch(log_ratios, zeros)
        with pytest.raises(RuntimeError, match="expected a call after each replay of a CUDA graph"):
            run.amp.log_mismatch(captured)
        assert not any("mismatch" in name for name in run.amp.metrics())
    for ratio in (2.0, 4.0):
        log_ratios.fill_(math.log(ratio))
        graph.replay()
        run.amp.log_mismatch(captured)
    found = run.amp._parts.mismatches.arrived(wait=True)
    assert [record.worst_ratio for record in found] == pytest.approx([2.0, 4.0])


def test_they_have_the_number_of_the_next_step(device: torch.device, tmp_path: Path) -> None:
    run = Run(device)
    for _ in range(3):
        run.amp.log_mismatch(measured(device))
        run.step()
    assert [m.step for m in run.amp._parts.mismatches.arrived(wait=True)] == [1, 2, 3]
    assert [record.step for record in run.amp.history] == [1, 2, 3]
    assert run.amp.plot(tmp_path / "run.svg").read_text().count("sampler's log-prob") >= 1


def test_the_panel_holds_the_numbers() -> None:
    history = [StepRecord(step, None, 1.0, 1.0) for step in (1, 2, 3)]
    rows = [(1, 1e-6, 0.25), (2, math.inf, 1.0), (3, 1e-3, 0.5)]
    found = [MismatchRecord(step, 0.0, k3, outside, 1.0) for step, k3, outside in rows]
    _, _, k3, skips, outside = picture(history, found).axes
    assert list(k3.lines[0].get_xdata()) == list(outside.lines[0].get_xdata()) == [1, 2, 3]
    assert list(k3.lines[0].get_ydata()) == [1e-6, math.inf, 1e-3]
    assert list(outside.lines[0].get_ydata()) == [25.0, 100.0, 50.0]
    assert k3.get_yscale() == "log" and outside.get_yscale() == "linear"
    assert "sampler" in k3.get_title() and skips.get_xlabel() == "step"
    assert len(picture(history).axes) == 3


@pytest.mark.parametrize("k3", [0.0, math.nan, math.inf])
def test_numbers_that_no_logarithm_takes(k3: float, tmp_path: Path) -> None:
    found = [MismatchRecord(1, k3, k3, k3, k3)]
    picture([StepRecord(1, None, 1.0, 1.0)], found).savefig(tmp_path / "history.png")


class Part(Tensor):
    """A rank's part of a DTensor, as far as ``is_sharded`` looks."""

    _local_tensor = None


ZERO = torch.zeros(())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"k3": 0.1},
            r"expected the result of tritonamp\.functional\.mismatch, got dict: call amp\.log_mism",
        ),
        ((ZERO,) * 4, "got tuple: call"),
        (Mismatch(ZERO, 0.5, ZERO, ZERO), r"mismatch\.k3: expected a 0-d Tensor, got float: call"),  # type: ignore[arg-type]
        (
            Mismatch(ZERO, ZERO, ZERO[None], ZERO),
            r"mismatch\.outside: expected a 0-d Tensor, got Tensor of shape \(1,\): call",
        ),
        (
            Mismatch(ZERO.as_subclass(Part), ZERO, ZERO, ZERO),
            r"mismatch\.k1: expected a plain Tensor, got Part: call .*full_tensor.* on all ranks",
        ),
        (
            Mismatch(ZERO, ZERO, ZERO, ZERO.to("meta")),
            r"mismatch\.worst_ratio: expected a tensor on cpu, .* got one on meta: move",
        ),
    ],
)
def test_wrong_arguments(value: Any, message: str) -> None:
    with tritonamp.enable(Net(), level="O1") as amp, pytest.raises(ValueError, match=message):
        amp.log_mismatch(value)


def test_another_device_than_the_steps(cuda: torch.device) -> None:
    run = Run(cuda)
    run.step()
    with pytest.raises(ValueError, match=r"mismatch\.k1: expected a tensor on cuda:0, .* on cpu"):
        run.amp.log_mismatch(measured("cpu"))


def test_after_disable(device: torch.device) -> None:
    run = Run(device)
    run.amp.disable()
    with pytest.raises(RuntimeError, match=r"amp\.log_mismatch\(\): this model was disabled"):
        run.amp.log_mismatch(measured(device))


def test_in_a_compiled_step() -> None:
    run = Run("cpu")

    @torch.compile(backend="eager")
    def step(log_probs: Tensor, sampler: Tensor) -> None:
        run.amp.log_mismatch(mismatch(log_probs, sampler))

    step(torch.zeros(4), torch.zeros(4) - 0.5)
    assert run.amp.metrics()["amp/mismatch_k1"] == -0.5
