"""Groups and state of a step: each fact changes alone, and the next step notices it."""

import copy
import gc
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.kernels.steady_steps import FLOATS, SAME, UNLIKE, UNUSED, Step

pytestmark = pytest.mark.usefixtures("cpp")

Change = Callable[[Step], Any]
NAN = float("nan")


def value(key: str, before: Any, after: Any) -> tuple[str, Any, Any]:
    return key, before, after


# key, value that the step has read, value at the next step, answer of ``same``
VALUES: dict[str, tuple[str, Any, Any, int]] = {
    "a float": ("lr", 0.5, 0.25, FLOATS),
    "an equal float": ("lr", 0.1 + 0.2, float("0.30000000000000004"), SAME),
    "minus 0": ("weight_decay", 0.0, -0.0, FLOATS),
    "nan": ("lr", NAN, NAN, SAME),
    "a float of numpy": ("lr", np.float64(0.5), np.float64(0.25), FLOATS),
    "float to numpy": ("lr", 0.5, np.float64(0.5), UNLIKE),
    "int to float": ("lr", 1, 1.0, UNLIKE),
    "float to int": ("lr", 1.0, 1, UNLIKE),
    "int to bool": ("foreign", 1, True, UNLIKE),
    "an int": ("foreign", 1000, 1001, UNLIKE),
    "an equal int": ("foreign", 10**6, int("1000000"), SAME),
    "an int to a huge one": ("foreign", -1, 1 << 70, UNLIKE),
    "true to false": ("amsgrad", True, False, UNLIKE),
    "none to false": ("foreign", None, False, UNLIKE),
    "a string": ("foreign", "one", "two", UNLIKE),
    "a float in a tuple": ("betas", (0.9, 0.99), (0.8, 0.99), FLOATS),
    "the last float in a tuple": ("betas", (0.9, 0.99), (0.9, 0.98), FLOATS),
    "an equal tuple": ("betas", (0.9, 0.99), tuple([0.9, 0.99]), SAME),
    "a longer tuple": ("betas", (0.9, 0.99), (0.9, 0.99, 0.999), UNLIKE),
    "a shorter tuple": ("betas", (0.9, 0.99), (0.9,), UNLIKE),
    "a shorter tuple at the end": ("absent", (0.9, 0.99), (0.9,), UNLIKE),  # no value follows
    "a float in a tuple to int": ("betas", (1.0, 0.99), (1, 0.99), UNLIKE),
    "an int in a tuple": ("betas", (1, 0.99), (0, 0.99), UNLIKE),
    "tuples in a tuple": ("betas", ((1.0,), ()), ((2.0,), ()), FLOATS),
    "tuple to list": ("betas", (0.9, 0.99), [0.9, 0.99], UNLIKE),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("of_group", [0, 1])
def test_hyperparameters(name: str, of_group: int) -> None:
    step = Step()
    group = step.optimizer.param_groups[of_group]
    key, before, after, answer = VALUES[name]
    group[key] = before
    steady = step.steady()
    group[key] = after
    assert steady.same() == steady.same() == answer
    steady.sent_hyperparameters()
    assert steady.same() == (UNLIKE if answer == UNLIKE else SAME)


IN_PLACE: dict[str, Callable[[], Any]] = {
    "a tensor": lambda: torch.tensor(0.5),
    "a list": lambda: [0.9, 0.99],
    "a tuple with a tensor": lambda: (torch.tensor(0.9), 0.99),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_hyperparameters_that_can_change_in_place(name: str) -> None:
    """They are read at each step."""
    step = Step()
    step.group["betas"] = IN_PLACE[name]()
    steady = step.record()
    assert steady is not None and steady.same() == FLOATS
    steady.sent_hyperparameters()
    assert steady.same() == FLOATS
    step.group["betas"] = None
    gc.collect()
    step.group["betas"] = IN_PLACE[name]()
    assert steady.same() == UNLIKE


def test_another_float_counts_until_it_was_sent() -> None:
    step = Step()
    steady = step.steady()
    step.group["lr"] = 0.25
    grad, step.params[0].grad = step.params[0].grad, None
    assert steady.same() == UNLIKE
    step.params[0].grad = grad
    assert steady.same() == FLOATS
    step.group["lr"] = 0.5
    assert steady.same() == FLOATS
    steady.sent_hyperparameters()
    assert steady.same() == SAME


def test_a_huge_int_has_no_value() -> None:
    step = Step()
    step.group["foreign"] = 1 << 70
    assert step.record() is None


# groups. What is replaced is dropped first: without the value's reference, an object that is made
# next could have its address.


def replace(container: Any, key: Any, make: Callable[[Any], Any]) -> None:
    """Put a copy where an object was."""
    parts = copy.copy(container[key])
    container[key] = None
    gc.collect()
    container[key] = make(parts)


def replace_groups(step: Step) -> None:
    replace(vars(step.optimizer), "param_groups", list)


def replace_parameter(step: Step) -> None:
    step.group["params"][0] = nn.Parameter(step.masters[0].detach().clone())


def swap_parameters(step: Step) -> None:
    step.group["params"].reverse()


def reorder(mapping: Any, key: Any) -> None:
    mapping[key] = mapping.pop(key)


def load(step: Step) -> None:
    step.optimizer.load_state_dict(step.optimizer.state_dict())


GROUPS: dict[str, tuple[Change, int]] = {
    "list replaced": (replace_groups, UNLIKE),
    "list of the same groups": (
        lambda step: step.optimizer.__setattr__("param_groups", [*step.optimizer.param_groups]),
        UNLIKE,
    ),
    "dictionary replaced": (lambda s: replace(s.optimizer.param_groups, 0, dict), UNLIKE),
    "order": (lambda s: s.optimizer.param_groups.reverse(), UNLIKE),
    "added": (
        lambda s: s.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}),
        UNLIKE,
    ),
    "removed": (lambda s: s.optimizer.param_groups.pop(), UNLIKE),
    "parameters replaced": (lambda s: replace(s.group, "params", list), UNLIKE),
    "parameter replaced": (replace_parameter, UNLIKE),
    "order of parameters": (swap_parameters, UNLIKE),
    "parameter added": (lambda s: s.group["params"].append(nn.Parameter(torch.zeros(2))), UNLIKE),
    "parameter removed": (lambda s: s.group["params"].pop(), UNLIKE),
    "key added": (lambda s: s.group.update(absent=None), UNLIKE),
    "key removed": (lambda s: s.group.pop("lr"), UNLIKE),
    "key exchanged": (lambda s: (s.group.pop("fused"), s.group.update(absent=None)), UNLIKE),
    "order of keys": (lambda s: reorder(s.group, "lr"), UNLIKE),
    "a value that no step reads": (lambda s: s.group.update(differentiable=[]), SAME),
    "loaded": (load, UNLIKE),
}


@pytest.mark.parametrize("name", GROUPS)
def test_groups(name: str) -> None:
    step = Step()
    steady, (change, expected) = step.steady(), GROUPS[name]
    change(step)
    assert steady.same() == expected


# state


def renamed(step: Step) -> None:
    step.values["renamed"] = step.values.pop("exp_avg_sq")


STATE: dict[str, tuple[Change, int]] = {
    "replaced": (lambda s: replace(vars(s.optimizer), "state", copy.copy), SAME),
    "replaced by a list": (lambda s: replace(vars(s.optimizer), "state", list), UNLIKE),
    "gone": (lambda s: vars(s.optimizer).pop("state"), UNLIKE),
    "order": (lambda s: reorder(s.optimizer.state, s.masters[0]), UNLIKE),
    "a parameter gone": (lambda s: s.optimizer.state.pop(s.masters[0]), UNLIKE),
    "a parameter without gradient gone": (
        lambda s: s.optimizer.state.pop(s.masters[UNUSED]),
        UNLIKE,
    ),
    "another key": (lambda s: s.optimizer.state.update({nn.Parameter(torch.zeros(2)): {}}), UNLIKE),
    "a key of another kind": (lambda s: s.optimizer.state.update(global_step=1), UNLIKE),
    "of a parameter replaced": (lambda s: replace(s.optimizer.state, s.masters[0], dict), SAME),
    "of a parameter replaced by another kind": (
        lambda s: replace(s.optimizer.state, s.masters[0], OrderedDict),
        UNLIKE,
    ),
    "of a parameter without gradient replaced": (
        lambda s: replace(s.optimizer.state, s.masters[UNUSED], dict),
        SAME,
    ),
    "of a parameter without gradient": (
        lambda s: s.optimizer.state[s.masters[UNUSED]].clear(),
        SAME,
    ),
    "cloned": (lambda s: s.values.update(exp_avg=s.values["exp_avg"].clone()), UNLIKE),
    "another object in the same memory": (
        lambda s: s.values.update(exp_avg=s.values["exp_avg"].detach()),
        SAME,
    ),
    "none": (lambda s: s.values.update(exp_avg=None), UNLIKE),
    "none to a tensor": (lambda s: s.values.update(none=torch.zeros(2)), UNLIKE),
    "set to other memory": (lambda s: s.values["exp_avg"].set_(torch.zeros(4, 8)), UNLIKE),
    "dtype": (lambda s: setattr(s.values["exp_avg"], "data", torch.zeros(4, 8).half()), UNLIKE),
    "count of steps": (lambda s: s.values["step"].add_(1), SAME),
    "another count of steps": (lambda s: s.values.update(step=torch.tensor(1.0)), UNLIKE),
    "key added": (lambda s: s.values.update(more=torch.zeros(2)), UNLIKE),
    "key removed": (lambda s: s.values.pop("exp_avg_sq"), UNLIKE),
    "key renamed": (renamed, UNLIKE),
    "last key renamed": (lambda s: s.values.update(other=s.values.pop("number")), UNLIKE),
    "order of keys": (lambda s: reorder(s.values, "exp_avg"), UNLIKE),
    "an equal tuple": (lambda s: s.values.update(strides=tuple([8, 1])), SAME),
    "another tuple": (lambda s: s.values.update(strides=(1, 4)), UNLIKE),
    "another float": (lambda s: s.values.update(number=3.0), UNLIKE),
    "emptied": (lambda s: s.optimizer.state.clear(), UNLIKE),
}


@pytest.mark.parametrize("name", STATE)
def test_state(name: str) -> None:
    step = Step()
    step.values.update(strides=(8, 1), none=None, number=2.0)
    steady, (change, expected) = step.steady(), STATE[name]
    change(step)
    assert steady.same() == steady.same() == expected


def test_no_state() -> None:
    step = Step()
    step.optimizer.state.clear()
    steady = step.steady()
    step.optimizer.state[step.masters[0]] = {}
    assert steady.same() == UNLIKE


# the last entry that was recorded, after which no other one would be unlike


ENDS: dict[str, tuple[Change, Change]] = {
    "key of a group": (
        lambda step: None,
        lambda step: step.optimizer.param_groups[-1].popitem(),
    ),
    "parameter of a group": (
        lambda step: reorder(step.optimizer.param_groups[-1], "params"),
        lambda step: step.optimizer.param_groups[-1]["params"].pop(),
    ),
    "parameter of the state": (
        lambda step: None,
        lambda step: step.optimizer.state.popitem(),
    ),
    "value of the state": (
        lambda step: reorder(step.optimizer.state, step.masters[0]),
        lambda step: step.values.popitem(),
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_last_entry_gone(name: str) -> None:
    step, (prepare, change) = Step(), ENDS[name]
    prepare(step)
    steady = step.steady()
    change(step)
    assert steady.same() == UNLIKE


# what has no value

NONE: dict[str, Change] = {
    "a list in the state": lambda s: s.values.update(history=[]),
    "a sparse tensor in the state": lambda s: s.values.update(exp_avg=torch.zeros(4).to_sparse()),
    "a state of another class": lambda s: vars(s.optimizer).update(state=None),
    "state of a parameter that is no dictionary": lambda s: s.optimizer.state.update(
        {s.masters[0]: OrderedDict()}
    ),
    "a tuple of groups": lambda s: vars(s.optimizer).update(
        param_groups=tuple(s.optimizer.param_groups)
    ),
    "a group of another class": lambda s: s.optimizer.param_groups.append(OrderedDict(params=[])),
    "a tuple of parameters": lambda s: s.group.update(params=tuple(s.group["params"])),
    "no groups": lambda s: vars(s.optimizer).pop("param_groups"),
}


@pytest.mark.parametrize("name", NONE)
def test_no_value(name: str) -> None:
    step = Step()
    NONE[name](step)
    assert step.record() is None
