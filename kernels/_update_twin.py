"""Load and store of an update in torch, with the bits of ``_update_kernel``."""

import torch
from torch import Tensor

from tritonamp.kernels._small_state import (
    decode,
    encode,
    in_memory_of,
    in_order_of_memory,
    join_master,
    padded,
    random_bits_twin,
    rounded_twin,
    split_codes,
    split_master,
)
from tritonamp.kernels._update_lists import PendingWrites


def load_master(param: Tensor, remainder: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the values to step on, in the shape of ``param``."""
    if remainder is None or remainder is param:  # an FP32 parameter is its own master
        return param.to(dtype)
    flat = join_master(in_order_of_memory(param), remainder[: param.numel()])
    return in_memory_of(param, flat)


def load_state(state: Tensor | None, kind: int, param: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return a state in the shape of ``param``, or None if there is none."""
    if state is None or state.dtype is not torch.uint8:
        return None if state is None else state.to(dtype)
    n = param.numel()
    return in_memory_of(param, decode(*split_codes(state, n), kind)[:n])


def random_of(
    state: Tensor, param: Tensor, step: Tensor | None, number: int, k: int
) -> Tensor | None:
    """Return the random bits of state k, in order of memory; None: round to the nearest."""
    if step is None or state.dtype not in (torch.uint8, torch.bfloat16):
        return None
    return random_bits_twin(param, step, number)[min(k, 1)]


def put_state(
    results: PendingWrites,
    state: Tensor,
    param: Tensor,
    value: Tensor,
    random: Tensor | None,
    kind: int,
) -> None:
    """Plan to write the value of a state of ``param``."""
    if state.dtype is torch.uint8:
        assert random is not None
        n = value.numel()
        # zeros fill the last block, because they do not raise its exponent
        missing = 0, padded(n) - n
        flat = in_order_of_memory(value, like=param)
        whole, bits = (torch.nn.functional.pad(t, missing) for t in (flat, random))
        for target, codes in zip(split_codes(state, n), encode(whole, bits, kind), strict=True):
            results.put(target, codes)
        return
    # Rounded to the nearest in bfloat16, a second moment would never decay.
    if random is not None:
        value = rounded_twin(value, in_memory_of(param, random), 16)
    results.put(state, value)


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
