"""DTensors, of which each rank holds a part. Kernels work on the part."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

_PLAIN = {Tensor, Parameter}  # classes of tensors that hold no other tensors


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, of which each rank holds a part."""
    # private: the attribute in which DTensor of torch 2.11 to 2.15 keeps its part. DTensor is not
    # imported, because only FSDP2 and tensor parallelism need it.
    # Not asked of plain tensors, because an attribute that is missing takes long.
    return type(tensor) not in _PLAIN and hasattr(tensor, "_local_tensor")


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is of torch's own classes, which hold no other tensors."""
    return type(tensor) in _PLAIN


def any_sharded(tensors: Sequence[Tensor]) -> bool:
    """Return whether any of the tensors is a DTensor."""
    # the set of types first: it answers for a list of plain tensors without a look at each tensor
    return not _PLAIN.issuperset(map(type, tensors)) and any(map(is_sharded, tensors))


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, or the tensor itself if it is not sharded."""
    if type(tensor) in _PLAIN:
        return tensor
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def set_local(tensor: Any, data: Any) -> None:
    """Make a DTensor hold the parts of the DTensor ``data``, after ``tensor.data = data``."""
    tensor._local_tensor, tensor._spec = data._local_tensor, data._spec
