"""Tensors cut into blocks that stay in the cache, for eager twins that go over them many times."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritonamp.kernels._transfer import in_main_memory

BLOCK = 1 << 16  # elements: an array of FP32 is 256 KiB; an op on it takes longer than to call it


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the elements of tensors of one shape, block by block, as views.

    Where one tensor stands twice, its block does, too. Tensors on a GPU, small ones, and those that
    do not lie in memory alike, come whole.
    """
    first = tensors[0]
    whole = first.numel() <= BLOCK or first.device.type != "cpu"
    flat = None if whole or any(map(is_traceable_wrapper_subclass, tensors)) else _flat(tensors)
    if flat is None:
        yield tensors
        return
    parts = {key: tensor.split(BLOCK) for key, tensor in flat.items()}
    yield from zip(*(parts[id(tensor)] for tensor in tensors), strict=True)


def _flat(tensors: tuple[Tensor, ...]) -> dict[int, Tensor] | None:
    """Return by id the tensors as one dimension, all in the same order; None: there is no such."""
    first = tensors[0]
    order = sorted(range(first.dim()), key=first.stride, reverse=True)
    laid_out = {id(tensor): tensor.permute(order) for tensor in tensors}
    if not all(tensor.is_contiguous() for tensor in laid_out.values()):
        return None
    return {key: tensor.view(-1) for key, tensor in laid_out.items()}


def overflows(value: Tensor, half: torch.dtype) -> Tensor | None:
    """Tell whether an element that is finite becomes inf in ``half``, 0-d bool.

    The extremes tell, since rounding keeps the order.

    Returns:
        None where the host knows that there is none.
    """
    if not value.numel():
        return None
    known = [in_main_memory(extreme) for extreme in torch.aminmax(value)]
    largest = torch.finfo(half).max
    if all(extreme is not None and abs(extreme) <= largest for extreme in known):
        return None
    extremes = torch.stack(torch.aminmax(value.nan_to_num(0.0, 0.0, 0.0)))
    return extremes.to(half).isinf().any()
