"""Stubs in the place of kernels, and the clock: what is left is what the host pays."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tritonamp.kernels import (
    _update_lists,
    cast,
    decide,
    grad_stats,
    norm,
    norm_backward,
    reduce,
    softmax,
    softmax_backward,
)
from tritonamp.kernels import device as hardware

LAUNCHING = (
    _update_lists,
    cast,
    decide,
    grad_stats,
    norm,
    norm_backward,
    reduce,
    softmax,
    softmax_backward,
)


@contextmanager
def stub_launches() -> Iterator[list[int]]:
    """Take kernels for CPU tensors, run none; yield a list whose one number counts launches."""
    count, compiled = [0], {}

    def launch(
        kernel: Any,
        grid: Any,
        tensors: Any,
        sizes: Any,
        constants: Any,
        num_warps: int,
        maxnreg: int | None = None,
    ) -> None:
        count[0] += 1
        key: list[Any] = [id(kernel), 0, num_warps, maxnreg, constants]
        pointers = 0
        for tensor in tensors:
            key.append(tensor.dtype)
            pointers |= tensor.data_ptr()
        compiled.setdefault(tuple(key), pointers & 15 or max(sizes) >= 1 << 31)

    patches = [mock.patch.object(module, "launch", launch) for module in LAUNCHING]
    patches.append(mock.patch.dict(hardware._answers, {torch.device("cpu"): True}))
    for patch in patches:
        patch.start()
    try:
        yield count
    finally:
        for patch in patches:
            patch.stop()


def least_us(call: Callable[[], Any], repeats: int, inner: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(inner):
            call()
        times.append(time.perf_counter() - start)
    return 1e6 * min(times) / inner


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
    """Replace what torch.amp's step launches by stubs; yield a list that the stubs' names go to."""
    called: list[str] = []
    norms = [torch.ones(())] * tensors

    def stub(name: str, *_: Any, **__: Any) -> list[Tensor]:
        called.append(name)
        return norms

    def call(name: str) -> Callable[..., list[Tensor]]:
        return lambda *args, **kwargs: stub(name)

    with mock.patch.multiple(torch, **{name: call(name) for name in PARTS_OF_TORCHS_STEP}):
        yield called
