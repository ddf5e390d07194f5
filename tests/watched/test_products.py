"""FLOPs and results of the products of a forward, by module, against torch's own count."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tritonamp.watched.ops import OpCall
from tritonamp.watched.products import Products, Share


class Counted(TorchDispatchMode):
    """Counts all ops of one module."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self.products, self.module = Products(), module

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = OpCall(func, args, kwargs or {})
        result = call.run()
        self.products.add(call, result, self.module)
        return result


@pytest.mark.parametrize("inference", [False, True])
def test_flops_are_those_of_torch(inference: bool) -> None:
    linear, x = nn.Linear(3, 5), torch.randn(2, 7, 3)
    conv, image = nn.Conv2d(2, 4, 3), torch.randn(1, 2, 8, 8)
    with torch.inference_mode(inference), Counted("a") as counted:
        scores = linear(x) @ linear(x).mT
        conv(image).relu()
    with FlopCounterMode(display=False) as torchs:
        scores = linear(x) @ linear(x).mT
        conv(image)
    share = counted.products.inside(["a"])
    convolved = 2 * conv(image).numel() * 2 * 9
    elements = 2 * linear(x).numel() + scores.numel() + conv(image).numel()
    assert share == Share(torchs.get_total_flops(), share.flops, elements, convolved)


def test_modules_inside_count_with_those_around_them() -> None:
    products, one = Products(), torch.ones(2, 2)
    call = OpCall(torch.ops.aten.mm.default, (one, one), {})
    for module in ("a", "a.b", "ab", None):
        products.add(call, one, module)
    assert products.inside(["a"]) == Share(32, 64, 8, 0)
    assert products.inside(["a", "a.b"]).flops == products.inside(["a"]).flops
    assert products.inside([""]).flops == 64 and products.inside([]) == Share(0, 64, 0, 0)
