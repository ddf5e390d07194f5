"""Dispatch modes that look on while a model trains."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import more
from gpuless.real_cuda import AnyCuda
from torch import nn
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import tritonamp
from tritonamp import functional


class Log(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def train(level: str, mode: Callable[[], Any], backend: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Softmax(-1), nn.Linear(16, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    amp = tritonamp.enable(model, optimizer, level=level, backend=backend)
    for x in torch.randn(3, 5, 8).cuda():
        with mode():
            amp.backward(model(x).float().square().mean())
            amp.clip_grad_norm_(0.1)
            optimizer.step()
        optimizer.zero_grad()
    weights = [p.detach().float().cpu() for p in model.parameters()]
    amp.disable()
    return weights


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("level", ["O1", "O2", *more(["O0", "O3"])])
@pytest.mark.parametrize(
    "mode", [Log, lambda: FlopCounterMode(display=False), DebugMode], ids=["log", "flops", "debug"]
)
def test_a_mode_that_looks_on_changes_nothing(
    gpu: AnyCuda, level: str, mode: Callable[[], Any], backend: str
) -> None:
    expected = train(level, contextlib.nullcontext, backend)
    launches = list(gpu.launches)
    gpu.launches.clear()
    for weight, other in zip(train(level, mode, backend), expected, strict=True):
        assert torch.equal(weight, other)
    # torch's kernels of so few elements, where nobody asked for others
    ours = backend == "triton" and level in ("O1", "O2")
    assert ("softmax_kernel" in launches) is ("softmax_backward_kernel" in launches) is ours
    assert gpu.launches == launches


@pytest.mark.parametrize("function", [functional.softmax, functional.log_softmax, functional.sum])
@pytest.mark.parametrize("numel", [3, 1 << 18])
def test_stock_autocast_keeps_results_half(cuda: torch.device, function, numel: int) -> None:
    """Whether they are torch's, as of small tensors, or ours."""
    x = torch.zeros(numel, device="cuda", dtype=torch.float16)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert function(x, 0).dtype is torch.float16
