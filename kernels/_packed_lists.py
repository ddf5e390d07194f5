"""Operations on packed state: their launches, loads and stores of their twins, samples and builds.

Parameters are half with int16 remainders, or FP32. Moments are codes of one byte, in the format of
``_small_state``.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._launch import Launch
from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels._sample import ListSample
from tritonamp.kernels._shipped import BF16, HALF, WIDE, Shipped, build_name
from tritonamp.kernels._small_state import (
    encode,
    in_memory_of,
    in_order_of_memory,
    join_master,
    moments_size,
    padded,
    split_master,
)
from tritonamp.kernels._tables import NUM_WARPS, Table
from tritonamp.kernels._update_lists import Hyperparameters, PendingWrites, UpdateLists
from tritonamp.kernels.device import WARP_SIZE

LISTS = "params", "grads", "remainders", "moments"
"""Names of the lists of every operation on packed state. "moments" have the shape
(moments_size(numel, n),).
"""
MAX_REGISTERS = 128  # without a limit, ptxas takes fewer registers on sm_89 and spills
_VEC = 4  # elements that a thread holds, so that a warp holds a block


def half_name(table: Table) -> str | None:
    """Return the name of the half type of a table's parameters, or None if they are FP32."""
    dtype = table.dtypes["params"]
    return None if dtype is torch.float32 else str(dtype).removeprefix("torch.")


def packed_launch(
    table: Table, kernel: Any, operands: Sequence[Any], constants: tuple[Any, ...]
) -> Launch:
    """Return the launch of a kernel on the lists ``LISTS``.

    Args:
        table: table of the lists.
        kernel: a ``triton.jit`` function, as in ``Table.launch_of``.
        operands: other tensors, or an ``Operand`` for each.
        constants: constants after the types of parameters and gradients and the half type's name.
    """
    types = table.type("params"), table.type("grads"), half_name(table)
    # unaligned builds need more than the limit, and would spill under it
    maxnreg = MAX_REGISTERS if table.aligned else None
    # whole blocks in a tile also if pointers are not aligned, because the codes of a block share an
    # exponent
    tile = WARP_SIZE * NUM_WARPS * _VEC
    return table.launch_of(
        kernel, LISTS, operands, (*types, *constants), _VEC, maxnreg=maxnreg, tile=tile
    )


def load_master_twin(param: Tensor, remainder: Tensor) -> Tensor:
    """Return the FP32 master, shape (n,), in the memory order of the parameter."""
    values = in_order_of_memory(param)
    if remainder is param:  # an FP32 parameter is its own master
        return values.float()
    return join_master(values, remainder[: param.numel()])


def store_moment_twin(
    results: PendingWrites, moment: tuple[Tensor, Tensor], x: Tensor, random: Tensor, kind: int
) -> None:
    """Plan to write FP32 values, shape (n,), to codes and exponents of whole blocks."""
    codes, _ = moment
    # zeros fill the last block, because they do not raise its exponent
    missing = (0, len(codes) - len(x))
    whole, bits = (torch.nn.functional.pad(t, missing) for t in (x, random))
    for target, value in zip(moment, encode(whole, bits, kind), strict=True):
        results.put(target, value)


def store_master_twin(
    results: PendingWrites, param: Tensor, remainder: Tensor, p: Tensor, overflow: Tensor
) -> Tensor:
    """Plan to write a master, shape (n,); return the parameter's later values, in its order."""
    if remainder is param:
        results.put(param, in_memory_of(param, p))
        return p
    half, rest = split_master(p, param.dtype)
    results.put(remainder[: param.numel()], rest)
    # put_copy sets the flag. The second write wins: ``half`` rounds ties of bfloat16 away from 0.
    results.put_copy(param, in_memory_of(param, p), overflow)
    results.put(param, in_memory_of(param, half))
    return half


def packed_lists(
    params: list[Tensor],
    grads: list[Tensor],
    remainders: list[Tensor],
    moments: int,
    rule: Hyperparameters,
    steps: list[Tensor],
    track_lost: bool = False,
) -> UpdateLists:
    """Return lists of one group with moments of 0. FP32 parameters are their own remainders."""
    codes = [
        torch.zeros(moments_size(p.numel(), moments), dtype=torch.uint8, device=p.device)
        for p in params
    ]
    tensors = TensorLists(
        may_repeat=("remainders",),
        scalars=("steps",),
        coded=("remainders", "moments"),
        params=params,
        grads=grads,
        remainders=remainders,
        moments=codes,
        steps=steps,
    )
    return UpdateLists(tensors, [rule], [0] * len(params), track_lost, "8bit")


def packed_samples(rule: Hyperparameters, moments: int, bytes: int) -> list[ListSample]:
    """Return samples of an optimizer's third step, on half parameters and on FP32 ones.

    Args:
        rule: hyperparameters of all parameters.
        moments: number of moments of each parameter.
        bytes: bytes that a step moves for each half parameter.
    """

    def args(tensors: list[Tensor], half: torch.dtype, halves: bool) -> tuple[Any, ...]:
        params = [t.to(half) if halves else t.clone() for t in tensors]
        remainders = [
            torch.zeros(padded(t.numel()), dtype=torch.int16, device=t.device) for t in tensors
        ]
        steps = [t.new_full((), 2.0) for t in tensors]
        grads = [t.to(half) for t in tensors]
        lists = packed_lists(params, grads, remainders if halves else params, moments, rule, steps)
        return lists, tensors[0].new_full((), 0.5), tensors[0].new_zeros(())

    def results(args: tuple[Any, ...], _: None) -> list[Tensor]:
        lists = args[0].tensors
        found = [t for name in ("params", "moments", "steps") for t in lists[name]]
        if lists["remainders"][0] is lists["params"][0]:
            return found
        # Masters are compared instead of remainders: an FP32 ulp may carry into the half value.
        rows = zip(lists["params"], lists["remainders"], strict=True)
        return found + [join_master(in_order_of_memory(p), r[: p.numel()]) for p, r in rows]

    return [
        ListSample(lambda tensors, half: args(tensors, half, True), results, bytes),
        ListSample(lambda tensors, half: args(tensors, half, False), results, variant="of FP32"),
    ]


def packed_builds(
    name: str,
    triton: Callable[..., None],
    rule: Hyperparameters,
    moments: int,
    loses: bool = False,
) -> Iterator[Shipped]:
    """Yield calls on half parameters of both dtypes and on FP32 ones, with half and FP32 gradients.

    Args:
        name: name of the operation.
        triton: the operation's Triton form.
        rule: hyperparameters of all parameters.
        moments: number of moments of each parameter.
        loses: whether the operation can count lost updates.
    """
    kinds = [(HALF, HALF), (BF16, BF16), (HALF, WIDE), (WIDE, HALF), (WIDE, WIDE)]
    for (param, grad), aligned, lost in itertools.product(kinds, (True, False), (False, True)):
        if lost and (not loses or param is WIDE or grad is WIDE or not aligned):
            continue
        n, start = 4096, 0 if aligned else 1
        params = [torch.empty(n + 8, dtype=param)[start:][:n]]
        grads = [torch.empty(n + 8, dtype=grad)[start:][:n]]
        remainders = params if param is WIDE else [torch.empty(n, dtype=torch.int16)]
        steps = [torch.empty((), dtype=WIDE)]
        lists = packed_lists(params, grads, remainders, moments, rule, steps, lost)
        build = build_name(name, param, grad, not aligned and "unaligned", lost and "lost")
        # a byte for each block: the exponents of a tile are exchanged through shared memory
        shared = (32 if lost else 8) if aligned else None
        # unaligned builds take more registers, since each element has an address and a mask of its
        # own
        registers = MAX_REGISTERS if aligned else 208
        yield Shipped(build, triton, (lists, None, None), registers, max_shared=shared)
