"""Where this rank's part of a DTensor begins in the whole tensor."""

import math
from typing import Any

import torch
from torch import Tensor

from tritonamp.kernels._shards import to_local


def whole_positions(tensor: Any, positions: Tensor, name: str) -> Tensor:
    """Return positions in the flattened whole tensor, int64.

    Args:
        tensor: DTensor of which this rank holds a part.
        positions: int64, in the flattened part.
        name: name of the tensor, for the error.

    Raises:
        RuntimeError: as for ``offsets``.
    """
    found, stride = torch.zeros_like(positions), 1
    rows = zip(to_local(tensor).shape, tensor.shape, offsets(tensor, name), strict=True)
    for part, whole, offset in reversed([*rows]):
        size = max(part, 1)  # an empty part has no positions
        found += (positions % size + offset) * stride
        positions, stride = positions // size, stride * whole
    return found


def offsets(tensor: Any, name: str) -> list[int]:
    """Return by dimension how many elements of the whole tensor come before this rank's part.

    Args:
        tensor: DTensor.
        name: name of the tensor, for the error.

    Raises:
        RuntimeError: the placements do not tell where the part lies.
    """
    sizes, place, found = list(tensor.device_mesh.shape), tensor.device_mesh.get_coordinate(), []
    shape = to_local(tensor).shape
    if place is None:  # a rank outside of the mesh has no part
        return [0] * len(tensor.shape)
    for dim, (part, length) in enumerate(zip(shape, tensor.shape, strict=True)):
        begin, order = 0, _order(tensor.placements, dim, sizes)
        for i in order or ():
            # as torch.chunk: all chunks but the last ones are of this size
            chunk = -(-length // sizes[i])
            before = min(chunk * place[i], length)
            begin, length = begin + before, min(chunk, length - before)
        if order is None or length != part:
            raise RuntimeError(
                "amp.changes(global_positions=True): expected placements that tell where this "
                f"rank's part lies in the whole tensor, got {tuple(tensor.placements)} on a mesh "
                f"of {tuple(sizes)} with a part of {tuple(shape)} of {tuple(tensor.shape)} for "
                f"{name}: without global_positions, positions count in the part"
            )
        found.append(begin)
    return found


def _order(placements: Any, dim: int, sizes: list[int]) -> list[int] | None:
    """Return the dimensions of the mesh that split a dimension, in the order in which they do.

    The order is from left to right, except for strided placements. FSDP2 gives them to parameters
    that tensor parallelism had split before. A split factor is the number of the parts that
    dimensions further right have made before.

    Args:
        placements: placements of the DTensor.
        dim: dimension of the DTensor.
        sizes: sizes of the mesh's dimensions.

    Returns:
        the dimensions of the mesh; None: no order gives these split factors.
    """
    order: list[int] = []
    for i in reversed(range(len(sizes))):
        if getattr(placements[i], "dim", None) != dim:
            continue
        parts = [math.prod(sizes[j] for j in order[:k]) for k in range(len(order) + 1)]
        factor = getattr(placements[i], "split_factor", 1)
        if factor not in parts:
            return None
        order.insert(parts.index(factor), i)
    return order
