"""Models under FSDP2 (``fully_shard``): how their parameters are spread.

The sharded parameters are FP32 and the masters; FSDP2's MixedPrecisionPolicy makes the half copies
as it gathers them.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn


class Sharding(NamedTuple):
    """How each parameter is spread: over the ranks of ``group``, which hold ``copies`` of it in
    all.
    """

    group: Any
    copies: int


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, of which each rank has a part."""
    return hasattr(tensor, "_local_tensor")


def to_local(tensor: Tensor) -> Tensor:
    """This rank's part of it; the tensor itself where it is not sharded."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def full_tensor(tensor: Any) -> Tensor:
    """The tensor of all ranks' parts; the tensor itself where it is not sharded. All ranks take
    part.
    """
    result: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return result


def find_sharding(models: Sequence[nn.Module]) -> Sharding | None:
    """How the parameters are spread; None: they are not."""
    sharded: Any = next((p for model in models for p in model.parameters() if is_sharded(p)), None)
    if sharded is None:
        return None
    mesh = sharded.device_mesh
    copies = 1
    for size, placement in zip(mesh.shape, sharded.placements, strict=True):
        copies *= size if placement.is_replicate() else 1
    return Sharding((mesh if mesh.ndim == 1 else mesh._flatten()).get_group(), copies)


def fsdp2_modules(model: nn.Module) -> list[Any]:
    """Those that ``fully_shard`` was called on."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # nobody has used it if it is not there
    return [] if fsdp is None else [m for m in model.modules() if isinstance(m, fsdp.FSDPModule)]
