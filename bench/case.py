"""One row of the comparison: a piece of work, and the peers that do it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from timing import Work

TIERS = 1, 2, 3


class Case(NamedTuple):
    """One piece of work that several peers do.

    Attributes:
        group: of the tables.
        name: unique.
        dtype, shape: for people.
        elements: of the input; parameters of a step, examples of a training step.
        bytes: the least that have to move for each element; None: memory is not what limits it.
        peers: name to maker of the work on a device.
        path_bytes: by peer the bytes that it moves for each element, if they are known.
        tier: 1: what people ask first; 2: the other rows of the tables of the pages; 3: the rest.
        graph: too small to be timed by events; calls can be captured.
        operations: the kernels' operations that it measures, by name.
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
