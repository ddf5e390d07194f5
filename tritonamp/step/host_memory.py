"""Memory of device tensors, moved to pinned host memory and back."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

BLOCK = 1 << 26
"""Bytes of a piece of pinned memory; torch rounds each piece up to a power of two."""


class HostMemory:
    """The bits of device tensors, in pinned host memory; their device memory is free meanwhile.

    The tensors stay the same objects: their storages are emptied here, and filled again by
    ``put_back``. Views and tied tensors share a storage, which moves once, as a whole. Writes here
    do not count in ``Tensor._version``, by which autograd would refuse the bits that it has saved.
    Nobody may touch the tensors in between: they have sizes, and no memory.

    Waits for the device.

    Args:
        tensors: plain tensors on any device.

    Attributes:
        nbytes: how many bytes were moved.

    Raises:
        RuntimeError: there is not enough host memory; no tensor has changed then.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found = {t.untyped_storage().data_ptr(): t for t in tensors if _can_move(t)}
        self._bytes = [_bytes_of(t) for t in found.values()]
        self._sizes = [len(x) for x in self._bytes]
        self.nbytes = sum(self._sizes)
        pinned = any(x.is_cuda for x in self._bytes)
        _wait(self._bytes)  # for other streams, which may be writing
        self._blocks = [
            torch.empty(min(BLOCK, self.nbytes - begin), dtype=torch.uint8, pin_memory=pinned)
            for begin in range(0, self.nbytes, BLOCK)
        ]
        for of_storage, of_block in self._pieces():
            of_block.copy_(of_storage, non_blocking=pinned)
        _wait(self._bytes)
        self._resize([0] * len(self._bytes))
        torch.cuda.empty_cache()  # for other processes; without CUDA it does nothing

    def put_back(self) -> None:
        """Give the tensors device memory with the same bits; call it once.

        Raises:
            torch.OutOfMemoryError: there is not enough; nothing has changed then.
        """
        try:
            self._resize(self._sizes)
        except BaseException:
            self._resize([0] * len(self._bytes))
            raise
        for of_storage, of_block in self._pieces():
            of_storage.copy_(of_block, non_blocking=of_storage.is_cuda)
        _wait(self._bytes)  # the blocks are free afterwards, and other streams may read

    def _resize(self, sizes: Iterable[int]) -> None:
        for x, size in zip(self._bytes, sizes, strict=True):
            x.untyped_storage().resize_(size)

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of storages, each with the part of a block that holds its bits."""
        moved = 0  # bytes of all pieces before
        for x in self._bytes:
            begin = 0
            while begin < len(x):
                block, offset = self._blocks[moved // BLOCK], moved % BLOCK
                size = min(len(x) - begin, BLOCK - offset)
                yield x[begin : begin + size], block[offset : offset + size]
                begin, moved = begin + size, moved + size


def _can_move(tensor: Tensor) -> bool:
    """Tell whether the tensor has memory that torch has allocated, and may free."""
    storage = tensor.untyped_storage()
    return storage.nbytes() > 0 and storage.resizable()


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's whole storage, uint8, as a tensor whose writes count for nobody else."""
    # ``data`` has a version counter of its own; of no elements, any dtype can be viewed as bytes
    nothing = tensor.data.as_strided((0,), (1,), 0).view(torch.uint8)
    return nothing.as_strided((tensor.untyped_storage().nbytes(),), (1,), 0)


def _wait(tensors: Iterable[Tensor]) -> None:
    for device in {x.device for x in tensors if x.is_cuda}:
        torch.cuda.synchronize(device)
