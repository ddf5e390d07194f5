"""Where the elements of a tensor lie in memory, and the blocks into which they are divided."""

import torch
from torch import Tensor

BLOCK = 128
"""Number of elements of a block. Codes, remainders and bits of changes fill whole blocks."""


def memory_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the tensor's strides if it is dense, else the strides of a contiguous copy.

    The elements of a dense tensor lie next to each other in some order, each once.
    """
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.stride()
    # on meta, where only strides are computed and no memory is taken
    return torch.empty(tensor.shape, device="meta").stride()


def in_memory_of(like: Tensor, flat: Tensor) -> Tensor:
    """Return a view of the n elements of ``flat`` in the shape and memory order of ``like``."""
    return flat.as_strided(like.shape, memory_strides(like))


def in_order_of_memory(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the elements of a tensor, shape (n,), in the memory order of ``like``, or in its own.

    The result is a view if the tensor has that memory order, else a copy.
    """
    strides = memory_strides(tensor if like is None else like)
    if tensor.stride() == strides:
        return tensor.as_strided((tensor.numel(),), (1,))
    return (
        torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        .copy_(tensor)
        .as_strided((tensor.numel(),), (1,))
    )


def padded(numel: int) -> int:
    """Return the number of elements of the whole blocks that hold ``numel`` elements."""
    return -(-numel // BLOCK) * BLOCK
