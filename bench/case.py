"""One row of the comparison: what is measured, and who does it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from timing import Work


class Case(NamedTuple):
    """One thing that several peers do.

    Attributes:
        group: of the tables. ``name``: unique.
        elements: of the input; parameters of a step, examples of a training step.
        bytes: the least for each element that has to move, None where that is not what it is about.
        peers: name to maker of the work on a device.
        path_bytes: for each element, what a peer's way through memory is known to take
            (kernels.md).
        quick: part of ``--quick``.
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
    quick: bool = False
    graph: bool = False
    operations: tuple[str, ...] = ()
