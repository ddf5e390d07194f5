"""Load and store of an update in torch, with the bits of ``_update_kernel``."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonamp.kernels._memory_order import in_memory_of, in_order_of_memory
from tritonamp.kernels._packed_masters import join_master, split_master
from tritonamp.kernels._random_bits import random_bits_twin
from tritonamp.kernels._state_formats import StateFormat
from tritonamp.kernels._update_lists import PendingWrites


def load_master(param: Tensor, remainder: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the values to step on, in the shape of ``param``."""
    if remainder is None or remainder is param:  # an FP32 parameter is its own master
        return param.to(dtype)
    flat = join_master(in_order_of_memory(param), remainder[: param.numel()])
    return in_memory_of(param, flat)


def random_bits_of(
    formats: Sequence[StateFormat | None], param: Tensor, step: Tensor | None, number: int
) -> list[Tensor | None]:
    """Return the random bits of each state, in order of memory; None: the format takes none."""
    if step is None or not any(f is not None and f.is_random for f in formats):
        return [None] * len(formats)
    first, other = random_bits_twin(param, step, number)
    rows = zip(formats, (first, other, other), strict=False)
    return [bits if f is not None and f.is_random else None for f, bits in rows]


def put_master(
    results: PendingWrites,
    param: Tensor,
    remainder: Tensor | None,
    copy: Tensor,
    p: Tensor,
    overflow: Tensor,
) -> Tensor:
    """Plan to write the stepped-on values and their copy; return what the model will hold."""
    if remainder is not None and remainder is not param:
        half, rest = split_master(in_order_of_memory(p, like=param), param.dtype)
        results.put(remainder[: param.numel()], rest)
        # The first put is for the flag alone. The second one wins, because it is written later: in
        # ``half``, ties of bfloat16 are rounded away from 0.
        results.put_copy(param, p, overflow)
        results.put(param, in_memory_of(param, half))
        return in_memory_of(param, half)
    results.put(param, p)
    if copy is not param:
        results.put_copy(copy, p, overflow)
    return p.to(copy.dtype)
