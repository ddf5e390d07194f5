"""Checksums of tensors, to compare the bits of two runs."""

import torch
from torch import Tensor

from tritonamp.kernels import _bit_sums
from tritonamp.watched.ops import has_memory


def bit_sum(x: Tensor) -> Tensor | None:
    """Return the sum, modulo 2^64, of the bit patterns of the elements as signed integers.

    One flipped bit always changes it. The host does not wait.

    Returns:
        0-d int64 on the device of ``x``; None if ``x`` is not a dense tensor of torch's own class.
    """
    if not has_memory(x) or x.layout is not torch.strided or x.is_meta or x.is_quantized:
        return None
    return _bit_sums.bit_sum(x)
