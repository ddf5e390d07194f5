"""What a steady value keeps alive, what it does not, and what it leaves where it fails."""

import gc
import operator
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.steady_steps import FLOATS, MOVED, UNLIKE, Step
from tritonamp.kernels import _facts
from tritonamp.kernels._steady import Steady

pytestmark = pytest.mark.usefixtures("cpp")


def reachable(step: Step) -> list[Any]:
    """Objects that a value compares, and tensors of the state and gradients."""
    optimizer, state = step.optimizer, step.optimizer.state
    groups = optimizer.param_groups
    states = list(state.values())
    return [
        *(vars(optimizer), groups, *groups, *(group["params"] for group in groups)),
        *(state, *states, *(value for values in states for value in values.values())),
        *(*step.params, *step.masters, *step.fixed),
        *(p.grad for p in step.params if p.grad is not None),
    ]


def test_a_value_gives_all_references_back() -> None:
    step = Step()
    objects = reachable(step)
    before = list(map(sys.getrefcount, objects))
    steady = step.steady()
    steady.wrote()
    held = list(map(sys.getrefcount, objects))
    del steady
    after = list(map(sys.getrefcount, objects))
    assert after == before
    grown = [o for o, now, then in zip(objects, held, before, strict=True) if now > then]
    state, groups = step.optimizer.state, step.optimizer.param_groups
    values = [x for own in state.values() for x in own.values()]
    grads = [p.grad for p in step.params if p.grad is not None]
    for replaced in (state, *state.values(), *values, *grads):
        assert not any(o is replaced for o in grown), "state and gradients are not kept alive"
    compared = vars(step.optimizer), groups, step.group, step.group["params"]
    for kept in (*compared, *step.params, *step.masters, *step.fixed):
        assert any(o is kept for o in grown)


def test_a_record_that_fails_gives_all_references_back() -> None:
    step = Step()
    step.fixed.append(torch.zeros(3).to_sparse())  # what is recorded last
    objects = reachable(step)
    before = list(map(sys.getrefcount, objects))
    assert step.record() is None
    assert list(map(sys.getrefcount, objects)) == before


def test_state_that_was_replaced_is_freed() -> None:
    step = Step()
    steady = step.steady()
    first = weakref.ref(step.values["exp_avg"])
    step.optimizer.load_state_dict(step.optimizer.state_dict())
    second = weakref.ref(step.values["exp_avg"])
    assert first() is not None, "torch's load_state_dict keeps tensors that need no cast"
    step.optimizer.state.clear()
    assert first() is None and second() is None
    assert steady.same() == UNLIKE


def test_a_cycle_is_collected() -> None:
    step = Step()
    step.masters[0].steady = step.optimizer.steady = step.steady()
    alive = [weakref.ref(step.masters[0]), weakref.ref(step.optimizer)]
    gc.collect()
    assert all(ref() is not None for ref in alive)
    del step
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_memory_of_values_is_freed() -> None:
    """The capsule's destructor runs: its C++ value has megabytes here."""
    step = Step()
    first = [tuple([0] * 50_000)] * 4

    def record() -> None:
        Steady.record(
            optimizer=step.optimizer,
            keys=(),
            holders=step.params,
            params=step.params,
            fixed=[],
            slots=first,
        )

    record()
    before = resident()
    for _ in range(100):
        record()
    assert resident() - before < 20 << 20, "100 values take 120 MB"


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_questions_leave_no_memory_behind() -> None:
    step = Step()
    steady = step.steady()
    questions = steady.same, steady.same_gradients, steady.untouched, steady.wrote

    def ask() -> None:
        for question in questions:
            question()

    ask()
    before = sys.getallocatedblocks()
    for _ in range(100):
        ask()
    assert sys.getallocatedblocks() - before < 50


# errors


def refuse_access(tensor: Tensor) -> None:
    """Let torch raise where the address of the memory is asked."""
    torch._C._set_throw_on_mutable_data_ptr(tensor)


@pytest.mark.parametrize(
    "ask", [operator.methodcaller("same"), operator.methodcaller("same_gradients")]
)
def test_an_error_of_torch_leaves_slots_and_answers_as_they_were(
    ask: Callable[[Steady], int],
) -> None:
    step = Step()
    steady, before = step.steady(), [p.grad for p in step.params]
    for param in step.params[:3]:
        param.grad = param.grad.clone()
    refuse_access(step.params[2].grad)
    step.group["lr"] = 0.25
    for _ in range(2):
        with pytest.raises(RuntimeError, match="data pointer"):
            ask(steady)
        assert not any(step.slots)
    step.params[2].grad = before[2]
    assert steady.same() == FLOATS | MOVED and all(step.slots[:4])


def test_an_error_of_torch_while_recording() -> None:
    step = Step()
    refuse_access(step.values["exp_avg"])
    objects = reachable(step)
    before = list(map(sys.getrefcount, objects))
    with pytest.raises(RuntimeError, match="data pointer"):
        step.record()
    assert list(map(sys.getrefcount, objects)) == before


def test_inference_tensors_raise_as_their_versions_do() -> None:
    step = Step()
    with torch.inference_mode():
        step.params[0] = torch.zeros(4, 8)
    step.params[0].grad = None
    with pytest.raises(RuntimeError, match="Inference tensors do not track version counter"):
        step.record()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"params": []}, ValueError),
        ({"holders": []}, ValueError),
        ({"slots": []}, ValueError),
        ({"slots": [[], [], [], []]}, TypeError),
        ({"slots": [("1",), (), (), ()]}, TypeError),
        ({"holders": [None] * 4}, None),
        ({"params": [None] * 4}, None),
        ({"fixed": [[None]]}, None),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], error: type[Exception] | None) -> None:
    step = Step()
    given: dict[str, Any] = {
        "optimizer": step.optimizer,
        "keys": (),
        "holders": step.params,
        "params": step.params,
        "fixed": [],
        "slots": [()] * 4,
    }
    if error is None:
        assert Steady.record(**given | wrong) is None
    else:
        with pytest.raises(error):
            Steady.record(**given | wrong)


def test_another_capsule_is_refused(cpp: Any) -> None:
    with pytest.raises(ValueError, match="incorrect name"):
        cpp.steady_same(torch._C._to_dlpack(torch.zeros(2)))


def test_without_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_facts, "_native", _facts._InPython)
    assert Step().record() is None
