"""An exponential moving average over lists of tensors. 12 B/param for FP32 values.

Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992), with a
constant decay. ``decay * average + (1 - decay) * value`` is computed as ``Tensor.lerp_`` does it,
so that an average that equals its value keeps its bits.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from tritonamp.kernels._implementations import Implementations
from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels._sample import ListSample
from tritonamp.kernels._shipped import Shipped, build_name, shipped_lists
from tritonamp.kernels._tables import chunk_bounds, element_pointer, tail_offsets
from tritonamp.kernels._transfer import transfer
from tritonamp.kernels.device import tl, triton

_VEC = 4  # elements that a thread holds


@triton.jit
def _lerp(offs, mask, averages, params, weight):
    average = tl.load(averages + offs, mask=mask, other=0.0)
    param = tl.load(params + offs, mask=mask, other=0.0).to(tl.float32)
    difference = param - average
    # from the end that is nearer, as torch.lerp does, whose bits these are
    near = tl.where(
        weight < 0.5, average + weight * difference, param - difference * (1.0 - weight)
    )
    tl.store(averages + offs, near, mask=mask)


# weight is an argument instead of a constant, or each decay would compile a kernel
@triton.jit(do_not_specialize=("chunk", "weight"))
def ema_kernel(
    averages_ptr, params_ptr, numel_ptr, first_ptr, number_ptr, rows_ptr, found_inf_ptr, chunk,
    weight, PARAM: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one chunk."""
    # read on the device, because the host would have to wait to know that a step was skipped
    if tl.load(found_inf_ptr) != 0.0:
        return
    row = tl.load(rows_ptr + tl.program_id(0))
    begin, whole, end = chunk_bounds(numel_ptr, first_ptr, row, tl.program_id(0), chunk, VEC)
    averages = element_pointer(averages_ptr, row, tl.float32, VEC)
    params = element_pointer(params_ptr, row, PARAM, VEC)
    j = tl.arange(0, BLOCK)
    for at in range(begin, whole, BLOCK):
        _lerp(at + j, at + j < whole, averages, params, weight)
    # a tail of its own, because a mask that ends inside a vector splits every load of the loop
    if whole < end:
        offs = tail_offsets(whole, VEC)
        _lerp(offs, offs < end, averages, params, weight)


def ema_triton(lists: TensorLists, decay: float, found_inf: Tensor | None) -> None:
    with lists.launches(("averages",)) as plan:
        for t in plan.tables:
            flag = found_inf
            if flag is None:
                # kept memory is zeros, and nothing writes to this one
                flag = lists.kept("zero", (), torch.float32, t.device)
            operands, types = (transfer(flag, t.device),), (t.type("params"),)
            t.launch_of(ema_kernel, ("averages", "params"), operands, types, _VEC, (1.0 - decay,))()


def ema_torch(lists: TensorLists, decay: float, found_inf: Tensor | None) -> None:
    for average, param in zip(lists["averages"], lists["params"], strict=True):
        # from the end that is nearer, in the kernel as well
        near = torch.lerp(average, param.to(average.dtype), 1.0 - decay)
        if found_inf is not None:
            near = torch.where(transfer(found_inf, average.device) != 0, average, near)
        average.copy_(near)


def ema(lists: TensorLists, decay: float, found_inf: Tensor | None, backend: str = "auto") -> None:
    """Move each average towards its parameter: ``decay * average + (1 - decay) * parameter``.

    Args:
        lists: "averages", n FP32 tensors (FP64 for FP64 parameters), updated in place, and
            "params", n tensors of the same shapes and any floating dtype.
        decay: weight of the old average, in [0, 1).
        found_inf: 0-d float32 flag; any value other than 0 leaves every bit unchanged. None: as 0.
        backend: "auto", "triton" or "eager".
    """
    with torch.no_grad():
        EMA.run(backend, lists.uses_triton(backend, EMA), lists, decay, found_inf)


def _sample(decay: float, bytes: int, variant: str) -> ListSample:
    def args(tensors: list[Tensor], half: torch.dtype) -> tuple[TensorLists, float, Tensor]:
        params = [t.to(half) if variant == "of half parameters" else t for t in tensors]
        averages = [2.0 * t for t in tensors]
        flag = tensors[0].new_zeros(())
        return TensorLists(averages=averages, params=params), decay, flag

    return ListSample(args, lambda args, _: args[0]["averages"], bytes, variant)


EMA = Implementations(
    ema_triton,
    ema_torch,
    [
        _sample(0.999, 12, ""),
        _sample(0.25, 0, "of small decay"),
        _sample(0.999, 0, "of half parameters"),
    ],
)


def shipped() -> Iterator[Shipped]:
    """Yield calls on FP32 parameters and on both half dtypes, aligned and not."""
    dtypes = torch.float32, torch.float16, torch.bfloat16
    for dtype, aligned in itertools.product(dtypes, (True, False)):
        lists = shipped_lists(aligned, averages=torch.float32, params=dtype)
        name = build_name("ema", dtype, not aligned and "unaligned")
        yield Shipped(name, ema_triton, (lists, 0.999, None), max_shared=0)
