"""Errors of models under ``enable``, whose cures are tried as errors.md words them."""

import importlib.util
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonamp
from tritonamp.commands.error_pages import find, sections

SECTIONS = sections()


class Calling(nn.Module):
    """A function of two modules and the first one's output, before the second."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self, self.first(x)))


def trained(function: Callable[[Any, Tensor], Tensor], level: str, **fields: Any) -> None:
    model = Calling(function)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with tritonamp.enable(model, optimizer, level=level, backend="eager", **fields) as amp:
        amp.backward(1e-3 * model(torch.randn(4, 4)).square().mean())
        optimizer.step()
        assert amp.history[-1].cause is None


def without_autocast(model: Any, h: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return model.second(h.float())


def product_without_autocast(model: Any, h: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return h.float() @ model.second.weight.mT


MIXED: dict[str, tuple[str, Callable[[Any, Tensor], Tensor]]] = {
    "addmv": ("expected scalar", lambda m, h: torch.addmv(h[0], torch.eye(4), h[0]).expand(4, 4)),
    "mv": ("expected scalar", lambda m, h: torch.mv(torch.eye(4), h[0]).expand(4, 4)),
    "sparse.mm": ("expected scalar", lambda m, h: torch.sparse.mm(torch.eye(4).to_sparse(), h)),
    "csr": ("not implemented", lambda m, h: torch.sparse.mm(torch.eye(4).to_sparse_csr(), h)),
    "lerp": ("expected dtype float for end", lambda m, h: torch.lerp(torch.zeros(4, 4), h, 0.5)),
    "foreach": (
        "expected dtype float for end",
        lambda m, h: torch._foreach_lerp([torch.zeros(4, 4)], [h], 0.5)[0],
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize("name", MIXED)
def test_o2_casts_what_o3_does_not(name: str) -> None:
    title, function = MIXED[name]
    with pytest.raises(RuntimeError) as caught:
        trained(function, "O3")
    (page,) = find(str(caught.value), SECTIONS)
    assert page.title.startswith(title)
    for level in ("O1", "O2"):
        trained(function, level)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("function", [without_autocast, product_without_autocast])
def test_a_region_without_autocast(function: Any, level: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        trained(function, level)
    (page,) = find(str(caught.value), SECTIONS)
    assert "`autocast(enabled=False)`" in page.body and "`fp32_modules`" in page.body
    trained(function, level, fp32_modules=["second"])


def has_onnx() -> bool:
    return importlib.util.find_spec("onnx") is not None


EXPORTS: list[Callable[[nn.Module], Any]] = [
    torch.jit.script,
    lambda model: torch.onnx.export(model, (torch.ones(2, 2),), io.BytesIO(), dynamo=False),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("export", EXPORTS, ids=["script", "onnx"])
def test_an_export_takes_a_plain_model(export: Callable[[nn.Module], Any], level: str) -> None:
    model = nn.Linear(2, 2)
    amp = tritonamp.enable(model, level=level)
    with pytest.raises(RuntimeError, match=r"call amp\.disable\(\) before") as caught:
        export(model)
    (page,) = find(str(caught.value), SECTIONS)
    assert page.title.startswith("torch.jit.script: expected a plain module")
    amp.disable()
    if export is torch.jit.script or has_onnx():
        export(model)
        return
    with pytest.raises(Exception, match="onnx is not installed"):  # the model was traced
        export(model)
