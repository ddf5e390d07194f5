"""What ``bench/static.py`` builds of a kernel without a GPU, and what it checks."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Shipped(NamedTuple):
    """A call whose kernels ``bench/static.py`` builds, and what the builds have to keep.

    Attributes:
        name: for people, unique.
        function: an operation's Triton form.
        args: of the call, tensors on the meta device.
        max_registers: of a thread.
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
