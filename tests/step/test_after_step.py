"""``amp.after_step``: functions after each step, which know of skips and may write masters."""

import gc
import weakref
from typing import Any

import pytest
import torch
from gpuless.real_cuda import AnyCuda
from helpers import Net, take_step
from runs import FORMS, LEVELS, Training, batch, in_two, started_on_cpu
from torch import Tensor, nn

import tritonamp

FACTOR = 0.75
HALVES = [torch.float16, torch.bfloat16]

run = started_on_cpu()


def shrinking(training: Training) -> Any:
    """Return a function that multiplies the first weight by FACTOR if the step was taken."""

    def shrink(taken: Tensor) -> None:
        factor = torch.where(taken, FACTOR, 1.0)
        dict(training.amp.named_master_params())["first.weight"].mul_(factor)

    return shrink


def shrink_by_hand(training: Training) -> None:
    with torch.no_grad():
        dict(training.amp.named_master_params())["first.weight"].mul_(FACTOR)


def check_agreement(training: Training) -> None:
    """Each stored parameter is its rounded FP32 value, without a forward."""
    for name, master in training.amp.named_master_params():
        param = training.model.get_parameter(name)
        assert torch.equal(param.detach(), master.detach().to(param.dtype)), name


def assert_like(a: Training, b: Training) -> None:
    b.loss()  # a forward, for the half parameters
    assert all(map(torch.equal, a.everything(), b.everything()))


@pytest.mark.parametrize("by_scaler", [False, True], ids=["step", "scaler.step"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD momentum", "Lion", "NAdam"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_writes_are_those_of_a_loop(
    run: Any, level: str, dtype: torch.dtype, kind: str, by_scaler: bool
) -> None:
    if (level, dtype, kind) == ("O3", torch.float16, "NAdam"):
        pytest.skip("its eps is 0 in float16")
    hooked, plain = (run(optimizer=kind, level=level, dtype=dtype) for _ in range(2))
    hooked.amp.after_step(shrinking(hooked))
    for seed in range(6):
        bad = seed in (2, 3)
        for each in (hooked, plain):
            each.step(batch(seed), bad=bad, by_scaler=by_scaler)
        if not bad:
            shrink_by_hand(plain)
        check_agreement(hooked)
    assert hooked.causes.count(None) == 4
    assert_like(hooked, plain)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_forms_of_masters(run: Any, level: str, form: str, dtype: torch.dtype) -> None:
    if level == "O3" and form not in ("fp32", "bf16"):
        pytest.skip("O3 has no masters")
    hooked, plain = (run(level=level, dtype=dtype, **FORMS[form]) for _ in range(2))
    hooked.amp.after_step(shrinking(hooked))
    for seed in range(5):
        for each in (hooked, plain):
            each.step(batch(seed), bad=seed == 2)
        if seed != 2:
            shrink_by_hand(plain)
        check_agreement(hooked)
    assert_like(hooked, plain)


@pytest.mark.parametrize("masters", ["fp32", "packed"])
def test_offloaded_masters(cuda: AnyCuda, masters: str) -> None:
    fields: Any = {"offload": "state", "masters": masters, "device": "cuda"}
    with Training(**fields) as hooked, Training(**fields) as plain:
        hooked.amp.after_step(shrinking(hooked))
        for seed in range(3):
            for each in (hooked, plain):
                each.step(batch(seed, device="cuda"), bad=seed == 1)
            if seed != 1:
                shrink_by_hand(plain)
            check_agreement(hooked)
        assert_like(hooked, plain)


def test_packed_masters_are_given_up(run: Any) -> None:
    """They would take four bytes per parameter until the next step."""
    training, lent = run(masters="packed"), list[Any]()
    own = set(training.model.parameters())

    def read(taken: Tensor) -> None:
        lent.extend(weakref.ref(m) for m in training.amp.master_params() if m not in own)

    training.amp.after_step(read)
    training.step()
    gc.collect()
    assert lent and all(ref() is None for ref in lent)


def test_what_the_function_is_told(run: Any) -> None:
    training, told = run(), list[Tensor]()

    def note(taken: Tensor) -> None:
        assert not torch.is_grad_enabled()
        told.append(taken)

    training.amp.after_step(note)
    for factor in (1.0, float("nan"), 1.0):
        training.step(factor=factor)
    assert [(t.dtype, t.dim(), t.item()) for t in told] == [
        (torch.bool, 0, True), (torch.bool, 0, False), (torch.bool, 0, True)
    ]  # fmt: skip
    training.backward()
    training.amp.veto(True)
    training.finish()
    assert not told.pop()


def test_once_per_step_of_an_optimizer(run: Any) -> None:
    training, told = run(optimizer=in_two), list[str]()
    first, second = training.optimizers
    training.amp.after_step(lambda taken: told.append("all"))
    training.amp.after_step(lambda taken: told.append("second"), second)
    training.amp.after_step(lambda taken: told.append("each"), [first, second])
    for _ in range(3):
        training.backward()
    assert told == []
    training.finish()
    assert told == ["all", "each", "all", "second", "each"]
    training.finish()  # without gradients
    assert len(told) == 5


def test_removal(run: Any) -> None:
    training, told = run(), list[str]()
    with training.amp.after_step(lambda taken: told.append("a")) as handle:
        assert isinstance(handle, torch.utils.hooks.RemovableHandle)
        training.step()
    training.step()
    once = training.amp.after_step(lambda taken: (told.append("once"), once.remove()))
    kept = training.amp.after_step(lambda taken: told.append("b"))
    training.step()
    training.step()
    assert told == ["a", "once", "b", "b"]
    training.amp.disable()
    training.optimizer.zero_grad()
    training.model(training.x).sum().backward()
    training.optimizer.step()
    assert len(told) == 4
    kept.remove()


@pytest.mark.parametrize("form", ["fp32", "packed fp32"])
@pytest.mark.parametrize("kind", ["AdamW", "NAdam"])
def test_an_exception_leaves_the_step_and_the_writes(run: Any, kind: str, form: str) -> None:
    if kind == "NAdam" and form != "fp32":
        pytest.skip("no packed masters")
    hooked, plain = (run(optimizer=kind, **FORMS[form]) for _ in range(2))
    shrink = shrinking(hooked)

    def fail(taken: Tensor) -> None:
        shrink(taken)
        raise KeyError("hook")

    handle = hooked.amp.after_step(fail)
    later = hooked.amp.after_step(lambda taken: pytest.fail("a later function"))
    with pytest.raises(KeyError, match="hook"):
        hooked.step()
    hooked.zero_grad()
    plain.step()
    shrink_by_hand(plain)
    check_agreement(hooked)
    handle.remove()
    later.remove()
    for each in (hooked, plain):
        each.step(batch(1))
    assert_like(hooked, plain)
    assert hooked.causes == [None, None]


@pytest.mark.parametrize("how", ["explain", "raise", "heal"])
def test_a_skip_that_is_answered(run: Any, how: str) -> None:
    training, told = run(on_nonfinite=how), list[bool]()
    training.amp.after_step(lambda taken: told.append(bool(taken)))
    training.step()
    bad = torch.full_like(training.x, float("nan"))
    if how == "raise":
        with pytest.raises(tritonamp.NonFiniteError):
            training.step(bad)
        training.zero_grad()
        assert told == [True]
    else:
        training.step(bad)
        assert told == [True, False]


@pytest.mark.parametrize("fields", [{}, {"masters": "packed"}], ids=["fp32", "packed"])
def test_changes_sees_the_writes(run: Any, fields: dict[str, Any]) -> None:
    training = run(track_changes=True, **fields)
    write_at = torch.tensor([1, 5])

    def write(taken: Tensor) -> None:
        weight = dict(training.amp.named_master_params())["first.weight"].view(-1)
        weight[write_at] = torch.where(taken, 3.0, weight[write_at])

    handle = training.amp.after_step(write)
    training.optimizer.param_groups[0]["lr"] = 0.0
    training.optimizer.param_groups[0]["weight_decay"] = 0.0
    training.amp.changes()
    training.step()
    positions, values = training.amp.changes()["first.weight"]
    found = dict(zip(positions.tolist(), values.tolist(), strict=True))
    assert found[1] == found[5] == 3.0
    whole = training.model.first.weight.numel()
    assert len(found) == (whole if fields else 2)  # packed ones count as a whole
    handle.remove()
    training.amp.changes()
    training.step()
    assert len(training.amp.changes()["first.weight"][0]) == 0


def test_ema_sees_the_writes(run: Any) -> None:
    training = run()
    training.amp.after_step(shrinking(training))
    ema = training.amp.ema(0.5)
    before = dict(training.amp.named_master_params())["first.weight"].detach().clone()
    training.step()
    ema.update()
    after = dict(training.amp.named_master_params())["first.weight"].detach()
    torch.testing.assert_close(ema.state_dict()["first.weight"], (before + after) / 2)
    training.step(bad=True)
    kept = ema.state_dict()["first.weight"].clone()
    ema.update()
    assert torch.equal(ema.state_dict()["first.weight"], kept)


def test_writes_to_half_parameters(run: Any) -> None:
    """The master follows, as after any write to a half parameter."""
    training = run()
    training.amp.after_step(lambda taken: training.model.first.weight.clamp_(-0.125, 0.125))
    training.step()
    for _ in range(2):
        weight = dict(training.amp.named_master_params())["first.weight"]
        assert weight.abs().max() == 0.125
        training.step()


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_forwards_compute_with_the_writes(run: Any) -> None:
    training = run()
    compiled = torch.compile(training.model, backend="eager")
    training.amp.after_step(shrinking(training))
    for seed in range(3):
        take_step(training.amp, training.optimizer, compiled(batch(seed)).float().square().mean())
        training.zero_grad()
        with torch.no_grad():
            assert torch.equal(compiled(training.x), training.model(training.x))
    torch._dynamo.reset()


def test_saved_values_are_those_that_were_written(run: Any) -> None:
    training = run()
    training.amp.after_step(shrinking(training))
    training.step()
    state = training.model.state_dict()["first.weight"]
    assert torch.equal(state, dict(training.amp.named_master_params())["first.weight"])


def test_misuse(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    training = run()
    with pytest.raises(ValueError, match=r"function: expected a function of one tensor.*got int"):
        training.amp.after_step(3)
    for wrong in (lambda: None, lambda taken, more: None):
        with pytest.raises(ValueError, match=r"one tensor \(taken\), got test_misuse.*argument"):
            training.amp.after_step(wrong)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"optimizer 0: expected one given to tritonamp.enable"):
        training.amp.after_step(print, other)
    handle = training.amp.after_step(lambda taken: None)
    before = training.everything()
    training.backward()
    with monkeypatch.context() as patched:
        patched.setattr("tritonamp.step.after_step.is_capturing", lambda device: True)
        with pytest.raises(RuntimeError, match=r"expected no function while a CUDA graph"):
            training.optimizer.step()
    assert all(map(torch.equal, before, training.everything()))
    handle.remove()
    training.finish()
    training.amp._parts.stepper.outcomes[training.optimizer].captured = True
    with pytest.raises(RuntimeError, match=r"got one after a capture.*after each replay"):
        training.amp.after_step(lambda taken: None)
    training.amp._parts.stepper.outcomes[training.optimizer].captured = False
    training.amp.disable()
    with pytest.raises(RuntimeError, match=r"amp.after_step\(\): this model was disabled"):
        training.amp.after_step(lambda taken: None)
    with tritonamp.enable(Net()) as amp, pytest.raises(RuntimeError, match="without an optimizer"):
        amp.after_step(lambda taken: None)
