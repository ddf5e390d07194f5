"""Gradients and other tensors of a step: each fact changes alone, and the next step notices it."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.steady_steps import FLOATS, MOVED, SAME, UNLIKE, UNUSED, Step
from tritonamp.kernels import _facts
from tritonamp.kernels._steady import Steady

pytestmark = pytest.mark.usefixtures("cpp")


class Wrapped(Tensor):
    pass


class WrappedParameter(nn.Parameter):
    pass


Change = Callable[[Step], Any]


def unaligned(x: Tensor) -> Tensor:
    """A copy of the same layout, one element behind an address that is a multiple of 16."""
    return x.new_zeros(x.numel() + 1)[1:].as_strided(x.shape, x.stride()).copy_(x)


def grad(row: int, change: Callable[[Tensor], Any]) -> Change:
    """A change of a gradient past the checks of ``Tensor.grad``."""
    return lambda step: setattr(step.params[row].grad, "data", change(step.params[row].grad))


def new_grad(row: int, change: Callable[[Tensor], Any]) -> Change:
    return lambda step: setattr(step.params[row], "grad", change(step.params[row].grad))


def first_grad(step: Step) -> None:
    step.params[UNUSED].grad = torch.zeros_like(step.params[UNUSED])


def move_all(step: Step) -> None:
    for param in step.params[:UNUSED]:
        param.grad = param.grad.clone()


GRADIENTS: dict[str, tuple[Change, int]] = {
    "nothing": (lambda step: None, SAME),
    "moved": (new_grad(1, Tensor.clone), MOVED),
    "all moved": (move_all, MOVED),
    "another object": (new_grad(0, Tensor.detach), SAME),
    "written to": (new_grad(0, lambda g: g.add_(1)), SAME),
    "requires_grad": (new_grad(0, lambda g: g.requires_grad_()), SAME),
    "none": (new_grad(0, lambda g: None), UNLIKE),
    "no longer none": (first_grad, UNLIKE),
    "size": (grad(0, lambda g: g.view(8, 4)), UNLIKE),
    "fewer elements": (grad(0, lambda g: g[:2]), UNLIKE),
    "more dimensions": (grad(0, lambda g: g.view(4, 8, 1)), UNLIKE),
    "strides": (grad(0, lambda g: torch.empty_strided((4, 8), (1, 4), dtype=g.dtype)), UNLIKE),
    "contiguous strides": (grad(2, Tensor.contiguous), UNLIKE),
    "strides, never contiguous": (
        grad(2, lambda g: torch.empty_strided(g.shape, (60, 1, 3, 12), dtype=g.dtype)),
        UNLIKE,
    ),
    "dtype": (grad(0, Tensor.bfloat16), UNLIKE),
    "negated": (new_grad(0, torch._neg_view), UNLIKE),
    "alignment": (new_grad(0, unaligned), UNLIKE),
    "sparse": (new_grad(1, Tensor.to_sparse), UNLIKE),
    "subclass": (new_grad(0, lambda g: g.as_subclass(Wrapped)), UNLIKE),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str) -> None:
    step = Step()
    steady, (change, expected) = step.steady(), GRADIENTS[name]
    change(step)
    assert steady.same() == expected
    if expected == MOVED:
        steady.sent_gradients()
        assert steady.same() == SAME, "the new addresses are known"
    elif expected == UNLIKE:
        assert steady.same_gradients() == steady.same() == UNLIKE


def test_gradients_that_python_has_not_seen() -> None:
    """A backward makes gradients that have no object yet."""
    step = Step()
    steady = step.steady()
    step.params[0].grad = None
    (step.params[0] * 2).sum().backward()
    assert steady.same() in (SAME, MOVED)


def test_fewer_dimensions_of_the_last_gradient() -> None:
    """No size of another gradient follows."""
    step = Step()
    step.params[2].grad = None
    steady = step.steady()
    grad(1, lambda g: g[:, 0].contiguous())(step)
    assert steady.same() == UNLIKE


def test_slots_hold_the_addresses_of_moved_gradients() -> None:
    step = Step()
    steady, before = step.steady(), [p.grad for p in step.params]  # the new ones lie elsewhere
    assert list(step.slots) == [0] * 8, "recorded where they lie: there is nothing to write"
    new_grad(1, Tensor.clone)(step)
    moved = step.params[1].grad.data_ptr()
    assert steady.same_gradients() == 1 and list(step.slots) == [0, 0, moved, moved, 0, 0, 0, 0]
    assert steady.same_gradients() == 1, "not sent"
    steady.sent_gradients()
    assert steady.same_gradients() == 0
    move_all(step)
    assert steady.same() == steady.same() == MOVED
    steady.sent_gradients()
    assert steady.same() == SAME
    addresses = [p.grad.data_ptr() for p in step.params[:UNUSED]]
    assert list(step.slots) == [a for address in (*addresses, 0) for a in (address, address)]
    for param, old in zip(step.params, before, strict=True):
        param.grad = old
    assert steady.same_gradients() == UNUSED


def test_each_answer_repeats_until_it_was_sent() -> None:
    step = Step()
    steady = step.steady()
    step.group["lr"] = 0.25
    move_all(step)
    assert steady.same() == steady.same() == FLOATS | MOVED
    steady.sent_gradients()
    assert steady.same() == FLOATS and steady.same_gradients() == 0
    move_all(step)
    assert steady.same_gradients() > 0
    steady.sent_hyperparameters()
    assert steady.same() == MOVED
    steady.sent_gradients()
    assert steady.same() == SAME


@pytest.mark.parametrize(
    "ask", [operator.methodcaller("same"), operator.methodcaller("same_gradients")]
)
def test_slots_stay_if_anything_is_unlike(ask: Callable[[Steady], int]) -> None:
    """The step that is built then finds its plans as an earlier step has left them."""
    step = Step()
    steady, before = step.steady(), [p.grad for p in step.params]
    move_all(step)
    step.params[2].grad = None
    assert ask(steady) == UNLIKE and not any(step.slots)
    step.params[2].grad = before[2]
    assert ask(steady) > 0 and all(step.slots[:4]) and not any(step.slots[4:])


# parameters, masters, further tensors


def data(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda x: setattr(x, "data", change(x.detach()))


def set_dtype(x: Tensor) -> None:
    """Another dtype in the same memory."""
    x.requires_grad_(False)  # which only floating point can have
    x.data = x.data.view(torch.int16 if x.element_size() == 2 else torch.int32)


def swap(x: Tensor) -> None:
    """Another TensorImpl in the same object."""
    other = x.detach().clone()
    torch.utils.swap_tensors(x, nn.Parameter(other) if isinstance(x, nn.Parameter) else other)


TENSORS: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "requires_grad": (lambda x: x.requires_grad_(not x.requires_grad), SAME),
    "own data": (data(lambda x: x), SAME),
    "a write that is not counted": (lambda x: x.data.add_(1), SAME),
    "data": (data(Tensor.clone), UNLIKE),
    "shape": (data(lambda x: x.view(-1, 2)), UNLIKE),
    "dimensions": (data(lambda x: x.view(*x.shape, 1)), UNLIKE),
    "strides": (data(lambda x: x.as_strided(x.shape, (1, *x.stride()[1:]))), UNLIKE),
    "fewer elements": (data(lambda x: x[:1]), UNLIKE),
    "dtype": (set_dtype, UNLIKE),
    "empty": (lambda x: x.untyped_storage().resize_(0), UNLIKE),
    "swapped": (swap, UNLIKE),
}
ROWS: dict[str, Callable[[Step], Tensor]] = {
    "parameter": lambda step: step.params[0],
    "master": lambda step: step.masters[0],
    "its own master": lambda step: step.params[1],
    "parameter without gradient": lambda step: step.params[UNUSED],
    "master without gradient": lambda step: step.masters[UNUSED],
    "state": lambda step: step.values["exp_avg"],
    "fixed": lambda step: step.fixed[1],
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("row", ROWS)
def test_tensors(name: str, row: str) -> None:
    step = Step()
    steady, (change, expected) = step.steady(), TENSORS[name]
    change(ROWS[row](step))
    assert steady.same() == expected


@pytest.mark.parametrize("row", ROWS)
def test_other_class(row: str) -> None:
    """The same tensor in the same memory, of a subclass now."""
    step = Step()
    steady, tensor = step.steady(), ROWS[row](step)
    tensor.__class__ = WrappedParameter if isinstance(tensor, nn.Parameter) else Wrapped
    assert steady.same() == UNLIKE


def test_same_gradients_asks_gradients_alone() -> None:
    """The step asks the rest later."""
    step = Step()
    steady = step.steady()
    step.masters[0].data = step.masters[0].data.clone()
    step.group["lr"] = 1
    step.values.clear()
    assert steady.same_gradients() == 0 and steady.same() == UNLIKE


# writes


VERSIONED = [name for name in ROWS if name not in ("state", "fixed")]


@pytest.mark.parametrize("row", VERSIONED)
def test_counted_writes(row: str) -> None:
    step = Step()
    steady = step.steady()
    with torch.no_grad():
        ROWS[row](step).add_(1)
    is_param = row != "master" and row != "master without gradient"
    assert steady.same() == UNLIKE and steady.untouched() == (not is_param)
    steady.wrote()
    assert (steady.same() == UNLIKE) == ("without gradient" in row)


@pytest.mark.parametrize("row", ["state", "fixed"])
def test_writes_to_other_tensors_do_not_matter(row: str) -> None:
    """Kernels read what is in the memory."""
    step = Step()
    steady = step.steady()
    ROWS[row](step).add_(1)
    assert steady.same() == SAME and steady.untouched()


def test_wrote_counts_a_write_to_each_tensor_that_takes_part() -> None:
    step = Step()
    tensors = [*step.params[:UNUSED], step.masters[0], step.masters[2]]
    others = [step.params[UNUSED], step.masters[UNUSED], *step.fixed, *step.values.values()]
    steady = step.steady()
    before = _facts.versions(tensors)
    left = _facts.versions(others)
    steady.wrote()
    counts = zip(_facts.numbers(before), _facts.numbers(_facts.versions(tensors)), strict=True)
    assert all(after == count + 1 for count, after in counts), "once, where it is its own master"
    assert _facts.versions(others) == left
    assert steady.same() == SAME and steady.untouched()


def test_autograd_sees_the_writes() -> None:
    step = Step()
    steady = step.steady()
    saved = (step.params[0] * step.params[0]).sum()
    steady.wrote()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()
