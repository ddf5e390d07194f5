"""Tensors cut into blocks that stay in the cache, for arithmetic of many passes."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tritonamp.kernels._transfer import in_main_memory

_GRAIN = 1 << 15  # elements: the fewest that torch gives a thread


def block_size() -> int:
    """Return the number of elements of a block, which gives each thread work for one grain.

    A block has at least 1 MiB of FP32, so that its arithmetic outweighs the calls of torch.
    """
    return _GRAIN * max(8, torch.get_num_threads())


def blocks(*tensors: Tensor) -> Sequence[tuple[Tensor, ...]]:
    """Return the elements of tensors of one shape, block by block, as views.

    A tensor that is passed twice is returned twice, as the same view. Tensors on a GPU, small
    tensors, and tensors of different layouts are returned whole.
    """
    return cut(tensors, block_size()) or [tensors]


def cut(tensors: tuple[Tensor, ...], size: int) -> list[tuple[Tensor, ...]] | None:
    """Return blocks of at most ``size`` elements, or None if the tensors stay whole."""
    first = tensors[0]
    whole = first.numel() <= size or first.device.type != "cpu"
    flat = None if whole or any(map(is_traceable_wrapper_subclass, tensors)) else _flat(tensors)
    if flat is None:
        return None
    # by identity: an update in place of a parameter must show in a copy that is the same tensor
    parts = {key: tensor.split(size) for key, tensor in flat.items()}
    return list(zip(*(parts[id(tensor)] for tensor in tensors), strict=True))


Scratch = dict[tuple[str, torch.dtype], Tensor]
"""Memory for intermediate results of one block, by use and dtype, which the next block reuses."""


def reused(scratch: Scratch, name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return contiguous memory of the shape of ``like``, with arbitrary values.

    Args:
        scratch: memory of earlier calls, which is extended if it is too small.
        name: name of the use; calls with one name and dtype share memory.
        like: a tensor on a CPU.
        dtype: dtype of the elements.
    """
    memory = scratch.get((name, dtype))
    if memory is None or memory.numel() < like.numel():
        memory = scratch[name, dtype] = torch.empty(like.shape, dtype=dtype)
    if memory.shape == like.shape:
        return memory
    # the last block of a tensor is shorter, and takes the beginning of the memory
    return memory.view(-1)[: like.numel()].view(like.shape)


def _flat(tensors: tuple[Tensor, ...]) -> dict[int, Tensor] | None:
    """Return the flattened tensors by id, in one common order, or None if no order fits all."""
    first = tensors[0]
    # In one order of memory, element k of every flattened tensor belongs to the same place.
    order = sorted(range(first.dim()), key=first.stride, reverse=True)
    laid_out = {id(tensor): tensor.permute(order) for tensor in tensors}
    if not all(tensor.is_contiguous() for tensor in laid_out.values()):
        return None
    return {key: tensor.view(-1) for key, tensor in laid_out.items()}


def overflows(value: Tensor, half: torch.dtype) -> Tensor | None:
    """Tell whether a finite element becomes inf in ``half``, as a 0-d bool tensor.

    The two extremes are enough, because rounding keeps the order.

    Returns:
        None if the host knows that no element overflows.
    """
    # the host does not know values on a device
    if not value.numel() or (value.device.type == "cpu" and not may_overflow([value], [half])):
        return None
    # Without inf and NaN, and rounded before the test, because rounding takes values just above the
    # largest down to it.
    extremes = torch.stack(torch.aminmax(value.nan_to_num(0.0, 0.0, 0.0)))
    return extremes.to(half).isinf().any()


def may_overflow(values: Iterable[Tensor], halves: Iterable[torch.dtype]) -> bool:
    """Tell whether a finite element may become inf in any of ``halves``.

    False is certain. True may be wrong, where inf or NaN hide the other elements, or where the host
    does not know the values.
    """
    extremes = [extreme for v in values if v.numel() for extreme in torch.aminmax(v)]
    if not extremes:
        return False
    largest = in_main_memory(torch.stack(extremes).abs().amax())
    # NaN fails this comparison, too, and then the extremes say nothing of the other elements
    return largest is None or not largest <= min(torch.finfo(half).max for half in halves)
