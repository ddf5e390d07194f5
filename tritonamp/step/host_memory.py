"""Memory of device tensors, moved to pinned host memory and back."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

BLOCK = 1 << 26
"""Bytes of one block of pinned memory. torch rounds each block up to a power of two."""


class HostMemory:
    """The bits of device tensors in pinned host memory, while their device memory is free.

    The tensors stay the same objects: their storages are emptied here, and filled again by
    ``put_back``. Views and tied tensors share a storage, which moves once, as a whole. Writes here
    do not count in ``Tensor._version``, because autograd would then refuse the bits that it has
    saved. The tensors must not be used in between, because they have sizes but no memory.

    Making one waits for the device.

    Args:
        tensors: plain tensors on any device.

    Attributes:
        nbytes: number of bytes that were moved.

    Raises:
        RuntimeError: there is not enough host memory; no tensor has changed then.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found = {t.untyped_storage().data_ptr(): t for t in tensors if _can_move(t)}
        self._bytes = [_bytes_of(t) for t in found.values()]
        self._sizes = [len(x) for x in self._bytes]
        self.nbytes = sum(self._sizes)
        pinned = any(x.is_cuda for x in self._bytes)
        # another stream may still be writing to the tensors, and the copies below run on this one
        _wait(self._bytes)
        self._blocks = [
            torch.empty(min(BLOCK, self.nbytes - begin), dtype=torch.uint8, pin_memory=pinned)
            for begin in range(0, self.nbytes, BLOCK)
        ]
        for of_storage, of_block in self._pieces():
            of_block.copy_(of_storage, non_blocking=pinned)
        # The copies must have read the storages before these are freed.
        _wait(self._bytes)
        self._resize([0] * len(self._bytes))
        # Freed storages stay in torch's cache, where other processes cannot have them. Without CUDA
        # the call does nothing.
        torch.cuda.empty_cache()

    def put_back(self) -> None:
        """Give the tensors device memory with the same bits. Call it once.

        Raises:
            torch.OutOfMemoryError: the device has not enough memory; nothing has changed then.
        """
        try:
            self._resize(self._sizes)
        except BaseException:
            # all storages or none, so that ``wake`` can be called again
            self._resize([0] * len(self._bytes))
            raise
        for of_storage, of_block in self._pieces():
            of_storage.copy_(of_block, non_blocking=of_storage.is_cuda)
        # The caller drops the blocks next, and other streams may read the tensors.
        _wait(self._bytes)

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
    """Tell whether torch has allocated the tensor's memory and may free it."""
    storage = tensor.untyped_storage()
    return storage.nbytes() > 0 and storage.resizable()


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's whole storage as a uint8 tensor, whose writes no other tensor counts."""
    # ``data`` has a version counter of its own. A tensor without elements can be viewed as bytes
    # whatever its dtype and strides are.
    nothing = tensor.data.as_strided((0,), (1,), 0).view(torch.uint8)
    return nothing.as_strided((tensor.untyped_storage().nbytes(),), (1,), 0)


def _wait(tensors: Iterable[Tensor]) -> None:
    for device in {x.device for x in tensors if x.is_cuda}:
        torch.cuda.synchronize(device)
