"""Parameters of which each rank has a part: FSDP2's, and those of tensor parallelism (DTensors)."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tritonamp.distributed.fsdp import fsdp2_modules, holds_layers_apart
from tritonamp.kernels._shards import is_sharded


class Sharding(NamedTuple):
    """How the parameters of models are spread over ranks."""

    group: Any  # the ranks that have parts of them
    size: int  # of the group
    gathered: bool  # FSDP2 gathers the parameters
    splits_layers: bool  # parameters stay parts in forwards (tensor parallelism), gathered or not

    def copies(self, param: Any) -> int:
        """Return how many ranks hold the same part of a parameter, or of its gradient."""
        parts = 1
        if is_sharded(param):
            for size, placement in zip(param.device_mesh.shape, param.placements, strict=True):
                parts *= 1 if placement.is_replicate() else size
        return self.size // parts


def meshes(models: Iterable[nn.Module]) -> list[Any]:
    """Return the meshes that parameters are spread over, the largest one first."""
    params: Iterable[Any] = (p for model in models for p in model.parameters())
    found = dict.fromkeys(p.device_mesh for p in params if is_sharded(p))
    return sorted(found, key=lambda mesh: -mesh.size())


def find_sharding(models: Sequence[nn.Module]) -> Sharding | None:
    """Return how the parameters are sharded; None if they are whole."""
    found = meshes(models)
    if not found:
        return None
    mesh = found[0]
    # _flatten is private (torch 2.11 to 2.15): get_group() gives that of one dimension only
    group = (mesh if mesh.ndim == 1 else mesh._flatten()).get_group()
    sharded = [m for model in models for m in fsdp2_modules(model)]
    splits_layers = not sharded or any(map(holds_layers_apart, sharded))
    return Sharding(group, mesh.size(), bool(sharded), splits_layers)


def full_tensor(tensor: Any) -> Tensor:
    """Return the tensor of all ranks' parts; the tensor itself where it is not sharded.

    All ranks take part.
    """
    result: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return result


def by_mesh(tensors: Iterable[Any]) -> list[list[Tensor]]:
    """Return one list for each mesh, and one of tensors on none: torch does not mix them."""
    found: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device_mesh if is_sharded(tensor) else None, []).append(tensor)
    return list(found.values())


def total_norm(grads: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of gradients, each counted once; 0-d. All ranks take part."""
    norms = [full_tensor(nn.utils.get_total_norm(alike)) for alike in by_mesh(grads)]
    if not norms:
        return torch.zeros(())
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
