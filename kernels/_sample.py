"""Small calls of an operation, for the tests that hold for every operation."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class Sample(NamedTuple):
    """How to call an operation on a tensor of halves of any shape and strides, along a dimension.

    Attributes:
        args: maker of the operation's arguments from the tensor and the dimension.
        reads, writes: bytes for each element of the tensor, of whole lines; None: see its tests.
        parts: FP32 numbers that a segment of a shared line leaves; 0: lines are not shared.
        any_order: torch adds up in an order of its own, which strides change.
        variant: what tells it from the operation's other samples.
    """

    args: Callable[[Tensor, int], tuple[Any, ...]]
    reads: int | None = None
    writes: int | None = None
    parts: int = 0
    any_order: bool = False
    variant: str = ""
