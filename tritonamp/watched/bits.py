"""Checksums of tensors, to compare the bits of two runs."""

import torch
from torch import Tensor

from tritonamp.watched.ops import has_memory

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def bit_sum(x: Tensor) -> Tensor | None:
    """Return the sum, modulo 2^64, of the bit patterns of the elements as signed integers.

    One flipped bit always changes it. The host does not wait.

    Returns:
        0-d int64 on the device of ``x``; None if ``x`` is not a dense tensor of torch's own class.
    """
    if not has_memory(x) or x.layout is not torch.strided or x.is_meta or x.is_quantized:
        return None
    x = x.detach()
    # torch refuses another dtype while a conjugation or a sign is still to be done
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.resolve_neg().view(_INTEGERS[x.element_size()]).sum(dtype=torch.int64)
