"""Copies of FP32 masters into the half parameters that the forward uses. 6 B/param."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tritonamp.kernels._blocks import blocks, overflows
from tritonamp.kernels._implementations import Implementations
from tritonamp.kernels._launch import Launch
from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels._plan import Plan
from tritonamp.kernels._sample import ListSample
from tritonamp.kernels._shipped import Shipped, build_name, shipped_lists
from tritonamp.kernels._tables import chunk_bounds, element_pointer, store_copy, tail_offsets
from tritonamp.kernels.device import tl, triton

# FP32 in 16 bytes, which leaves no gaps between the loads of neighbouring threads
_VEC = 4  # elements that a thread holds


@triton.jit(do_not_specialize=("chunk",))
def cast_kernel(
    params_ptr, copies_ptr, numel_ptr, first_ptr, number_ptr, rows_ptr, overflow_ptr, chunk,
    PARAM: tl.constexpr, COPY: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one chunk of the copies."""
    row = tl.load(rows_ptr + tl.program_id(0))
    begin, whole, end = chunk_bounds(numel_ptr, first_ptr, row, tl.program_id(0), chunk, VEC)
    params = element_pointer(params_ptr, row, PARAM, VEC)
    copies = element_pointer(copies_ptr, row, COPY, VEC)
    overflow_ptr += tl.load(number_ptr + row)
    j = tl.arange(0, BLOCK)
    for at in range(begin, whole, BLOCK):
        offs, mask = at + j, at + j < whole
        x = tl.load(params + offs, mask=mask, other=0.0)
        store_copy(copies, overflow_ptr, offs, mask, x, VEC)
    # a tail of its own, because a mask that ends inside a vector splits every load of the loop
    if whole < end:
        offs = tail_offsets(whole, VEC)
        mask = offs < end
        x = tl.load(params + offs, mask=mask, other=0.0)
        store_copy(copies, overflow_ptr, offs, mask, x, VEC)


def cast_triton(lists: TensorLists) -> None:
    with lists.launches(("copies",)) as plan:
        for launch in plan.prepared("cast", lambda: [*_launches(lists, plan)]):
            launch()


def _launches(lists: TensorLists, plan: Plan) -> Iterator[Launch]:
    for t in plan.tables:
        # None: the parameters of this table are their own copies
        if t.dtypes["copies"] is not None:
            overflow = lists.kept("overflow", (lists.size,), torch.int32, t.device)
            types = t.type("params"), t.type("copies")
            yield t.launch_of(cast_kernel, ("params", "copies"), (overflow,), types, _VEC)


def cast_torch(lists: TensorLists) -> None:
    pairs = [
        (i, p, c)
        for i, (p, c) in enumerate(zip(lists["params"], lists["copies"], strict=True))
        if c is not p
    ]
    # foreach refuses empty lists
    if pairs:
        torch._foreach_copy_([copy for _, _, copy in pairs], [param for _, param, _ in pairs])
    for i, param, copy in pairs:
        overflow = lists.kept("overflow", (lists.size,), torch.int32, param.device)
        # in blocks, because the test for overflow passes over the values several times
        for (block,) in blocks(param.detach()):
            found = overflows(block, copy.dtype)
            if found is not None:
                overflow[lists.numbers[i]].logical_or_(found)


def cast(lists: TensorLists, backend: str = "auto") -> None:
    """Write each parameter, correctly rounded, into its copy.

    Args:
        lists: "params", n FP32 tensors, and "copies", n tensors of the same shapes, usually half,
            or the parameter itself where there is no copy.
        backend: "auto", "triton" or "eager".
    """
    CAST.run(backend, lists.uses_triton(backend, CAST), lists)


def _lists(params: list[Tensor], half: torch.dtype) -> tuple[TensorLists]:
    copies = [torch.zeros_like(param, dtype=half) for param in params]
    return (TensorLists(params=params, copies=copies),)


CAST = Implementations(
    cast_triton, cast_torch, [ListSample(_lists, lambda args, _: args[0]["copies"], bytes=6)]
)


def shipped() -> Iterator[Shipped]:
    """Yield calls for both half dtypes, aligned and not."""
    for half in (torch.float16, torch.bfloat16):
        for aligned in (True, False):
            lists = shipped_lists(aligned, params=torch.float32, copies=half)
            name = build_name("cast", half, not aligned and "unaligned")
            yield Shipped(name, cast_triton, (lists,), max_shared=0)


def fp32_value(half: Tensor, precise: Tensor) -> Tensor:
    """Return the FP32 value of a half tensor whose FP32 original is ``precise``, of its shape.

    An element of ``precise`` that still rounds to that of ``half`` is the better value. Otherwise
    ``half`` has been written to since, and its own value counts.
    """
    with torch.no_grad():
        rounded = precise.to(half.dtype)
        # a zero of the other sign has been written, too
        stays = (rounded == half) & (rounded.signbit() == half.signbit())
        return torch.where(stays, precise, half.float())


def rounds_to(precise: Tensor, half: Tensor) -> Tensor:
    """Tell where FP32 values round to half values, a tie to either neighbour; bool."""
    # Packed masters round ties of bfloat16 away from 0, and torch rounds ties to even.
    rounded = precise.to(half.dtype)
    error = (precise - rounded.float()).abs()
    tie = error.isfinite() & ((precise - half.float()).abs() == error)
    return (rounded == half) | tie
