"""Stubs instead of kernels, and a clock, so that only the host's time is measured."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tritonamp.kernels import _launch
from tritonamp.kernels import device as hardware

CPU = torch.device("cpu")


@contextmanager
def stub_launches() -> Iterator[list[int]]:
    """Choose kernels for CPU tensors but run none; yield a list of one number, their launches."""
    count = [0]

    def count_launch(*args: Any, stream: int) -> None:
        count[0] += 1

    def nowhere(*args: Any) -> int:
        return -1

    patches = [
        mock.patch.object(_launch, "INTERPRETED", new=False),
        mock.patch.object(_launch, "_compile", return_value=_Compiled(count_launch)),
        mock.patch.object(_launch, "_compiled", new={}),
        mock.patch.object(torch.cuda, "current_device", nowhere),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", nowhere, create=True),
        mock.patch.dict(hardware._answers, {CPU: True}),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield count


class _Compiled:
    """A compiled kernel whose launches call ``run`` instead."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._run


def least_us(call: Callable[[], Any], repeats: int, inner: int) -> float:
    return least_us_of([call], repeats, inner)[0]


def least_us_of(
    calls: Sequence[Callable[[], Any]],
    repeats: int,
    inner: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return the least time of each call. Calls run in turn, so a slow machine slows all."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, taken in zip(calls, times, strict=True):
            call()
            start = clock()
            for _ in range(inner):
                call()
            taken.append(clock() - start)
    return [1e6 * min(taken) / inner for taken in times]


PARTS_OF_TORCHS_STEP = (
    "_amp_foreach_non_finite_check_and_unscale_",
    "_foreach_norm",
    "_foreach_mul_",
    "_foreach_add_",
    "_fused_adamw_",
    "_amp_update_scale_",
)


@contextmanager
def no_kernels_of_torchs_step(tensors: int) -> Iterator[list[str]]:
    """Replace the kernels of torch.amp's step by stubs; yield a list of the called stubs' names."""
    called: list[str] = []
    norms = [torch.ones(())] * tensors

    def stub(name: str) -> Callable[..., list[Tensor]]:
        def call(*_: Any, **__: Any) -> list[Tensor]:
            called.append(name)
            return norms

        return call

    with mock.patch.multiple(torch, **{name: stub(name) for name in PARTS_OF_TORCHS_STEP}):
        yield called
