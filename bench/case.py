"""One row of the comparison: a piece of work and the peers that do it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from timing import Work

TIERS = 1, 2, 3


class Case(NamedTuple):
    """One piece of work that several peers do.

    Attributes:
        group: title of the table that the case belongs to.
        name: unique name.
        dtype, shape: labels of the input for tables.
        elements: number of elements of the input, parameters of a step, or examples of a training
            step.
        bytes: least number of bytes to move per element; None if memory is not the limit.
        peers: by name, a function that makes the work on a device.
        path_bytes: by peer, the bytes that the peer moves per element, where they are known.
        tier: 1 for the questions that people ask first, 2 for the other rows of the pages, 3 for
            the rest.
        graph: whether to time calls in a CUDA graph, because events are too coarse for the work.
        operations: names of the measured operations of the kernels.
    """

    group: str
    name: str
    dtype: str
    shape: str
    elements: int
    bytes: float | None
    peers: dict[str, Callable[[torch.device], Work]]
    path_bytes: dict[str, float] = {}  # noqa: RUF012  never written to
    tier: int = 3
    graph: bool = False
    operations: tuple[str, ...] = ()
