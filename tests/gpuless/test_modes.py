"""Dispatch modes that look on while a model trains."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import more
from gpuless.real_cuda import AnyCuda
from runs import Training
from torch import nn
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tritonamp import functional


class Log(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def trained_under(mode: Callable[[], Any], level: str, backend: str) -> list[torch.Tensor]:
    """Return the weights after three steps, each of them under a mode."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Softmax(-1), nn.Linear(16, 4))
    with Training(model, "AdamW", level, "cuda", lr=0.1, backend=backend) as run:
        for x in torch.randn(3, 5, 8).cuda():
            with mode():
                run.backward(run.loss(x))
                run.amp.clip_grad_norm_(0.1)
                run.optimizer.step()
            run.zero_grad()
        return [p.detach().float().cpu() for p in model.parameters()]


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("level", ["O1", "O2", *more(["O0", "O3"])])
@pytest.mark.parametrize(
    "mode", [Log, lambda: FlopCounterMode(display=False), DebugMode], ids=["log", "flops", "debug"]
)
def test_a_mode_that_looks_on_changes_nothing(
    gpu: AnyCuda, level: str, mode: Callable[[], Any], backend: str
) -> None:
    expected = trained_under(contextlib.nullcontext, level, backend)
    launches = list(gpu.launches)
    gpu.launches.clear()
    for weight, other in zip(trained_under(mode, level, backend), expected, strict=True):
        assert torch.equal(weight, other)
    # torch's kernels of so few elements, unless a test asks for ours
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
