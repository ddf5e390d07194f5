"""Ranks that save or load together: all succeed, or all raise."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from tritonamp.kernels.device import is_distributed, rank, world_size


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, in the order of ranks."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * world_size()
    try:
        dist.all_gather_object(values, value)
    except RuntimeError as error:  # also where this met a collective of another kind
        raise RuntimeError(
            "the other ranks did not answer: save, save_sharded and load_sharded are called on "
            f"every rank, not under `if rank == 0` ({error})"
        ) from error
    return values


@contextmanager
def on_all_ranks(call: str) -> Iterator[bool]:
    """Yield whether this is rank 0. If the block raises on one rank, all ranks raise.

    A rank raises its own error, or a RuntimeError with ``call`` and the other ranks' errors.
    """
    error = None
    try:
        yield rank() == 0
    except Exception as caught:
        error = caught
    texts = gather(f"{type(error).__name__}: {error}" if error is not None else None)
    if error is not None:
        raise error
    if failed := [f"rank {number}: {text}" for number, text in enumerate(texts) if text]:
        raise RuntimeError(f"{call} failed on {'; '.join(failed)}")
