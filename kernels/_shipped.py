"""Calls whose kernels ``bench/static.py`` builds without a GPU, and the limits that it checks."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Shipped(NamedTuple):
    """A call whose kernels ``bench/static.py`` builds, and the limits of the builds.

    Attributes:
        name: a unique name, for people.
        function: an operation's Triton form.
        args: the arguments of the call, tensors on the meta device.
        max_registers: registers of a thread.
        max_instructions: for each element, None where a tile is too small to judge.
        exp2: MUFU.EX2 instructions for each element.
        max_shared: bytes of shared memory; None: any.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    max_registers: int
    max_instructions: float | None
    exp2: int
    max_shared: int | None = None
