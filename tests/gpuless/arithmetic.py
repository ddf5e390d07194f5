"""Results of operations that CUDA computes in another way than the CPU, or alone."""

from typing import Any

import pytest
import torch
from gpuless.facts import facts
from gpuless.gpu import Gpu
from torch import Tensor
from torch._decomp import decomposition_table

SOFTMAXES = {
    "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
}  # fmt: skip

aten = torch.ops.aten
WITH_DTYPE = {
    op.dtype: op.default for op in (aten.mm, aten.bmm, aten.addmm, aten.baddbmm)
}  # fmt: skip


def computed(gpu: Gpu, func: Any, args: Any, kwargs: Any) -> Any:
    """Run the operation on tensors of main memory, also where only CUDA has it."""
    known = facts(func)
    if known.name in SOFTMAXES:
        return rounded_once(func, args)
    if func in WITH_DTYPE:  # half operands, an FP32 result
        *given, out = args
        return WITH_DTYPE[func](*(t.to(out) for t in given), **kwargs)
    if func is torch.ops.aten.histc.default and not args[0].is_floating_point():
        return histogram(*args, **kwargs)
    if known.is_random:
        with gpu.random_numbers():
            return func(*args, **kwargs)
    if not known.is_on_cpu:
        if func not in decomposition_table:
            pytest.skip(f"{func} is CUDA's alone: the GPU in software has no arithmetic for it")
        func = decomposition_table[func]
    return func(*args, **kwargs)


def rounded_once(softmax: Any, args: Any) -> Tensor:
    """Run a softmax or its backward, which compute in FP32 from half, and round once."""
    *given, last = args
    backward = softmax._schema.name.endswith("data")
    out = last if backward else torch.float32 if last else given[0].dtype
    wide = [
        x.to(torch.promote_types(x.dtype, torch.float32)) if isinstance(x, Tensor) else x
        for x in given
    ]
    found: Tensor = softmax(*wide, wide[0].dtype if backward else False)
    return found.to(out)


def histogram(x: Tensor, bins: int = 100, min: int = 0, max: int = 0) -> Tensor:
    """Return how many integers lie in each of ``bins`` equal parts of min to max, as CUDA does.

    The CPU has this for floating point only.

    Args:
        x: integers of any shape.
        bins: number of parts.
        min, max: ends, both included; if they are equal, those of ``x``, moved apart by one if
            these are equal, too.
    """
    low, high = int(min), int(max)
    if low == high and x.numel():
        low, high = int(x.min()), int(x.max())
    if low == high:
        low, high = low - 1, high + 1
    inside = x[(x >= low) & (x <= high)].long()
    at = ((inside - low) * bins // (high - low)).clamp(max=bins - 1)
    return torch.bincount(at, minlength=bins).to(x.dtype)
