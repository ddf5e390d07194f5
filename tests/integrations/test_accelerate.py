"""A loop written for Accelerate walks the steps of one written for tritonamp, bit for bit."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from clients import (
    LEVELS_AND_KINDS,
    LOSS,
    ByHandOfTaken,
    client_batches,
    client_net,
    optimizer_and_scheduler,
    state_of,
)
from helpers import assert_same
from torch import Tensor, nn

import tritonamp

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState

from tritonamp.integrations.accelerate import enable

pytestmark = pytest.mark.clients

BATCHES = 8


class Accelerated:
    """A training under Accelerate."""

    def __init__(
        self,
        kind: str = "AdamW",
        accumulate: int = 1,
        mixed_precision: str | None = None,
        loaded: torch.dtype = torch.float32,
        **settings: Any,
    ) -> None:
        self.accelerator: Any = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=mixed_precision
        )
        enable(self.accelerator, **settings)
        model = client_net().to(loaded)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            model, *optimizer_and_scheduler(model, kind)
        )
        self.skips: list[bool] = []
        self.norms: list[float] = []

    @property
    def amp(self) -> tritonamp.Amp:
        return self.accelerator.amp  # type: ignore[no-any-return]

    def train(
        self, data: list[tuple[Tensor, Tensor]], norm: float = 0.0, value: float = 0.0
    ) -> dict[str, Tensor]:
        for x, y in data:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(LOSS(self.model(x), y))
                if self.accelerator.sync_gradients and norm:
                    self.norms.append(
                        float(self.accelerator.clip_grad_norm_(self.model.parameters(), norm))
                    )
                if self.accelerator.sync_gradients and value:
                    self.accelerator.clip_grad_value_(self.model.parameters(), value)
                self.optimizer.step()
                if self.accelerator.sync_gradients:
                    self.skips.append(self.accelerator.optimizer_step_was_skipped)
                self.scheduler.step()
                self.optimizer.zero_grad()
        return state_of(self.model)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return optimizer_and_scheduler(model)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("level", "kind"), LEVELS_AND_KINDS)
def test_the_loop_walks_our_steps(level: str, kind: str) -> None:
    run, data = Accelerated(kind, level=level), client_batches(BATCHES, bad=3)
    state = run.train(data)
    hand = ByHandOfTaken(kind, level)
    expected = hand.walk(data)
    skips = [cause is not None for cause in hand.causes]
    assert_same(state, expected)
    assert run.skips == skips
    assert skips[3]
    assert run.scheduler.get_last_lr() == [0.05 * 0.5 ** (skips.count(False) // 2)]
    run.accelerator.free_memory()
    assert_same(run.model.state_dict(), expected)  # put back


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    "how",
    [
        {"norm": 0.1},
        {"value": 0.01},
        {"accumulate": 2},
        {"accumulate": 2, "norm": 0.1},
        {"norm": float("inf")},
    ],
    ids=str,
)
def test_clipping_and_accumulation(level: str, how: dict[str, Any]) -> None:
    data = client_batches(BATCHES, bad=5)
    clip = {name: value for name, value in how.items() if name != "accumulate"}
    run = Accelerated(accumulate=how.get("accumulate", 1), level=level)
    state = run.train(data, **clip)
    hand = ByHandOfTaken(level=level)
    assert_same(state, hand.walk(data, **how))
    assert run.skips == [cause is not None for cause in hand.causes]
    assert str(run.norms) == str(hand.norms)  # NaN is itself there
    run.accelerator.free_memory()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_norms_of_a_part_and_of_another_kind(level: str) -> None:
    run, (x, y) = Accelerated(level=level), client_batches(BATCHES)[0]
    plain = client_net()
    LOSS(plain(x), y).backward()
    for parameters, norm_type in [(lambda m: m[0].parameters(), 2), (lambda m: m.parameters(), 1)]:
        run.optimizer.zero_grad()
        run.accelerator.backward(LOSS(run.model(x), y))
        norm = run.accelerator.clip_grad_norm_(parameters(run.model), 0.1, norm_type=norm_type)
        expected = nn.utils.get_total_norm([p.grad for p in parameters(plain)], norm_type)
        torch.testing.assert_close(norm, expected, rtol=2.0**-6, atol=0)  # some roundings to half
        clipped = nn.utils.get_total_norm([p.grad for p in parameters(run.model)], norm_type)
        # torch divides by norm + 1e-6
        torch.testing.assert_close(clipped, torch.tensor(0.1), rtol=1e-4, atol=0)
    run.accelerator.free_memory()


@pytest.mark.parametrize("loaded", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("level", "kind"), LEVELS_AND_KINDS[2:7])
def test_resuming_is_not_stopping(
    level: str, kind: str, loaded: torch.dtype, tmp_path: Path
) -> None:
    data = client_batches(BATCHES, bad=2)
    run = Accelerated(kind, level=level, loaded=loaded)
    run.train(data[:3])
    run.accelerator.save_state(str(tmp_path))
    whole = run.train(data[3:])
    steps = run.amp.stats()["steps"]
    run.accelerator.free_memory()
    resumed = Accelerated(kind, level=level, loaded=loaded)
    resumed.accelerator.load_state(str(tmp_path))
    assert_same(resumed.train(data[3:]), whole)
    assert resumed.amp.stats()["steps"] == steps
    assert resumed.accelerator.scaler.get_scale() == resumed.amp.scaler.get_scale()
    resumed.accelerator.free_memory()


@pytest.mark.parametrize("kind", ["AdamW", "optim.AdamW", "enabled"])
def test_our_scaler_in_a_plain_accelerator(kind: str) -> None:
    accelerator, model = Accelerator(cpu=True), client_net()
    optimizer, scheduler = optimizer_and_scheduler(model, kind if kind != "enabled" else "AdamW")
    accelerator.scaler = tritonamp.GradScaler("cpu", init_scale=2.0**8)
    amp = (
        tritonamp.enable(model, optimizer, level="O2", scaler=accelerator.scaler)
        if kind == "enabled"
        else None
    )
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    skips = []
    for x, y in client_batches(BATCHES, bad=3):
        accelerator.backward(LOSS(model(x), y))
        optimizer.step()
        skips.append(accelerator.optimizer_step_was_skipped)
        scheduler.step()
        optimizer.zero_grad()
    assert skips == [i == 3 for i in range(BATCHES)]
    assert scheduler.get_last_lr() == [0.05 * 0.5 ** ((BATCHES - 1) // 2)]
    if amp is not None:
        amp.disable()


def test_two_optimizers_are_told_apart() -> None:
    first, second = client_net(), client_net()
    accelerator = Accelerator(cpu=True)
    # overflows nowhere
    enable(accelerator, level="O2", scaler=tritonamp.GradScaler("cpu", init_scale=2.0**10))
    models = first, second
    *_, one, two = accelerator.prepare(*models, *map(optimizer_of, models))
    for (x, y), bad in zip(client_batches(BATCHES) * 2, [None, 0, 1, None] * 4, strict=True):
        skipped = []
        for i, (model, optimizer) in enumerate(zip(models, (one, two), strict=True)):
            optimizer.zero_grad()
            accelerator.backward(LOSS(model(x), y) * (torch.inf if i == bad else 1.0))
            optimizer.step()
            skipped.append(optimizer.step_was_skipped)
        assert skipped == [bad == 0, bad == 1]
        assert [one.step_was_skipped, two.step_was_skipped] == skipped
    accelerator.free_memory()


def test_autocast_is_the_op_policy() -> None:
    run = Accelerated(level="O1")
    x = torch.randn(3, 70000)
    with run.accelerator.autocast():
        assert run.model[0](torch.ones(2, 6)).dtype is torch.float16
        assert torch.var(x.half() * 300).isfinite()  # stock autocast: inf
    assert run.model[0](torch.ones(2, 6)).dtype is torch.float32
    run.accelerator.free_memory()


def test_the_last_of_two_calls_counts() -> None:
    accelerator = Accelerator(cpu=True)
    enable(accelerator, level="O1")
    enable(accelerator, level="O2")
    model = client_net()
    accelerator.prepare(model, optimizer_of(model))
    assert accelerator.amp.policy.master_weights
    accelerator.free_memory()


def test_trained_again_and_pickled() -> None:
    run, data = Accelerated(level="O2"), client_batches(BATCHES)
    run.train(data)
    copy = pickle.loads(pickle.dumps(run.optimizer))
    assert not copy.step_was_skipped
    run.accelerator.free_memory()
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    run.model, run.optimizer = run.accelerator.prepare(run.model, run.optimizer)
    run.train(data)
    assert run.amp.stats()["steps"] > 0
    run.accelerator.free_memory()


@pytest.mark.parametrize("level", [None, "O1", "O2"])
@pytest.mark.parametrize(
    ("mixed_precision", "said", "dtype"),
    [
        ("fp16", None, torch.float16),
        ("bf16", None, torch.bfloat16),
        ("bf16", torch.float16, torch.float16),
    ],
)
def test_mixed_precision_is_the_dtype(
    level: str | None, mixed_precision: str, said: torch.dtype | None, dtype: torch.dtype
) -> None:
    settings = {"level": level} if said is None else {"level": level, "dtype": said}
    run = Accelerated(mixed_precision=mixed_precision, **settings)
    state = run.train(client_batches(BATCHES))
    assert run.amp.policy.dtype is dtype
    run.accelerator.free_memory()
    assert run.accelerator.mixed_precision == mixed_precision  # as scripts ask
    hand = ByHandOfTaken(level=level or "O1", dtype=dtype)
    assert_same(state, hand.walk(client_batches(BATCHES)))


@pytest.mark.parametrize("loaded", [torch.float16, torch.bfloat16], ids=str)
def test_the_dtype_of_the_model_is_the_default(loaded: torch.dtype) -> None:
    for settings, dtype in [
        ({}, loaded),
        ({"level": "O2"}, loaded),
        ({"level": "O5"}, torch.bfloat16),
        ({"policy": tritonamp.O2}, torch.float16),
        ({"level": "O2", "dtype": torch.bfloat16}, torch.bfloat16),
    ]:
        accelerator = Accelerator(cpu=True)
        enable(accelerator, **settings)
        model = client_net().to(loaded)
        model, _ = accelerator.prepare(model, optimizer_of(model))
        assert accelerator.amp.policy.dtype is dtype  # type: ignore[attr-defined]
        accelerator.free_memory()
        assert {p.dtype for p in model.parameters()} == {loaded}


def test_what_is_refused() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.prepare(client_net())
    with pytest.raises(ValueError, match=r"it has prepared .* call enable before"):
        enable(accelerator, level="O2")
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True)
    accelerator.state._mixed_precision = "fp8"
    with pytest.raises(ValueError, match="mixed_precision one of no, fp16, bf16, got 'fp8'"):
        enable(accelerator, level="O2")
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True)
    enable(accelerator, level="O2")
    model = client_net()
    with pytest.raises(RuntimeError, match="prepare all models and optimizers in one call"):
        accelerator.prepare(optimizer_of(model))
    late = Accelerator(cpu=True)
    late.prepare(model, optimizer_of(model))
    with pytest.raises(ValueError, match=r"call enable before accelerator\.prepare"):
        enable(late, level="O2")
