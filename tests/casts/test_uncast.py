"""A module in FP32 reads the FP32 input of a model, though the model's edge has cast it to half."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

LARGE = 1e6


class Reader(nn.Module):
    """Brings its input into range."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        return x / LARGE


class Model(nn.Module):
    """Gives a module its input, after a change."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.change, self.reader, self.last = change, Reader(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.reader(self.change(x)).reshape(-1, 4))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "flat": lambda x: x.flatten(1),
    "transposed": lambda x: x.mT,
    "a part": lambda x: x[1:, :, 1:],
    "a view of a view": lambda x: x.mT[1:].unsqueeze(0),
}
LEVELS: dict[str, dict[str, Any]] = {
    "O2": {"level": "O2", "cast_inputs": True},
    "O2, by name": {"level": "O2", "cast_inputs": ["x"]},
    "O3": {"level": "O3"},
}


def inputs(*shape: int) -> Tensor:
    return LARGE * torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("by", ["policy", "heal"])
def test_it_reads_what_the_caller_gave(handles: Any, view: str, level: str, by: str) -> None:
    model, x = Model(VIEWS[view]), inputs(3, 4, 5) if view == "a part" else inputs(3, 2, 4)
    expected = model(x).detach()
    kept = {"fp32_modules": ["reader"]} if by == "policy" else {}
    amp = handles(model, **LEVELS[level], **kept)
    if by == "heal":
        assert not bool(torch.isfinite(model(x)).all())
        amp.heal("reader")
    output = model(x)
    assert model.reader.seen[-1] is torch.float32
    eps = torch.finfo(torch.float16).eps  # of the inputs, weights and results of ``last``
    assert torch.allclose(output.detach().float(), expected, rtol=4 * eps, atol=4 * eps)


CHANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "written to": lambda x: x.mul_(2),
    "a view that was written to": lambda x: x.flatten(1).mul_(2),
    "another": lambda x: x * 2,
}


@pytest.mark.parametrize("change", CHANGED)
def test_what_the_model_has_changed_is_not_undone(handles: Any, change: str) -> None:
    model, x = Model(CHANGED[change]), torch.ones(2, 4)
    handles(model, level="O2", cast_inputs=True, fp32_modules=["reader"])
    given: list[Tensor] = []
    model.reader.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    model.last.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    model(x)
    assert bool((given[1].float() * LARGE).round().eq(2).all())
    assert bool((x == 1).all())


def test_a_view_of_an_input_with_other_strides_is_widened(handles: Any) -> None:
    """The cast of an expanded tensor is dense, so its views are no views of the input."""
    model, x = Model(VIEWS["flat"]), torch.arange(4.0).expand(3, 2, 4)
    handles(model, level="O2", cast_inputs=True, fp32_modules=["reader"])
    given: list[Tensor] = []
    model.reader.register_forward_hook(lambda _, args, output: given.append(output))
    model(x)
    assert torch.equal(given[0], x.flatten(1) / LARGE)


def test_gradients_arrive_at_the_input(handles: Any) -> None:
    model, x = Model(VIEWS["flat"]), (inputs(3, 2, 4) / LARGE).requires_grad_()
    handles(model, level="O2", cast_inputs=True, fp32_modules=["reader"])
    model(x).float().sum().backward()
    assert x.grad is not None and x.grad.dtype is torch.float32 and bool((x.grad != 0).any())


def test_the_input_is_not_kept_alive(handles: Any) -> None:
    """Autograd keeps the half input of the layer, for the gradient of its weight."""
    model = nn.Linear(4, 2)
    handles(model, level="O2", cast_inputs=True)
    x = torch.ones(2, 4)
    alive = weakref.ref(x)
    output = model(x)
    del x
    gc.collect()
    assert alive() is None and output.grad_fn is not None


def test_a_cast_input_has_no_attributes(handles: Any) -> None:
    """They would be saved along with it."""
    given: list[Tensor] = []
    model = Model()
    handles(model, level="O2", cast_inputs=True)
    model.reader.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    model(torch.ones(2, 4))
    assert given[0].dtype is torch.float16 and not vars(given[0])


class Labelled(Tensor):
    """A tensor with a class of its own, as torchvision's images have."""


@pytest.mark.parametrize("view", ["itself", "flat"])
def test_an_input_of_another_class(handles: Any, view: str) -> None:
    model, x = Model(VIEWS[view]), inputs(3, 2, 4)
    handles(model, level="O2", cast_inputs=True, fp32_modules=["reader"])
    given: list[Tensor] = []
    model.reader.register_forward_hook(lambda _, args, output: given.append(output))
    model(x.as_subclass(Labelled))
    assert type(given[0]) is Labelled
    assert torch.equal(given[0].as_subclass(Tensor), VIEWS[view](x) / LARGE)
