"""What a rule is: of an instruction that only computes, the function and its operands' types."""

from collections.abc import Callable
from typing import NamedTuple

from gpuless.ptx.arithmetic import Array
from gpuless.ptx.parsing import Unsupported

Function = Callable[..., Array]


class Value(NamedTuple):
    """What an instruction computes.

    Attributes:
        function: of arrays.
        operands: their types in PTX.
        approximate: whether a GPU may be some ulps off.
        padded: whether operands may be registers that were never written.
        repeats: whether there may be more operands of the last one's type.
    """

    function: Function
    operands: tuple[str, ...]
    approximate: bool = False
    padded: bool = False
    repeats: bool = False


Opcode = tuple[str, ...]
"""The parts of an opcode, like ("add", "s32")."""
Rule = Callable[[Opcode], Value]


def allow(opcode: Opcode, *modifiers: str) -> None:
    """Refuse an instruction with other modifiers than these between its name and its type."""
    if not set(opcode[1:-1]) <= set(modifiers):
        raise Unsupported(".".join(opcode))
