"""Scripted code is refused, and the message has a remedy."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonamp

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")


def gate(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * x


class Gated(nn.Module):
    def __init__(self, function: Any = gate, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer, self.function = layer or nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def with_a_global() -> nn.Module:
    class OfAGlobal(Gated):
        def forward(self, x: Tensor) -> Tensor:
            return scripted_gate(self.layer(x))  # noqa: F821 - set below

    OfAGlobal.forward.__globals__["scripted_gate"] = torch.jit.script(gate)
    return OfAGlobal()


def with_a_nonlocal() -> nn.Module:
    scripted = torch.jit.script(gate)

    class OfANonlocal(Gated):
        def forward(self, x: Tensor) -> Tensor:
            return scripted(self.layer(x))

    return OfANonlocal()


SCRIPTED = {
    "the model, a ScriptModule": lambda: torch.jit.script(nn.Linear(4, 4)),
    "submodule 'layer', a ScriptModule": lambda: Gated(layer=torch.jit.script(nn.Linear(4, 4))),
    "function, a ScriptFunction in the forward of the model": lambda: Gated(torch.jit.script(gate)),
    "scripted_gate, a ScriptFunction in the forward of submodule '0'": lambda: nn.Sequential(
        with_a_global()
    ),
    "scripted, a ScriptFunction in the forward of the model": with_a_nonlocal,
}


@pytest.mark.parametrize("got", SCRIPTED)
def test_scripted_parts_are_refused(got: str) -> None:
    model = SCRIPTED[got]()
    with pytest.raises(ValueError, match=f"expected modules and functions in Python, got {got}:"):
        tritonamp.enable(model)


def test_a_function_that_is_scripted_later_is_refused() -> None:
    function = gate

    class OfANonlocal(Gated):
        def forward(self, x: Tensor) -> Tensor:
            return function(self.layer(x))

    model = OfANonlocal()
    tritonamp.enable(model).disable()
    function = torch.jit.script(gate)
    with pytest.raises(ValueError, match="got function, a ScriptFunction in the forward of"):
        tritonamp.enable(model)
    function = gate
    tritonamp.enable(model).disable()


def test_the_advice_is_to_enable_the_original_and_script_it_after_disable() -> None:
    """The text says: enable ... the original, and call torch.jit.script after amp.disable()."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with pytest.raises(ValueError, match=r"call torch.jit.script after amp.disable\(\)"):
        tritonamp.enable(torch.jit.script(model))
    amp = tritonamp.enable(model, level="O2")
    amp.disable()
    scripted, x = torch.jit.script(model), torch.ones(2, 4)
    assert torch.equal(scripted(x), model(x))


@pytest.mark.parametrize("outside", [False, True], ids=["model", "around"])
def test_an_enabled_model_is_scripted_after_disable(outside: bool) -> None:
    inner = nn.Linear(4, 4)
    model = nn.Sequential(inner) if outside else inner
    amp = tritonamp.enable(inner, level="O2")
    with pytest.raises(RuntimeError, match=r"got an enabled Linear: call amp.disable\(\) before"):
        torch.jit.script(model)
    amp.disable()
    assert torch.jit.script(model)(torch.ones(2, 4)).dtype == torch.float32
