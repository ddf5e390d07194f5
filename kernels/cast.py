"""FP32 masters to the half parameters that the forward uses. 6 B/param."""

from collections.abc import Sequence

import torch
from torch import Tensor


def cast_torch(sources: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    if copies:
        torch._foreach_copy_(list(copies), list(sources))


def cast(sources: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    """Writes each source, correctly rounded, into its copy.

    Args:
        sources: n FP32 tensors.
        copies: n tensors of the same shapes, usually half.
    """
    if len(sources) != len(copies):
        raise ValueError(f"got {len(sources)} sources for {len(copies)} copies")
    cast_torch(sources, copies)


def fp32_value(half: Tensor, precise: Tensor) -> Tensor:
    """The FP32 value of a half tensor whose FP32 original is ``precise`` (same shape and device).

    Wherever ``precise`` still rounds to what ``half`` holds it is the better value; elsewhere somebody wrote to
    ``half`` since, and its own value counts.
    """
    with torch.no_grad():
        return torch.where(precise.to(half.dtype) == half, precise, half.float())
