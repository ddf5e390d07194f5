"""Host time as ratios to torch's host time, both in one process, without kernels."""

import copy
import time
from collections.abc import Callable
from typing import Any

import steps
import torch
from host_stubs import (
    CPU,
    PARTS_OF_TORCHS_STEP,
    least_us,
    least_us_of,
    no_kernels_of_torchs_step,
    stub_launches,
)
from timing import Work
from torch import Tensor, nn

import tritonamp
from tritonamp.kernels import _facts

Call = Callable[[], Any]


class Empty(torch.autograd.Function):
    """A Function that only allocates its result, to measure the cost of any Function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x


def groups(params: list[nn.Parameter], apart: bool) -> list[Any]:
    """Return an optimizer's first argument; ``apart`` puts each tensor into its own group."""
    return [{"params": [p]} for p in params] if apart else params


def our_step(model: nn.Module, apart: bool) -> Work:
    optimizer = torch.optim.AdamW(groups(list(model.parameters()), apart), lr=steps.LR)
    return steps.our_step(model, optimizer, level="O2", dtype=torch.float16)


def of_465_tensors() -> nn.Module:
    return nn.ModuleList([*steps.tiny(464).children(), nn.Linear(16, 16, bias=False)])


def measure_step(build: steps.Build, apart: bool, repeats: int) -> dict[str, float]:
    """Return the time of our O2 step relative to torch.amp's; ``apart`` is that of ``groups``."""
    params = steps.parameters(build, CPU, torch.float32)
    theirs = steps.FUSED_ADAMW(groups(params, apart))
    with no_kernels_of_torchs_step(len(params)) as called:
        theirs_us = least_us(steps.torchs_step(theirs, params), repeats, 1)
    if missing := set(PARTS_OF_TORCHS_STEP) - set(called):
        raise RuntimeError(f"torch's step does not call {sorted(missing)} any more")
    with stub_launches():
        ours = our_step(build(), apart)
        ours_us = least_us(ours.calls[0], repeats, 1)
        ours.close()
    return ratio_to(ours_us, theirs_us)


def measure_forward(level: str, repeats: int) -> dict[str, float]:
    """Return the time of an empty module's forward with gradients, enabled relative to plain.

    It is that of a forward after the first step, from which on C++ is used.
    """
    _facts.use_native()
    x = torch.zeros(2, 2, requires_grad=True)
    enabled, plain = Nothing(), Nothing()
    optimizer = torch.optim.SGD(enabled.parameters(), lr=0.1)
    with tritonamp.enable(enabled, optimizer, level=level):
        ours_us = least_us(lambda: enabled(x), repeats, 20)
    return ratio_to(ours_us, least_us(lambda: plain(x), repeats, 20))


def measure_overrides(repeats: int) -> dict[str, dict[str, float]]:
    """Return the times of overridden ops with autograd, relative to an empty Function."""
    x = torch.randn(256, 1024).half().requires_grad_()
    weight, bias = torch.ones(1024, requires_grad=True), torch.zeros(1024, requires_grad=True)
    calls: dict[str, Call] = {
        "softmax": lambda: torch.softmax(x, -1),
        "sum": lambda: torch.sum(x, -1),
        "layer_norm": lambda: torch.layer_norm(x, (1024,), weight, bias),
    }
    empty, found = lambda: Empty.apply(x), {}
    with stub_launches(), tritonamp.enable(nn.Linear(2, 2), level="O1") as amp, amp.autocast():
        for name, call in calls.items():
            found[f"{name}_autograd"] = ratio_to(*least_us_of([call, empty], repeats, 20))
    return found


def measure_enable(repeats: int) -> dict[str, float]:
    """Return the time of ``enable`` of 3000 tensors relative to ``copy.deepcopy`` of the model."""
    model, times = steps.tiny(3000), []
    for _ in range(max(repeats // 20, 1)):
        start = time.perf_counter()
        amp = tritonamp.enable(model, level="O2")
        times.append(time.perf_counter() - start)
        amp.disable()
    copying_us = least_us(lambda: copy.deepcopy(model), max(repeats // 20, 1), 1)
    return ratio_to(1e6 * min(times), copying_us)


def ratio_to(ours_us: float, theirs_us: float) -> dict[str, float]:
    return {"us": ours_us, "ratio": ours_us / theirs_us}


def measure_all(repeats: int) -> dict[str, dict[str, float]]:
    """Return microseconds, and ratios to torch, by name."""
    return {
        "step_148": measure_step(steps.SETS["148 small"][1], False, repeats),
        "step_465_groups": measure_step(of_465_tensors, True, repeats),
        "forward_empty_O1": measure_forward("O1", repeats),
        "forward_empty": measure_forward("O2", repeats),
        **measure_overrides(repeats),
        "enable_3000": measure_enable(repeats),
    }
