"""Tiles by the length of a line alone, so that a row has the same bits in every batch.

Kernels choose their tiles by the whole shape, because a few long lines need other tiles than many
short ones. A tile decides in which order a line is added up. Inside ``by_length`` a tile depends on
the length of the line alone, and so do the bits of a line's results.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

BATCH_INVARIANT = {name: f"{name}, batch-invariant" for name in ("auto", "triton", "eager")}
"""Backends of calls that have tiles by length, by the backend that the user asked for."""
_ASKED = {invariant: name for name, invariant in BATCH_INVARIANT.items()}
"""The same, by the backend that has tiles by length."""


class _Thread(threading.local):
    """Whether this thread is inside of ``by_length``."""

    inside = False


thread = _Thread()


def asked_backend(backend: str) -> str | None:
    """Return the backend that the user asked for, if ``backend`` has tiles by length, else None."""
    return _ASKED.get(backend)


def is_by_length() -> bool:
    """Tell whether this thread is inside of ``by_length``."""
    return thread.inside


@contextlib.contextmanager
def by_length() -> Iterator[None]:
    """Choose tiles by the length of lines alone in the block, in this thread."""
    before, thread.inside = thread.inside, True
    try:
        yield
    finally:
        thread.inside = before


def called_by_length(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function inside of ``by_length``."""
    with by_length():
        return function(*args)


def aligned(value: Any) -> Any:
    """Copy a tensor whose address is no multiple of 16 bytes; return other values unchanged.

    At such an address a kernel loads fewer neighbours at once, and adds up in another order.
    """
    if isinstance(value, Tensor) and _address(value) % 16:
        return value.clone()
    return value


def _address(x: Tensor) -> Any:
    """Return the address of a tensor, or of a traced one the distance to its memory's begin."""
    try:
        return x.data_ptr()
    except RuntimeError:  # a tracer's tensor has no memory
        return x.storage_offset() * x.element_size()


def element_sigmoid(x: Tensor) -> Tensor:
    """Return ``torch.sigmoid(x)``. Inside of ``by_length``, bits do not depend on the place.

    Outside, torch computes the last elements of a tensor on a CPU by another exp than the others.
    """
    return 1 / (1 + torch.exp(-x)) if is_by_length() else torch.sigmoid(x)
