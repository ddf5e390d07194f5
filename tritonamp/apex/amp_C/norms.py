"""2-norms of lists."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from tritonamp.apex.amp_C._lists import Lists, as_list, checked


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Return the 2-norm of one list of tensors.

    Returns:
        the norm of all elements, shape (1,), and the norm of each tensor, shape (n,) with
        ``per_tensor``, else (0,); float32 (float64 where a tensor is).
    """
    (xs,) = checked("multi_tensor_l2norm", tensor_lists, "x")
    return _norms(noop_flag, xs, None, per_tensor)


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    inv_scale: Tensor,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """Return ``multi_tensor_l2norm`` of ``inv_scale`` times the tensors, which do not change."""
    (xs,) = checked("multi_tensor_unscale_l2norm", tensor_lists, "x")
    return _norms(noop_flag, xs, inv_scale, per_tensor)


def _norms(
    noop_flag: Tensor, tensors: Sequence[Tensor], factor: Tensor | None, per_tensor: bool | None
) -> tuple[Tensor, Tensor]:
    if not len(tensors):
        return noop_flag.new_zeros(1, dtype=torch.float32), noop_flag.new_empty(
            0, dtype=torch.float32
        )
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)
    norms = torch.stack(torch._foreach_norm(as_list(tensors), 2, dtype=dtype))
    if factor is not None:
        norms = norms * factor.abs()
    total = torch.linalg.vector_norm(norms).reshape(1)
    noop_flag.masked_fill_(~torch.isfinite(total), 1)
    return total, norms if per_tensor else norms.new_empty(0)
