"""Parameters that are sharded over ranks as DTensors, by FSDP2 or tensor parallelism."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tritonamp.distributed.fsdp import fsdp2_modules, holds_layers_apart
from tritonamp.kernels._shards import is_sharded


class Sharding(NamedTuple):
    """The sharding of models' parameters over ranks."""

    group: Any  # the ranks that have parts of them
    size: int  # of the group
    gathered: bool  # FSDP2 gathers the parameters
    splits_layers: bool  # parameters stay parts in forwards (tensor parallelism), gathered or not

    def copies(self, param: Any) -> int:
        """Return the number of ranks that hold the same part of a parameter or gradient."""
        parts = 1
        if is_sharded(param):
            for size, placement in zip(param.device_mesh.shape, param.placements, strict=True):
                parts *= 1 if placement.is_replicate() else size
        return self.size // parts


def meshes(models: Iterable[nn.Module]) -> list[Any]:
    """Return the device meshes of parameters, the largest one first."""
    params: Iterable[Any] = (p for model in models for p in model.parameters())
    found = dict.fromkeys(p.device_mesh for p in params if is_sharded(p))
    return sorted(found, key=lambda mesh: -mesh.size())


def find_sharding(models: Sequence[nn.Module]) -> Sharding | None:
    """Return the sharding of the parameters; None if no parameter is sharded."""
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
    """Return the whole tensor of a sharded one, and other tensors unchanged.

    All ranks take part.
    """
    result: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return result


def by_mesh(tensors: Iterable[Any]) -> list[list[Tensor]]:
    """Return a list of tensors per mesh, and one of plain tensors, because torch mixes none."""
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
