"""Models under FSDP2 (``fully_shard``): how their parameters are spread.

The sharded parameters are FP32 and the masters; FSDP2's MixedPrecisionPolicy makes the half copies
as it gathers them.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn


class Sharding(NamedTuple):
    """How each parameter is spread over ranks.

    Attributes:
        group: the ranks that have a part of it.
        copies: how many copies of it they hold in all.
    """

    group: Any
    copies: int


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, of which each rank has a part."""
    # private, where DTensor of torch 2.11 to 2.15 keeps its part: asked without importing DTensor,
    # which only FSDP2 needs
    return hasattr(tensor, "_local_tensor")


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; the tensor itself where it is not sharded."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def full_tensor(tensor: Any) -> Tensor:
    """Return the tensor of all ranks' parts; the tensor itself where it is not sharded.

    All ranks take part.
    """
    result: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return result


def find_sharding(models: Sequence[nn.Module]) -> Sharding | None:
    """Return how the parameters are spread; None: they are not."""
    sharded: Any = next((p for model in models for p in model.parameters() if is_sharded(p)), None)
    if sharded is None:
        return None
    mesh = sharded.device_mesh
    copies = 1
    for size, placement in zip(mesh.shape, sharded.placements, strict=True):
        copies *= size if placement.is_replicate() else 1
    # _flatten is private (torch 2.11 to 2.15): get_group() gives that of one dimension only
    return Sharding((mesh if mesh.ndim == 1 else mesh._flatten()).get_group(), copies)


def fsdp2_modules(model: nn.Module) -> list[Any]:
    """Return the modules inside ``model`` that ``fully_shard`` was called on."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # nobody has used it if it is not there
    return [] if fsdp is None else [m for m in model.modules() if isinstance(m, fsdp.FSDPModule)]
