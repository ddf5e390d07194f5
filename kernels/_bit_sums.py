"""Sums of the bit patterns of a tensor's elements, which have the same bits in any order."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonamp.kernels.device import tl, triton

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Signed integers by their number of bytes."""


@triton.jit
def pattern(x, TYPE: tl.constexpr, BITS: tl.constexpr):
    """Return the bits of ``x``, of a format of BITS bits, as signed integers.

    They are int64, or int32 for 16 bits, of which an int32 can hold the sum of 2^16.
    """
    if tl.float32 != TYPE:
        return x.to(tl.int16, bitcast=True).to(tl.int32)
    elif BITS == 16:
        # the interpreter reads bfloat16 as FP32, whose upper half has the bits of the bfloat16
        return x.to(tl.int32, bitcast=True) >> 16
    else:
        return x.to(tl.int32, bitcast=True).to(tl.int64)


def bit_sum(x: Tensor) -> Tensor:
    """Return the sum, modulo 2^64, of the bit patterns of the elements of ``x``, 0-d int64."""
    x = x.detach()
    # torch refuses another dtype while a conjugation or a sign is still to be done
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.resolve_neg().view(INTEGERS[x.element_size()]).sum(dtype=torch.int64)


def stacked(sums: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return 0-d int64 tensors as one, of shape (n,)."""
    # "nothing" comes first, because stack refuses an empty list
    nothing = torch.zeros((), dtype=torch.int64, device=device)
    return torch.stack([nothing, *sums])[1:]
