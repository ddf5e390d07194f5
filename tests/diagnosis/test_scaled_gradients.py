"""torch's own clipping of gradients that carry the loss scale is warned of, once, and only then.

So is the step of an optimizer that was not handed over.
"""

import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import warnings_with
from runs import Training, named, started_on_cpu
from torch import nn
from torch.nn.utils import clip_grad_norm_ as imported_before
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

import tritonamp
from tritonamp.diagnosis.scaled_gradients import CLIPPING, wrapped_cell

X = torch.ones(2, 4)


class Summed(Training):
    def __init__(self, **fields: Any) -> None:
        super().__init__(lambda: nn.Linear(4, 4), lr=1e-3, **fields)

    def loss(self, x: Any = None) -> torch.Tensor:
        return self.model(X).sum()

    def params(self) -> list[torch.Tensor]:
        return list(self.amp.master_params())


start = started_on_cpu(Summed)


warned = warnings_with("torch.nn.utils.")


CALLS: dict[str, Callable[[Summed], Any]] = {
    "attribute": lambda run: torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0),
    "imported before": lambda run: imported_before(run.model.parameters(), max_norm=1.0),
    "one tensor": lambda run: imported_before(run.model.weight, 1.0),
    "by keyword": lambda run: imported_before(parameters=[run.model.bias], max_norm=1.0),
    "masters": lambda run: imported_before(run.params(), 1.0),
    "values": lambda run: torch.nn.utils.clip_grad_value_(run.model.parameters(), 1.0),
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("call", CALLS)
def test_the_line_is_named_and_what_to_call(
    call: str, level: str, start: Any, warned: Callable[[], list[str]]
) -> None:
    run, clip = start(level=level), CALLS[call]
    run.backward()
    clip(run)
    (message,) = warned()
    name = "clip_grad_value_" if call == "values" else "clip_grad_norm_"
    line = f"{os.path.abspath(__file__)}:{inspect.getsourcelines(clip)[1]}"
    assert message.startswith(f"torch.nn.utils.{name} at {line} is given gradients that still")
    assert "amp.clip_grad_norm_(max_norm) in its place, or amp.unscale_() before it" in message
    clip(run)
    assert len(warned()) == 1


def test_a_loss_that_was_scaled_by_hand(start: Any, warned: Callable[[], list[str]]) -> None:
    run = start(level="O1")
    run.backward(by_scaler=True)
    imported_before(run.model.parameters(), 1.0)
    assert len(warned()) == 1


def after_unscale(run: Summed) -> None:
    run.backward()
    run.amp.unscale_()


def after_unscale_by_hand(run: Summed) -> None:
    run.backward(by_scaler=True)
    run.amp.scaler.unscale_(run.optimizer)


def after_a_step(run: Summed) -> None:
    run.backward()
    run.optimizer.step()


def of_another_model(run: Summed) -> None:
    run.backward()
    other = nn.Linear(4, 4)
    other(X).sum().backward()
    imported_before(other.parameters(), 1.0)
    run.amp.unscale_()


def after_a_plain_backward(run: Summed) -> None:
    run.model(X).sum().backward()


def compiled(run: Summed) -> None:
    run.backward()
    torch.compile(imported_before, backend="eager")(run.model.weight, 1.0)
    run.amp.unscale_()


HARMLESS = (
    after_unscale,
    after_unscale_by_hand,
    of_another_model,
    after_a_plain_backward,
    compiled,
)


def by_torch(run: Summed) -> None:
    imported_before(run.model.parameters(), 1.0)


def by_value(run: Summed) -> None:
    torch.nn.utils.clip_grad_value_(run.model.parameters(), 1.0)


@pytest.mark.parametrize("clip", [by_torch, by_value])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_clip_after_the_step_is_told_once(
    level: str, clip: Callable[[Summed], None], start: Any, warned: Callable[[], list[str]]
) -> None:
    run = start(level=level)
    for _ in range(2):
        after_a_step(run)
        clip(run)
        run.optimizer.zero_grad()
    (text,) = warned()
    assert f"{os.path.basename(__file__)}:" in text
    assert text.endswith(
        "is given gradients that no amp.backward(loss) has made since the last step, so it changes "
        "no step: call amp.clip_grad_norm_(max_norm) in its place, between amp.backward(loss) and "
        "optimizer.step()"
    )


def test_the_advice_about_a_clip_after_the_step(
    start: Any, warned: Callable[[], list[str]]
) -> None:
    run = start(level="O2")
    for _ in range(2):
        run.backward()
        run.amp.clip_grad_norm_(1.0)
        run.optimizer.step()
        run.optimizer.zero_grad()
        by_torch(run)  # there are no gradients
    assert warned() == []
    after_a_step(run)
    imported_before(run.model.parameters(), float("inf"))  # a norm for a log
    assert warned() == []
    with pytest.raises(RuntimeError, match="got one after the step, which has used these grad"):
        run.amp.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match=r"amp.unscale_\(\): expected a call between amp.back"):
        run.amp.unscale_()


def test_without_a_scale_a_clip_may_follow_a_plain_backward(
    start: Any, warned: Callable[[], list[str]]
) -> None:
    run = start(level="O2", dtype=torch.bfloat16)
    for _ in range(2):
        run.model(X).sum().backward()
        by_torch(run)
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert warned() == []


def test_optimizers_in_turn_clip_their_own(warned: Callable[[], list[str]]) -> None:
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with tritonamp.enable(models, optimizers, level="O2") as amp:
        for _ in range(2):
            for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                amp.backward(model(X).sum(), loss_id=i)
                amp.unscale_(optimizer)
                imported_before(model.parameters(), 1.0)
                optimizer.step()
        assert warned() == []


@pytest.mark.parametrize("prepare", HARMLESS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_nothing_is_said_of_other_gradients(
    level: str,
    prepare: Callable[[Summed], None],
    start: Any,
    warned: Callable[[], list[str]],
) -> None:
    run = start(level=level)
    prepare(run)
    imported_before(run.model.parameters(), 1.0)
    imported_before(run.params(), 1.0)
    torch.nn.utils.clip_grad_value_(run.model.parameters(), 1.0)
    assert warned() == []


@pytest.mark.parametrize("settings", [{"level": "O0"}, {"level": "O2", "dtype": torch.bfloat16}])
def test_nothing_is_said_where_there_is_no_scale(
    settings: dict[str, Any], start: Any, warned: Callable[[], list[str]]
) -> None:
    run = start(**settings)
    run.backward()
    imported_before(run.model.parameters(), 1.0)
    assert warned() == []


def test_nothing_is_said_of_parameters_of_no_enabled_optimizer(
    warned: Callable[[], list[str]],
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-3)
    with tritonamp.enable(model, optimizer, level="O1") as amp:
        amp.backward(model(X).sum())
        imported_before(model[1].parameters(), 1.0)
        assert warned() == []
        imported_before(model.parameters(), 1.0)
        assert len(warned()) == 1


def test_nothing_is_said_of_parameters_that_the_loss_did_not_use(
    warned: Callable[[], list[str]],
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tritonamp.enable(model, optimizer, level="O1") as amp, amp.autocast():
        amp.backward(model[0](X).sum())
        imported_before(model[1].parameters(), 1.0)
    assert warned() == []


def test_ours_says_nothing(start: Any, warned: Callable[[], list[str]]) -> None:
    run = start(level="O2")
    for _ in range(2):
        run.backward()
        run.amp.clip_grad_norm_(1.0)
        run.optimizer.step()
    assert warned() == []


def test_what_is_clipped_is_what_torch_clips(start: Any) -> None:
    plain = nn.Linear(4, 4)
    plain(X).sum().backward()
    own = [p.grad.clone() for p in plain.parameters() if p.grad is not None]
    expected = imported_before(plain.parameters(), 0.5)
    clipped = [p.grad.clone() for p in plain.parameters() if p.grad is not None]
    start(level="O1")
    for param, grad in zip(plain.parameters(), own, strict=True):
        param.grad = grad
    assert torch.equal(imported_before(plain.parameters(), 0.5), expected)
    assert all(map(torch.equal, [p.grad for p in plain.parameters()], clipped))  # type: ignore


def test_torchs_warning_of_an_empty_generator_stays(start: Any) -> None:
    start(level="O1")
    with pytest.warns(UserWarning, match="empty generator"):
        imported_before((p for p in ()), 1.0)


def test_the_last_disable_puts_torchs_functions_back() -> None:
    cells = [wrapped_cell(function) for function in CLIPPING]
    assert None not in cells  # else torch has changed, and nobody would be warned
    stock = [cell.cell_contents for cell in cells if cell is not None]
    first, second = Summed(level="O1"), Summed(level="O2")

    def now() -> list[Any]:
        return [cell.cell_contents for cell in cells if cell is not None]

    assert not set(now()) & set(stock)
    first.amp.disable()
    assert not set(now()) & set(stock)
    second.amp.disable()
    assert now() == stock


@pytest.fixture
def stepped(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "tritonamp")
    return lambda: [m for m in caplog.messages if ".step()" in m and "tritonamp.enable" in m]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_that_was_made_later(
    level: str, start: Any, stepped: Callable[[], list[str]]
) -> None:
    run = start(level=level)
    later = torch.optim.SGD(run.model.parameters(), lr=1e-9)
    run.backward()
    later.step()
    (message,) = stepped()
    assert message.startswith(f"SGD.step() at {os.path.abspath(__file__)}:")
    assert "not one of those given to tritonamp.enable" in message
    later.step()
    assert len(stepped()) == 1


@pytest.mark.parametrize("order", ["before", "after"])
def test_an_optimizer_that_was_forgotten(
    order: str, warnings_of_steps_at: Callable[[str], list[str]]
) -> None:
    assert len(warnings_of_steps_at(order)) == 1


@pytest.fixture
def warnings_of_steps_at(stepped: Callable[[], list[str]]) -> Callable[[str], list[str]]:
    """Train a body and a head of which only the body's optimizer was handed over."""

    def run(order: str) -> list[str]:
        body, head = nn.Linear(4, 4), nn.Linear(4, 1)
        given = torch.optim.AdamW(body.parameters(), lr=1e-3)
        forgotten = torch.optim.AdamW(head.parameters(), lr=1e-3)
        with tritonamp.enable(nn.Sequential(body, head), given, level="O1") as amp:
            for _ in range(2):
                amp.backward(head(body(X)).sum())
                steps = (forgotten, given) if order == "before" else (given, forgotten)
                for optimizer in steps:
                    optimizer.step()
                    optimizer.zero_grad()
        return stepped()

    return run


def test_steps_on_other_gradients(start: Any, stepped: Callable[[], list[str]]) -> None:
    """Of another model, of a level without a scale, by a scaler, of the optimizer handed over."""
    run, other = start(level="O1"), nn.Linear(4, 1)
    elsewhere = torch.optim.SGD(other.parameters(), lr=1e-3)
    run.backward()
    other(X).sum().backward()
    elsewhere.step()
    run.optimizer.step()
    unscaled = start(level="O0")
    unscaled.backward()
    torch.optim.SGD(unscaled.model.parameters(), lr=1e-3).step()
    body, head = nn.Linear(4, 4), nn.Linear(4, 1)
    given, by_scaler = (torch.optim.SGD(m.parameters(), lr=1e-3) for m in (body, head))
    with tritonamp.enable(nn.Sequential(body, head), given, level="O1") as amp:
        amp.scaler.scale(head(body(X)).sum()).backward()
        for optimizer in (given, by_scaler):
            amp.scaler.step(optimizer)
        amp.scaler.update()
    assert stepped() == []


def test_steps_are_watched_while_a_model_is_enabled(start: Any) -> None:
    before = list(_global_optimizer_pre_hooks)
    loops = start(level="O1"), start(level="O2")
    assert len(_global_optimizer_pre_hooks) == len(before) + 1
    for run in loops:
        run.amp.disable()
    assert list(_global_optimizer_pre_hooks) == before


def test_the_watch_costs_an_enabled_step_no_wrapper(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's wrapper of hooks is there for the hooks of others: it takes a twentieth of a step."""
    wrapped: list[Any] = []
    original = torch.optim.Optimizer.profile_hook_step
    monkeypatch.setattr(
        torch.optim.Optimizer,
        "profile_hook_step",
        staticmethod(lambda step: (wrapped.append(step), original(step))[1]),
    )
    run = start(level="O2")
    for _ in range(2):
        run.backward()
        run.optimizer.step()
    assert wrapped == []
    with register_optimizer_step_pre_hook(lambda *_: None):
        run.backward()
        run.optimizer.step()
    assert len(wrapped) == 1


LATE = named("AdamW", "SGD", "RMSprop")


@pytest.mark.parametrize("optimizer", LATE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_an_optimizer_on_bare_half_weights(
    level: str, dtype: torch.dtype, optimizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 4)
    with tritonamp.enable(model, level=level, dtype=dtype):
        later = LATE[optimizer](model.parameters(), lr=1e-3)
        for _ in range(2):
            model(X).square().mean().backward()
            later.step()
    (message,) = (m for m in caplog.messages if "half weights" in m)
    line = f"{optimizer}.step() at {os.path.abspath(__file__)}:"
    assert message.startswith(line) and "the optimizer was not given" in message
    # the advice, as it is printed
    model = nn.Linear(4, 4)
    given = LATE[optimizer](model.parameters(), lr=1e-3)
    with tritonamp.enable(model, given, level="O2") as amp:
        before = [p.clone() for p in amp.master_params()]
        amp.backward(model(X).square().mean())
        given.step()
        assert not any(map(torch.equal, before, amp.master_params()))
    assert len([m for m in caplog.messages if "half weights" in m]) == 1


def ours(params: Any) -> torch.optim.Optimizer:
    return tritonamp.optim.AdamW(params, lr=1e-3)  # keeps masters in its state


@pytest.mark.parametrize(
    ("level", "make_optimizer"),
    [("O0", torch.optim.AdamW), ("O1", torch.optim.AdamW), ("O2", ours), ("O3", ours)],
)
def test_an_optimizer_that_has_fp32_values(
    level: str, make_optimizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 4)
    with tritonamp.enable(model, level=level):
        later = make_optimizer(model.parameters())
        model(X).square().mean().backward()
        later.step()
    assert [m for m in caplog.messages if ".step()" in m] == []


def test_a_disabled_model_is_clipped_in_silence_while_another_one_is_enabled(
    start: Any, warned: Callable[[], list[str]]
) -> None:
    other, run = start(level="O2"), start(level="O2")
    run.step()
    run.amp.disable()
    run.model(X).sum().backward()
    norm = imported_before(run.model.parameters(), 1.0)
    assert warned() == [] and norm > 1.0 and other.amp.stats()["steps"] == 0
