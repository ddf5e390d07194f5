"""DTensors, of which each rank has a part: kernels work on the part."""

from typing import Any

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, of which each rank has a part."""
    # private, where DTensor of torch 2.11 to 2.15 keeps its part: asked without importing DTensor,
    # which only FSDP2 and tensor parallelism need
    return hasattr(tensor, "_local_tensor")


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; the tensor itself where it is not sharded."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def set_local(tensor: Any, data: Any) -> None:
    """Have a DTensor hold the parts of ``data``, another one, after ``tensor.data = data``."""
    tensor._local_tensor, tensor._spec = data._local_tensor, data._spec
